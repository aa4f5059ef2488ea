"""Rule 9 inside vLLM: how many draft tokens each tier's requests may verify, from what is accepted.

It measures each tier's acceptance, chooses its draft length, cuts vLLM's drafts to it and keeps the
books true where a decode gives more than one token. It makes no drafts: vLLM's drafter does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from trimtab.engine_bridge.rules.speculation import (
    best_drafts,
    tokens_per_step,
    verified_step_ms,
)
from trimtab.engine_bridge.step_time import CoefArray
from trimtab.engine_bridge.vllm.ledger import Ledger
from trimtab.engine_bridge.vllm.watch import Watch

PROBE_STEPS: Final = 64
"""A tier whose length is 0 verifies one draft a request in one of so many steps."""
SETTLE_STEPS: Final = 16
"""Steps between two changes of a tier's length."""
MARGIN: Final = 0.01
"""Share of the batch's rate that a change must win."""
_MEMORY_TOKENS: Final = 96.0
"""Verified drafts that an estimate looks back on, with fewer than that in one step."""
_LEAST_KEPT, _LEAST_KEPT_PROBING = 0.94, 0.5
"""Part of what is known that a step leaves at least: one step of many requests is one sample of
what they are doing now. Probes are rare, and each counts for more."""
_PRIOR: Final = 0.6
_PRIOR_TOKENS: Final = 4.0
_SMOOTHING: Final = 1 / 16


class Acceptance:
    """How often a tier's draft tokens are accepted, each given that the one before it was."""

    def __init__(self) -> None:
        """Nothing is known: a guess that a few tokens outweigh."""
        self._verified = _PRIOR_TOKENS
        self._accepted = _PRIOR * _PRIOR_TOKENS

    @property
    def value(self) -> float:
        """In [0, 1]."""
        return self._accepted / self._verified

    def learn(self, verified: int, accepted: int, probing: bool) -> None:
        """A step's draft tokens, up to each request's first refused one and with it."""
        least = _LEAST_KEPT_PROBING if probing else _LEAST_KEPT
        keep = max(least, 1.0 - verified / _MEMORY_TOKENS)
        self._verified = keep * self._verified + verified
        self._accepted = keep * self._accepted + accepted


class DraftLengths:
    """Each tier's draft length, at most what the allocation allows.

    A tier whose drafts are a loss goes to 0 and probes now and then, at fixed steps, so that it
    notices when they would pay again.
    """

    def __init__(self, coef: CoefArray, most: Sequence[int], *, draft_us: float = 0.0) -> None:
        """Begin with the longest lengths.

        Args:
            coef: The step-time model's coefficients.
            most: Longest length by tier.
            draft_us: Microseconds that drafting one token costs.
        """
        self._coef, self._draft_us = coef, draft_us
        self._most = list(most)
        self.lengths = list(most)
        """Chosen length by tier."""
        self.acceptance = [Acceptance() for _ in most]
        self._verified, self._hits = [0] * len(most), [0] * len(most)
        self._since = [SETTLE_STEPS] * len(most)
        self._steps = 0
        self._facts = np.zeros(5)
        self._decodes = np.zeros(len(most))

    def allow(self, most: Sequence[int]) -> None:
        """Other longest lengths hold."""
        for tier, length in enumerate(most):
            if length != self._most[tier]:
                self.lengths[tier] = length
                self._since[tier] = 0
        self._most = list(most)

    def length(self, tier: int) -> int:
        """Draft tokens that a request of the tier verifies in the next step."""
        chosen = self.lengths[tier]
        if chosen == 0 and self._most[tier] > 0 and self._steps % PROBE_STEPS == 0:
            return 1
        return chosen

    def observe(self, tier: int, drafted: int, accepted: int) -> None:
        """A request has verified `drafted` tokens, of which the first `accepted` were right."""
        self._verified[tier] += min(drafted, accepted + 1)
        self._hits[tier] += accepted

    def choose(self, decodes: Sequence[int], facts: Sequence[float]) -> None:
        """A step is over: choose the lengths of the next one.

        Args:
            decodes: Decoding requests by tier.
            facts: The step without drafts, as for `rules.speculation.verified_step_ms`.
        """
        rate = _SMOOTHING if self._steps else 1.0
        self._steps += 1
        self._facts += rate * (np.asarray(facts) - self._facts)
        self._decodes += rate * (np.asarray(decodes, np.float64) - self._decodes)
        for tier, verified in enumerate(self._verified):
            self._since[tier] += 1
            if verified:
                self.acceptance[tier].learn(verified, self._hits[tier], self.lengths[tier] == 0)
                self._verified[tier] = self._hits[tier] = 0
        for tier, most in enumerate(self._most):
            if most and decodes[tier] and self._since[tier] >= SETTLE_STEPS:
                self._choose(tier)

    def _choose(self, tier: int) -> None:
        others = [t for t in range(len(self._most)) if t != tier]
        tokens = sum(
            self._decodes[t] * tokens_per_step(self.acceptance[t].value, self.lengths[t])
            for t in others
        )
        best = best_drafts(
            self._coef,
            self._facts,
            self._decodes[tier],
            self.acceptance[tier].value,
            float(tokens),
            float(sum(self._decodes[t] * self.lengths[t] for t in others)),
            self._draft_us,
            self._most[tier],
            self.lengths[tier],
            MARGIN,
        )
        if best != self.lengths[tier]:
            self.lengths[tier], self._since[tier] = best, 0


class Drafts:
    """Between vLLM's requests and the rule; there is one when vLLM was started with drafts."""

    def __init__(
        self,
        requests: dict[str, Any],
        ledger: Ledger,
        watch: Watch,
        coef: CoefArray,
        engine_most: int,
    ) -> None:
        """Begin with the lengths of the ledger's allocation.

        Args:
            requests: vLLM's requests by id.
            ledger: The books.
            watch: Is told what was drafted and accepted.
            coef: The step-time model's coefficients.
            engine_most: Draft tokens that vLLM was started with.
        """
        self._requests, self._ledger, self._watch, self._coef = requests, ledger, watch, coef
        self._engine_most = engine_most
        self.lengths = DraftLengths(coef, self._within(ledger.allocation.draft_tokens))

    def _within(self, most: Sequence[int]) -> list[int]:
        return [min(length, self._engine_most) for length in most]

    def allow(self, draft_tokens: Sequence[int]) -> None:
        """Longest lengths by tier of an allocation."""
        self.lengths.allow(self._within(draft_tokens))

    def cut(self, request_id: str) -> None:
        """Shorten what a request is about to verify to its tier's length."""
        request = self._requests.get(request_id)
        if request is None:
            return
        most = self.lengths.length(request.priority)
        if len(request.spec_token_ids) > most:
            request.spec_token_ids = request.spec_token_ids[:most]

    def longer(self, scheduled: Any, model_ms: float, facts: Sequence[float]) -> float:
        """How many times as long as the plain step the model expects the scheduled one to take."""
        drafts = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        if not drafts or not model_ms:
            return 1.0
        # The drafter's own time is part of what drifts: it is not known apart.
        return verified_step_ms(self._coef, np.asarray(facts), float(drafts), 0.0) / model_ms

    def take(self, scheduled: Any, output: Any, facts: Sequence[float]) -> None:
        """A step's output is back: learn from it, choose lengths, and put the books right.

        Call it when the step is booked and before vLLM ends requests.

        Args:
            scheduled: vLLM's `SchedulerOutput` of the step.
            output: vLLM's `ModelRunnerOutput` of it.
            facts: What the step carried beside drafts, as `Ledger.step_facts` tells.
        """
        gained: dict[str, tuple[int, int]] = {}
        for request_id in scheduled.num_scheduled_tokens if output.sampled_token_ids else ():
            request = self._requests.get(request_id)
            at = output.req_id_to_index.get(request_id)
            if request is None or at is None or not output.sampled_token_ids[at]:
                continue
            drafted = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
            accepted = len(output.sampled_token_ids[at]) - 1
            gained[request_id] = drafted, accepted
            if drafted:
                self.lengths.observe(request.priority, drafted, accepted)
                self._watch.drafts(request.priority, drafted, accepted)
        if len(facts):
            self.lengths.choose(self._ledger.decodes, facts)
        for request_id, (drafted, accepted) in gained.items():
            row = self._ledger.row(request_id)
            ahead = self.lengths.length(self._requests[request_id].priority)
            if row is not None and (drafted or ahead):
                self._ledger.note_verified(row, drafted, accepted, ahead)
