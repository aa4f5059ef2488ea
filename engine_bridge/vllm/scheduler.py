"""FairScheduler: the fair scheduler's rules inside vLLM V1.

It steers vLLM's own `schedule()` and copies none of it. Before each step it carries the plan out
that `replay.plan_fair` decides on (`ledger`): who gives way is preempted by vLLM's own method, who
joins gets its blocks from vLLM's own KV-cache manager, and each prefill its chunk. Then vLLM
schedules: its waiting queue shows only who joins (`requests`), and `_reserve_prefill_lookahead`
hands each prefill its chunk. What vLLM really did is booked, whatever was planned: the plan is a
wish, vLLM's state is the truth.

`seams` tells which of vLLM's methods this leans on and refuses versions where they differ.
"""

from __future__ import annotations

from typing import Any, Final, cast

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.replay.layout import CANCELLED, FINISHED, NONE, REFUSED, SHED
from trimtab.engine_bridge.vllm import shedding
from trimtab.engine_bridge.vllm.block_queue import retention_queue
from trimtab.engine_bridge.vllm.carrier import PlanCarrier
from trimtab.engine_bridge.vllm.clock import Clock, WallClock
from trimtab.engine_bridge.vllm.control_server import ControlServer
from trimtab.engine_bridge.vllm.control_store import AllocationStore
from trimtab.engine_bridge.vllm.draft_books import DraftBooks
from trimtab.engine_bridge.vllm.drafts import Drafts
from trimtab.engine_bridge.vllm.flying import FlyingStep, FlyingSteps
from trimtab.engine_bridge.vllm.identity import (
    ANONYMOUS,
    SLICE_ARG,
    TENANT_ARG,
    TIER_ARG,
    default_tier,
)
from trimtab.engine_bridge.vllm.idle import IdleIntervals
from trimtab.engine_bridge.vllm.ledger import Ledger
from trimtab.engine_bridge.vllm.media import encoded_counts, encoded_features
from trimtab.engine_bridge.vllm.media_books import MediaBooks
from trimtab.engine_bridge.vllm.requests import PlannedQueue
from trimtab.engine_bridge.vllm.seams import check_engine
from trimtab.engine_bridge.vllm.settings import PluginSettings
from trimtab.engine_bridge.vllm.warm_up import warm_up
from trimtab.engine_bridge.vllm.watch import Watch

logger = init_logger(f"vllm.{__name__}")

_OUTCOMES: Final = {
    RequestStatus.FINISHED_STOPPED: FINISHED,
    RequestStatus.FINISHED_LENGTH_CAPPED: FINISHED,
    RequestStatus.FINISHED_REPETITION: FINISHED,
    RequestStatus.FINISHED_ABORTED: CANCELLED,
}
_NOTHING: Final[tuple[float, list[float]]] = (0.0, [])


class FairScheduler(AsyncScheduler):
    """vLLM V1's scheduler under Trimtab's rules: `--scheduler-cls`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM makes it; the settings are in `--additional-config` under `trimtab`.

        Raises:
            SeamError: this vLLM, or the way it was started, is not supported.
            SettingsError: the settings cannot be used.
        """
        super().__init__(*args, **kwargs)
        check_engine(self)
        self._settings = PluginSettings.of(self.vllm_config.additional_config)
        self._plan: Plan = load_plan(self._settings.plan)
        self._default_tier = self._plan.tier_index(default_tier(self._plan))
        # Whom vLLM preempts by itself, should a plan not hold: the last tier first.
        self.policy = SchedulingPolicy.PRIORITY
        self._clock: Clock = WallClock()
        self._ledger = self._make_ledger()
        self._media = MediaBooks(self._ledger, self, get_engine_spec(self._settings.engine).encoder)
        self._blocks = retention_queue(
            self.kv_cache_manager.block_pool, self._plan, self._ledger.allocation
        )
        self._blocks.guaranteed = self._ledger.guaranteed_blocks
        self.waiting: PlannedQueue = PlannedQueue(self._on_enter, self._on_leave)
        self._unready: list[Request] = []
        self._carrier = PlanCarrier(
            ledger=self._ledger,
            blocks=self._blocks,
            media=self._media,
            manager=self.kv_cache_manager,
            requests=self.requests,
            waiting=self.waiting,
            lookahead_tokens=self.num_lookahead_tokens,
            draft_tokens=self.num_spec_tokens,
            preempt=self._make_way,
            joins=self._joins,
            free=self._free_request_blocks,
        )
        self._flying = FlyingSteps(self._ledger)
        self._shed: list[Request] = []
        self._store = AllocationStore(
            self._plan, capacity_max_num_seqs=self.max_num_active_reqs, clock=self._clock.now_s
        )
        rank = self.vllm_config.parallel_config.data_parallel_rank
        self._watch = Watch(
            self._plan,
            self._settings,
            rank=rank,
            start_id=self._store.start_id,
            block_size=self.hash_block_size,
            now_s=self._clock.now_s(),
        )
        self._drafts = self._take_drafts() if self.num_spec_tokens else None
        self._control = self._serve_control(rank)
        self._idle = IdleIntervals(
            self._end_idle_interval, closes_s=lambda: self._watch.closes_s, now_s=self._clock.now_s
        )
        if self._control is not None or self._watch.has_metrics:
            self._idle.start()
        logger.info(
            "Trimtab's fair scheduler: plan %s, engine %s, %d KV blocks, asynchronous: %s",
            self._plan.name,
            self._settings.engine,
            self._blocks.num_free_blocks,
            self.scheduler_config.async_scheduling,
        )

    def _serve_control(self, rank: int) -> ControlServer | None:
        path, tcp = self._settings.control_socket, self._settings.control_tcp
        if path is None and tcp is None:
            return None
        server = ControlServer(
            self._store,
            path=path,
            tcp=tcp,
            rank=rank,
            telemetry=lambda: self._watch.telemetry,
            flush=self._watch.flush_traffic,
            health=lambda: {
                "engine": self._settings.engine,
                "plan": self._plan.name,
                "steps": self._ledger.step,
                "running": len(self.running),
                "waiting": len(self.waiting),
                "free_blocks": self._blocks.num_free_blocks,
                "blocks": self._blocks.num_free_blocks + sum(self._blocks.held),
            },
        )
        return server.start()

    def shutdown(self) -> None:
        """Close the control socket and write the logs out."""
        self._idle.close()
        if self._control is not None:
            self._control.close()
        self._watch.close()
        super().shutdown()

    def _make_ledger(self) -> Ledger:
        scheduler = self.scheduler_config
        spec = get_engine_spec(self._settings.engine).with_limits(
            max_num_seqs=self.max_num_active_reqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            num_gpu_blocks=self.kv_cache_config.num_blocks,
            block_size=self.block_size,
            enable_prefix_caching=bool(self.cache_config.enable_prefix_caching),
        )
        blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        warm_up(self._plan, spec, draft_tokens=self.num_spec_tokens)
        return Ledger(self._plan, spec, blocks=blocks, max_num_seqs=self.max_num_active_reqs)

    def _take_drafts(self) -> Drafts:
        draft = get_engine_spec(self._settings.engine).draft
        books = DraftBooks(self._ledger, self.num_spec_tokens, draft)
        return Drafts(self.requests, self._ledger, books, self._watch)

    def use_clock(self, clock: Clock) -> None:
        """Take the time from somewhere else than the wall; before the first request."""
        self._clock = clock
        self._store = AllocationStore(
            self._plan,
            capacity_max_num_seqs=self.max_num_active_reqs,
            clock=clock.now_s,
            start_id=self._store.start_id,
        )
        self._watch.start(clock.now_s())
        self._idle.close()

    @property
    def ledger(self) -> Ledger:
        """The books, to read."""
        return self._ledger

    @property
    def given_up(self) -> list[str]:
        """Requests that the last step gave up (rule 15), whose clients are told with its output."""
        return [request.request_id for request in self._shed]

    def next_event_s(self) -> float:
        """When something is due that no request or output announces; infinity if nothing is."""
        return self._ledger.next_event_s()

    def apply(self, allocation: Allocation) -> None:
        """Make a lawful allocation hold from the next step on; between steps only."""
        self._ledger.apply(allocation)
        self._blocks.set_allocation(allocation)
        self._blocks.guaranteed = self._ledger.guaranteed_blocks

    # Requests come and go.

    def _on_enter(self, request: Request) -> None:
        self._idle.wake()
        if request.status == RequestStatus.PREEMPTED:
            return
        if self._is_blocked_waiting_status(request.status):
            self._unready.append(request)
        else:
            self._arrive(request)

    def _arrive(self, request: Request) -> None:
        """A request that can be scheduled comes in."""
        params = request.sampling_params
        labels = (params.extra_args if params is not None else None) or {}
        name = labels.get(TIER_ARG)
        known = isinstance(name, str) and name in self._plan.tiers
        tier = self._plan.tier_index(cast(str, name)) if known else self._default_tier
        request.priority = tier
        request.trimtab_pool = self._plan.pool_of_tier[tier]
        request.trimtab_seen_s = self._clock.now_s()
        found, _, _ = self.kv_cache_manager.get_computed_blocks(request)
        self._ledger.arrive(
            request.request_id,
            tenant=str(labels.get(TENANT_ARG) or ANONYMOUS),
            tier=tier,
            prompt_tokens=request.num_prompt_tokens,
            arrived_s=self._clock.arrived_s(request.arrival_time),
            found_blocks=len(found.blocks[0]),
            media=self._media.enter(request),
            is_slice=SLICE_ARG in labels,
        )

    def _on_leave(self, request: Request) -> None:
        if request in self._unready:
            self._unready.remove(request)

    def _wake_unready(self) -> None:
        """Requests whose grammar is compiled come in now."""
        for request in list(self._unready):
            if self._handle_blocked_waiting_request(request):
                self._unready.remove(request)
                self._arrive(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        row = self._ledger.row(request.request_id)
        if row is not None:
            self._ledger.preempt(row)
            self._watch.preempted()

    def _free_request_blocks(self, request: Request) -> None:
        row = self._ledger.row(request.request_id)
        if row is not None:
            self._blocks.leaves(
                self._ledger.tier(row),
                self.kv_cache_manager.get_blocks(request.request_id).blocks[0],
                self._ledger.now_s,
            )
        super()._free_request_blocks(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        answer = super()._free_request(request, *args, **kwargs)
        if self._ledger.row(request.request_id) is not None:
            self._end(request, _OUTCOMES.get(request.status, REFUSED))
        return answer

    def _end(self, request: Request, outcome: int) -> None:
        ledger = self._ledger
        row = cast(int, ledger.row(request.request_id))
        self._watch.ended(
            request, ledger.facts(row), ledger.tenant(row), outcome, self._clock.now_s()
        )
        ledger.end(request.request_id, outcome, request.num_output_tokens)
        self._media.leave(request.request_id)

    # A step.

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Plan the step by the rules, then let vLLM schedule it."""
        self._idle.wake()
        now_s = self._clock.now_s()
        ledger = self._ledger
        self._flying.book_unbooked()
        self._blocks.now_s = now_s
        changed = self._store.take(now_s)
        if changed is not None:
            self.apply(changed)
        if self._unready:
            self._wake_unready()
        row = ledger.enter(now_s)
        while row != NONE:
            self._give_up(row)
            row = ledger.next_shed()
        if self.pause_state == PauseState.UNPAUSED:
            self._carrier.carry_out()
        output = self._let_schedule(args, kwargs)
        if self._carrier.chunks:
            self._carrier.settle(output)
        model_ms, facts = ledger.step_facts() if output.total_num_scheduled_tokens else _NOTHING
        draft_ms = self._drafts.extra_ms(output, facts) if self._drafts else 0.0
        encoded = encoded_features(output.scheduled_encoder_inputs, self.requests)
        self._flying.add(FlyingStep(model_ms, now_s, facts, draft_ms, encoded_counts(encoded)))
        return output

    def _let_schedule(self, args: Any, kwargs: Any) -> SchedulerOutput:
        """VLLM's own `schedule()`, with the plan's answers in place while it runs."""
        if not self._carrier.joining:
            return super().schedule(*args, **kwargs)
        manager = self.kv_cache_manager
        # An instance attribute hides the method, for this step alone.
        manager.allocate_slots = self._carrier.allocated
        try:
            return super().schedule(*args, **kwargs)
        finally:
            del manager.allocate_slots

    def _get_local_prefix_cache_hit(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[Any, int, int, bool]:
        joining = self._carrier.joining.get(request.request_id)
        if joining is None:
            return super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        return (*joining.found, False)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        # Called for each request right before it takes blocks.
        self._blocks.pool = request.trimtab_pool
        return self._carrier.chunk_of(request, num_computed_tokens, num_new_tokens)

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kw: Any
    ) -> Any:
        # Called before the chunk is cut to the plan's: what lies behind it is not encoded yet.
        chunk = self._carrier.chunk_of(request, num_computed_tokens, num_new_tokens)
        return super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, chunk, *args, **kw
        )

    def _make_way(self, request: Request) -> None:
        """Preempt a running request; its blocks are free at once."""
        self.running.remove(request)
        self._preempt_request(request, self._clock.now_s())

    def _joins(self, request: Request) -> None:
        if request.num_output_tokens == 0:
            self._watch.awaits_first_token(request.request_id)

    # Time and output.

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        """Book the step's time, then let vLLM take the output in."""
        self._idle.wake()
        now_s = self._clock.now_s()
        step, start_s = self._flying.land(self._clock, now_s)
        if self._drafts is not None:
            self._drafts.take(
                scheduler_output,
                model_runner_output,
                step.facts,
                step.draft_ms * self._ledger.scale,
            )
        self._blocks.now_s = now_s
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._watch.output(self.requests, now_s)
        if step.model_ms:
            held = sum(self._blocks.held)
            running, waiting = len(self.running), len(self.waiting)
            step_ms = (now_s - start_s) * 1e3
            self._watch.step(now_s, step_ms, step.facts, running, waiting, held, step.encoded)
        if self._shed:
            shedding.answer(outputs, self._shed)
            self._shed = []
        if self._watch.due(now_s):
            self._end_interval(now_s)
        if not self.requests:
            self._idle.rest()
        return outputs

    def _free_encoder_inputs(self, request: Request) -> None:
        awaited = request.num_output_placeholders
        if not self.scheduler_config.async_scheduling:
            # The asynchronous scheduler takes the token of this output for one under way, and so
            # would keep an item at the prompt's very end for a step more.
            request.num_output_placeholders = 0
        super()._free_encoder_inputs(request)
        request.num_output_placeholders = awaited

    def _end_interval(self, now_s: float) -> None:
        self._carrier.show_blocks()
        self._watch.interval(self._ledger, self._store.describe().lease_left_s, now_s)

    def _end_idle_interval(self, now_s: float) -> None:
        """In the thread of `IdleIntervals`: no step comes that would take an allocation."""
        changed = self._store.take(now_s)
        if changed is not None:
            self.apply(changed)
        self._end_interval(now_s)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Drafts of the step that comes; each tier's are cut to its length."""
        super().update_draft_token_ids(draft_token_ids)
        assert self._drafts is not None, "vLLM makes drafts only when it was started so"
        for request_id in draft_token_ids.req_ids:
            self._drafts.cut(request_id)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if self._drafts is not None and self.scheduler_config.async_scheduling:
            # Placeholders for drafts that the workers are about to make.
            for request_id in scheduler_output.num_scheduled_tokens:
                self._drafts.cut(request_id)

    def _give_up(self, row: int) -> None:
        """Rule 15: the request is too late; its client is told so with the next output."""
        request = self.requests[self._ledger.request_id(row)]
        self._end(request, SHED)
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        self._shed.append(request)
