"""What the engine tells about itself: metrics, the log of steps, the log of requests, telemetry.

The scheduler reports what happens; this passes it on to those that the settings ask for. It decides
nothing, and what it is asked to do in a step takes microseconds.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.layout import CANCELLED, FINISHED, SHED
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.vllm.ledger import Ledger
from trimtab.engine_bridge.vllm.media import logged_items
from trimtab.engine_bridge.vllm.metrics import TierMetrics
from trimtab.engine_bridge.vllm.settings import PluginSettings
from trimtab.engine_bridge.vllm.step_log import NOTHING_ENCODED, StepLog
from trimtab.engine_bridge.vllm.traffic_log import TrafficLog

METRICS_FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Without this variable nobody could read the engine process's metrics, and none are kept."""
_NAMES: Final = {FINISHED: "finished", SHED: "shed", CANCELLED: "cancelled"}
_FAILED: Final = "failed"
_SAME: Final = 1e-9
"""Of an interval: times nearer to its end are at its end."""


class Watch:
    """Metrics and logs of one engine."""

    def __init__(
        self,
        plan: Plan,
        settings: PluginSettings,
        *,
        rank: int,
        start_id: int,
        block_size: int,
        now_s: float,
        max_draft_tokens: int = 0,
    ) -> None:
        """Open what the settings ask for.

        Args:
            plan: Names and targets.
            settings: Folders of the logs, telemetry interval.
            rank: Data-parallel rank; other ranks than 0 log to a folder of their own.
            start_id: Number of this start of the engine, for its metrics.
            block_size: Tokens of a block hash.
            now_s: The scheduler's time.
            max_draft_tokens: Longest draft; 0 without speculation.
        """
        self._plan, self._block_size = plan, block_size
        self.interval_s = settings.interval_s or float(plan.controller.interval_s)
        self._origin_s, origin_unix_s = now_s, time.time()
        self._metrics = (
            TierMetrics(plan, engine=str(rank), start_id=start_id)
            if METRICS_FOLDER in os.environ
            else None
        )
        facts: dict[str, Any] = {
            "engine": settings.engine,
            "plan_digest": plan.digest,
            "origin_unix_s": origin_unix_s,
        }

        def folder(path: str) -> str:
            return path if rank == 0 else os.path.join(path, f"rank-{rank}")

        self._steps = self._traffic = None
        if settings.step_log_dir is not None:
            self._steps = StepLog(folder(settings.step_log_dir), **facts)
        if settings.traffic_log_dir is not None:
            self._traffic = TrafficLog(folder(settings.traffic_log_dir), **facts)
        self.start(now_s)
        self._awaited: dict[str, None] = {}
        self._first_s: dict[str, float] = {}
        self._drafted = np.zeros(len(plan.tiers), np.int64)
        self._accepted = np.zeros(len(plan.tiers), np.int64)
        self._preempted = self._finished = 0
        self.telemetry: Telemetry | None = None
        """The last interval; its time counts from the engine's start."""

    @property
    def has_metrics(self) -> bool:
        """Whether anybody can read the engine's metrics."""
        return self._metrics is not None

    def start(self, now_s: float) -> None:
        """Count from this time of another clock; before the first request."""
        self._origin_s = self._opened_s = now_s
        self._close_next(now_s)

    def awaits_first_token(self, request_id: str) -> None:
        """A request's prompt is being computed for the first time."""
        self._awaited[request_id] = None

    def output(self, requests: dict[str, Any], now_s: float) -> None:
        """A step's output has been taken in: note whose first token it held."""
        for request_id in list(self._awaited):
            request = requests.get(request_id)
            if request is None or request.num_output_tokens > 0:
                del self._awaited[request_id]
                if request is not None:
                    self._first_s[request_id] = now_s

    def drafts(self, tier: int, drafted: int, accepted: int) -> None:
        """Draft tokens of a request were verified."""
        self._drafted[tier] += drafted
        self._accepted[tier] += accepted

    def preempted(self) -> None:
        """A request has lost its place."""
        self._preempted += 1

    def step(
        self,
        now_s: float,
        step_ms: float,
        facts: list[float],
        running: int,
        waiting: int,
        held_blocks: int,
        encoded: Sequence[int] = NOTHING_ENCODED,
    ) -> None:
        """A step has ended.

        Args:
            now_s: When.
            step_ms: Its length, milliseconds.
            facts: Decodes, tokens they read, chunks, tokens of these, query-key pairs (and more).
            running: Requests in the batch.
            waiting: Requests in the queue.
            held_blocks: KV blocks that running requests hold.
            encoded: Media that it encoded, as `step_log.ENCODED` names them.
        """
        decodes, read, chunks, tokens, pairs = facts[:5]
        if self._metrics is not None:
            self._metrics.observe_step(step_ms * 1e-3, int(decodes + chunks))
            self._metrics.observe_encoded(encoded)
        if self._steps is not None:
            self._steps.add(
                now_s - self._origin_s,
                step_ms,
                int(decodes),
                int(read),
                int(chunks),
                int(tokens),
                pairs,
                running,
                waiting,
                held_blocks,
                self._preempted,
                self._finished,
                encoded,
            )
        self._preempted = self._finished = 0

    def ended(self, request: Any, facts: Any, tenant: str, outcome: int, now_s: float) -> None:
        """A request is over.

        Args:
            request: vLLM's request.
            facts: Its record in the ledger.
            tenant: Whose it was.
            outcome: As in `replay.layout`.
            now_s: When.
        """
        self._finished += 1
        name = request.request_id
        self._awaited.pop(name, None)
        first_s = self._first_s.pop(name, None)
        if first_s is None and request.num_output_tokens > 0:
            first_s = now_s
        arrived_s, tokens = float(facts.arrived_s), request.num_output_tokens
        ttft_s = None if first_s is None else first_s - arrived_s
        outcome_name = _NAMES.get(outcome, _FAILED)
        if self._metrics is not None:
            tpot_s = None
            if first_s is not None and tokens > 1:
                tpot_s = (now_s - first_s) / (tokens - 1)
            self._metrics.observe_finished(
                int(facts.tier),
                ttft_s,
                tpot_s,
                now_s - arrived_s,
                float(facts.admitted_s) - arrived_s,
                outcome_name,
            )
        if self._traffic is not None:
            self._traffic.add(
                arrival_s=arrived_s - self._origin_s,
                tenant=tenant,
                tier=self._plan.tier_names[int(facts.tier)],
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=tokens,
                block_hashes=request.block_hashes,
                prefix_block_tokens=self._block_size,
                cached_tokens=int(facts.cached),
                frontend_s=max(0.0, request.trimtab_seen_s - arrived_s),
                ttft_s=ttft_s,
                e2e_s=now_s - arrived_s,
                outcome=outcome_name,
                preemptions=int(facts.preemptions),
                stop_reason="",
                media=logged_items(request.mm_features),
            )

    def due(self, now_s: float) -> bool:
        """Whether the telemetry interval is over."""
        return now_s >= self.closes_s

    def interval(self, ledger: Ledger, lease_left_s: float | None, now_s: float) -> None:
        """Close the telemetry interval and report it."""
        telemetry = self._with_acceptance(ledger.close_interval(now_s, self._opened_s))
        telemetry = replace(telemetry, time_s=now_s - self._origin_s)
        self._opened_s = now_s
        self._close_next(now_s)
        self.telemetry = telemetry
        if self._metrics is not None:
            self._metrics.observe_interval(telemetry)
            self._metrics.observe_lease(lease_left_s)
            if self._metrics.top_tenants:
                self._metrics.observe_tenants(ledger.tenant_service_ms())

    def _close_next(self, now_s: float) -> None:
        """Intervals end on a grid from the start, however far the last step ran over."""
        passed = math.floor((now_s - self._origin_s) / self.interval_s + _SAME)
        self.closes_s = self._origin_s + (passed + 1) * self.interval_s

    def _with_acceptance(self, telemetry: Telemetry) -> Telemetry:
        if not self._drafted.any():
            return telemetry
        share = self._accepted / np.maximum(self._drafted, 1)
        tiers = tuple(
            replace(tier, acceptance=float(share[n])) if self._drafted[n] else tier
            for n, tier in enumerate(telemetry.tiers)
        )
        self._drafted[:] = 0
        self._accepted[:] = 0
        return replace(telemetry, tiers=tiers)

    @property
    def flush_traffic(self) -> Callable[[], Mapping[str, int]] | None:
        """Has the log of requests written out, from any thread; None without one."""
        return None if self._traffic is None else self._traffic.flush_counted

    def close(self) -> None:
        """Write the logs out."""
        for log in (self._steps, self._traffic):
            if log is not None:
                log.close()
