"""The part of the ledger that speculation needs: what was verified, and the next lengths (rule 9).

The same state and the same compiled functions as the replay's (`replay.verification`). It knows
requests by their rows, and nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.replay import live
from trimtab.engine_bridge.replay.build import draft_cost
from trimtab.engine_bridge.replay.verification import BY_TIER
from trimtab.engine_bridge.rules.draft_lengths import length_now
from trimtab.engine_bridge.vllm.ledger import Ledger


class DraftBooks:
    """Books of an engine that drafts."""

    def __init__(self, ledger: Ledger, engine_most: int, draft: DraftSpec | None) -> None:
        """Begin before the first request, with the longest lengths that the allocation allows.

        Args:
            ledger: The books of everything else.
            engine_most: Draft tokens of a request in one step that the engine was started with.
            draft: What its drafts cost, as far as it is known.
        """
        self._ledger = ledger
        e = ledger.state.engine[0]
        e.drafting, e.draft_most = BY_TIER, engine_most
        if draft is not None:
            e.draft_kept = draft.kept
            ledger.state.draft_cost[:] = draft_cost(draft)
        ledger.apply(ledger.allocation)

    @property
    def tiers(self) -> Any:
        """Rule 9's record of each tier (`layout.DRAFTING`), to read."""
        return self._ledger.state.drafting

    def length(self, tier: int) -> int:
        """Draft tokens that a request of the tier verifies in the next step."""
        state = self._ledger.state
        return int(length_now(state.drafting[tier], state.engine[0].draft_steps))

    def extra_ms(self, facts: Sequence[float], drafts: int, longest: int) -> float:
        """What drafts add to the model's time of a step.

        Args:
            facts: What it carries beside them, as `Ledger.step_facts` tells.
            drafts: Draft tokens of all requests.
            longest: Most of one request.
        """
        return float(live.draft_ms(self._ledger.handle, np.asarray(facts), drafts, longest))

    def joined_with(self, row: int, step: int) -> bool:
        """Whether a row joined the batch in that step."""
        return bool(self._ledger.facts(row).joined_step == step)

    def verified(self, row: int, drafted: int, accepted: int) -> None:
        """A row has verified drafts in the step that was booked last."""
        r = self._ledger.state.req[row]
        r.drafted, r.accepted = drafted, accepted

    def take(self, facts: Sequence[float], draft_ms: float) -> None:
        """All rows' drafts of that step are told: learn, choose lengths, put the books right.

        Args:
            facts: Of the step, as `Ledger.step_facts` told.
            draft_ms: What each of its drafts took.
        """
        live.verified(self._ledger.handle, np.asarray(facts), draft_ms)
