"""Rule 9 inside vLLM: each tier's requests verify as many draft tokens as the books say.

It cuts vLLM's drafts to their tier's length and tells the ledger what was verified; what follows
from it is decided there, as in the replay (`replay.verification`). It makes no drafts: vLLM's
drafter does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.engine_bridge.vllm.ledger import Ledger
from trimtab.engine_bridge.vllm.watch import Watch


class Drafts:
    """Between vLLM's requests and the rule; there is one when vLLM was started with drafts."""

    def __init__(self, requests: dict[str, Any], ledger: Ledger, watch: Watch) -> None:
        """Begin with the lengths of the ledger's allocation.

        Args:
            requests: vLLM's requests by id.
            ledger: The books, told already that the engine drafts.
            watch: Is told what was drafted and accepted.
        """
        self._requests, self._ledger, self._watch = requests, ledger, watch

    def cut(self, request_id: str) -> None:
        """Shorten what a request is about to verify to its tier's length."""
        request = self._requests.get(request_id)
        if request is None:
            return
        most = self._ledger.draft_length(request.priority)
        if len(request.spec_token_ids) > most:
            request.spec_token_ids = request.spec_token_ids[:most]

    def _verifying(self, scheduled: Any, step: int) -> dict[str, int]:
        """Draft tokens of a step by request.

        Without what vLLM pads the last token of a prompt with: who joined in the step has no draft.
        """
        lengths = {}
        for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            row = self._ledger.row(request_id)
            if row is not None and self._ledger.facts(row).joined_step != step:
                lengths[request_id] = len(drafts)
        return lengths

    def extra_ms(self, scheduled: Any, facts: Sequence[float]) -> float:
        """What the drafts of the step that was scheduled just now add to the model's time."""
        lengths = self._verifying(scheduled, self._ledger.step).values()
        if not lengths or not len(facts):
            return 0.0
        return self._ledger.draft_ms(facts, sum(lengths), max(lengths))

    def take(self, scheduled: Any, output: Any, facts: Sequence[float], extra_ms: float) -> None:
        """A step's output is back: let the books learn from it and choose the next lengths.

        Call it when the step is booked and before vLLM ends requests.

        Args:
            scheduled: vLLM's `SchedulerOutput` of the step.
            output: vLLM's `ModelRunnerOutput` of it.
            facts: What the step carried beside drafts, as `Ledger.step_facts` tells.
            extra_ms: What its drafts took.
        """
        if not len(facts):
            return
        drafted = self._verifying(scheduled, self._ledger.step - 1)
        for request_id, drafts in drafted.items():
            at = output.req_id_to_index.get(request_id)
            if at is None or not output.sampled_token_ids or not output.sampled_token_ids[at]:
                continue
            accepted = len(output.sampled_token_ids[at]) - 1
            self._ledger.set_verified(self._ledger.row(request_id), drafts, accepted)
            self._watch.drafts(self._requests[request_id].priority, drafts, accepted)
        drafts = sum(drafted.values())
        self._ledger.take_verified(facts, extra_ms / drafts if drafts else 0.0)
