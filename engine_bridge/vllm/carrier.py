"""Carries the plan of a step out on vLLM's own blocks and requests.

The decisions are the ledger's (`replay.plan_fair`); here are their hands: look up what is cached,
preempt, give a joining request its blocks. While vLLM schedules, it answers what was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from trimtab.engine_bridge.vllm.block_queue import RetentionQueue
from trimtab.engine_bridge.vllm.ledger import ADMIT, DONE, GROW, LOOK_UP, PREEMPT, Ledger
from trimtab.engine_bridge.vllm.media_books import MediaBooks
from trimtab.engine_bridge.vllm.requests import PlannedQueue

logger = init_logger(f"vllm.{__name__}")

_STALE_S: Final = 1e-3
"""How long a request that cannot join now is passed over before it is looked at again."""


class Joining(NamedTuple):
    """A request that the plan lets in, with the blocks that it has been given."""

    request: Request
    row: int
    found: tuple[Any, int, int]
    """vLLM's answer to `get_computed_blocks`."""
    blocks: Any
    """vLLM's answer to `allocate_slots`."""
    named_tokens: int
    """Tokens whose full blocks can be found already."""


class PlanCarrier:
    """The hands of one engine's plan.

    Attributes:
        joining: By request id, who joins in the step that comes.
        chunks: By request id, the prefill tokens of that step.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        blocks: RetentionQueue,
        media: MediaBooks,
        manager: Any,
        requests: dict[str, Request],
        waiting: PlannedQueue,
        lookahead_tokens: int,
        draft_tokens: int,
        preempt: Callable[[Request], None],
        joins: Callable[[Request], None],
        free: Callable[[Request], None],
    ) -> None:
        """Take hold of the engine.

        Args:
            ledger: The books, which decide.
            blocks: The free blocks.
            media: The books of images and so on.
            manager: vLLM's KV-cache manager.
            requests: All requests that have not ended, by id.
            waiting: The waiting queue.
            lookahead_tokens: Slots that vLLM keeps for drafts.
            draft_tokens: Drafts of a request in one step.
            preempt: Preempts a running request.
            joins: Told of each request that joins.
            free: Gives a request's blocks back.
        """
        self._ledger, self._blocks, self._media, self._manager = ledger, blocks, media, manager
        self._requests, self._waiting = requests, waiting
        self._lookahead_tokens, self._draft_tokens = lookahead_tokens, draft_tokens
        self._preempt, self._joins, self._free = preempt, joins, free
        self._found: dict[int, tuple[Any, int, int]] = {}
        self.joining: dict[str, Joining] = {}
        self.chunks: dict[str, int] = {}

    def carry_out(self) -> None:
        """Plan the step that comes, doing what the plan says as it goes."""
        ledger, blocks = self._ledger, self._blocks
        ledger.set_blocks(blocks.num_free_blocks, blocks.held)
        self._media.show()
        op = ledger.begin()
        if op == DONE and not ledger.prefills:
            return
        shown = False
        while op != DONE:
            if op == LOOK_UP:
                self._look_up(ledger.op_row)
            elif op == ADMIT:
                self._let_in(ledger.op_row)
            elif op == PREEMPT:
                self._preempt(self._requests[ledger.request_id(ledger.op_row)])
            elif op == GROW:
                ledger.grow()
                blocks.growing = ledger.growing_blocks
                blocks.weight = ledger.growth_weight
                blocks.make_empty(blocks.growing_blocks)
            if op != LOOK_UP or not shown:
                # A look-up moves no block.
                blocks.growing = ledger.growing_blocks
                self.show_blocks()
                shown = True
            op = ledger.next_op()
        # From here on vLLM takes what was kept for them.
        blocks.growing = (0,) * len(blocks.growing)
        if ledger.prefills:
            self.chunks = {ledger.request_id(row): n for row, n in ledger.grants().items()}
            self._hold_encoded()
        self._waiting.plan(joining.request for joining in self.joining.values())

    def show_blocks(self) -> None:
        """Tell the books what is free and held now."""
        blocks = self._blocks
        held = [h + g for h, g in zip(blocks.held, blocks.growing, strict=True)]
        self._ledger.set_blocks(blocks.num_free_blocks - blocks.growing_blocks, held)
        self._ledger.set_classes(*blocks.classes())

    def allocated(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """For vLLM: the blocks that the plan has given; anybody else's are allocated as usual."""
        joining = self.joining.get(request.request_id)
        if joining is not None and request.status != RequestStatus.RUNNING:
            return joining.blocks
        manager = self._manager
        return type(manager).allocate_slots(manager, request, *args, **kwargs)

    def chunk_of(self, request: Request, computed_tokens: int, new_tokens: int) -> int:
        """Tokens that a request takes of the `new_tokens` that vLLM would give it."""
        planned = self.chunks.get(request.request_id)
        if planned is None:
            return 0 if request.is_prefill_chunk else new_tokens
        if new_tokens == 1 + self._draft_tokens > request.num_tokens - computed_tokens:
            # vLLM's padding of a prompt's last token: it insists on it.
            return new_tokens
        return min(new_tokens, planned)

    def settle(self, output: SchedulerOutput) -> None:
        """Book what vLLM did of the plan."""
        ledger = self._ledger
        for request in self._waiting.unplan():
            joining = self.joining.pop(request.request_id)
            self._give_back(joining)
            self._media.withdraw(request)
            ledger.withdraw_admission(joining.row)
            self.chunks.pop(request.request_id, None)
        scheduled = output.num_scheduled_tokens
        given = {request_id: scheduled.get(request_id, 0) for request_id in self.chunks}
        for request_id, tokens in self.chunks.items():
            row = ledger.row(request_id)
            if row is not None and given[request_id] != tokens:
                ledger.set_grant(row, given[request_id])
        self._media.settle(output.scheduled_encoder_inputs, given)
        self._name_blocks()
        self.joining.clear()
        self.chunks.clear()

    def _give_back(self, joining: Joining) -> None:
        """Whom vLLM would not take after all gives its blocks back.

        They bear the names of what the first chunk was to compute in them. Nobody has computed it,
        so nobody may find it.
        """
        request, found = joining.request, joining.found[0].blocks[0]
        held = self._manager.get_blocks(request.request_id).blocks[0]
        self._blocks.unname(held[len(found) :])
        self._free(request)

    def _hold_encoded(self) -> None:
        """What the plan counts on in the encoder cache stays there."""
        if self._media.empty:
            return
        for request_id, tokens in self.chunks.items():
            request, joining = self._requests[request_id], self.joining.get(request_id)
            computed = request.num_computed_tokens if joining is None else joining.found[1]
            self._media.hold(request, computed, tokens)

    def _look_up(self, row: int) -> None:
        """What of the request is cached now."""
        ledger = self._ledger
        request = self._requests[ledger.request_id(row)]
        if request.num_stale_output_tokens:
            ledger.defer(ledger.now_s + _STALE_S)
            return
        found = self._manager.get_computed_blocks(request)
        self._found[row] = found
        hits = found[0].blocks[0]
        idle = sum(1 for block in hits if block.ref_cnt == 0)
        ledger.found(row, target_tokens=request.num_tokens, blocks=len(hits), idle_blocks=idle)

    def _let_in(self, row: int) -> None:
        """Give a request that joins the blocks of its whole prompt (rule 5)."""
        ledger, blocks = self._ledger, self._blocks
        request = self._requests[ledger.request_id(row)]
        found = self._found.pop(row)
        computed, hits = found[1], found[0].blocks[0]
        returns = ledger.preemptions(row) > 0
        blocks.takes(ledger.tier(row), hits, returns)
        if not returns:
            hashes = request.block_hashes[len(hits) :]
            blocks.note_misses(make_block_hash_with_group_id(h, 0) for h in hashes)
        left = request.num_tokens - computed
        tokens = min(ledger.op_tokens, left)
        # vLLM may pad a last token to the shape of a decode with drafts.
        padding = self._draft_tokens if left == 1 else 0
        given = self._manager.allocate_slots(
            request,
            tokens,
            num_new_computed_tokens=computed,
            new_computed_blocks=found[0],
            num_lookahead_tokens=left - tokens + max(padding, self._lookahead_tokens),
        )
        if given is None:
            # The plan counts blocks as vLLM does; should it ever not, a request waits on.
            logger.warning_once("A request that the plan let in found no blocks; it waits.")
            ledger.defer(ledger.now_s + _STALE_S)
            return
        ledger.admit(row)
        self._joins(request)
        self.joining[request.request_id] = Joining(request, row, found, given, computed + tokens)

    def _name_blocks(self) -> None:
        """Blocks of who joined and got more than its first chunk: after the others', as planned."""
        for request_id, joining in self.joining.items():
            computed = joining.found[1] + self.chunks[request_id]
            if computed > joining.named_tokens:
                self._manager.cache_blocks(joining.request, computed)
