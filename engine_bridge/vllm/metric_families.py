"""The Prometheus metrics of an engine: their names, words, labels and buckets, as one table.

It creates them (`Families`); what is put into them is `metrics`' business. Names end in their unit,
counters in `_total`; a fraction of a whole is a `_ratio`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from trimtab.engine_bridge.errors import InputError
from trimtab.engine_bridge.plan import Plan

ENGINE: Final = "engine"
"""Label of every metric: the data-parallel rank, as in vLLM's own metrics."""
OUTCOMES: Final = ("finished", "refused", "shed", "cancelled", "failed", "other")
"""Values of the label `outcome`; what the engine names otherwise counts as the last."""
PROMISE: Final = "promise"
"""Value of the label `kind` of `target_attainment_ratio` where the targets are promised."""
WISH: Final = "wish"
"""The same for a best-effort tier: nothing is promised."""
START_ID: Final = "start_id"
"""A value, not a label: of two starts that have written to one folder the latest counts."""
GAUGE_MODE: Final = "livemostrecent"
"""Of the processes that have written a gauge the latest counts: after a restart of the engine the
new one does, whatever the old one has left in the folder."""

STEP_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08,
    0.12, 0.2, 0.35, 0.6, 1.0, 2.5,
)  # fmt: skip
"""Bucket bounds of a step's time, seconds."""
BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Bucket bounds of a step's batch, requests."""
WAIT_BUCKETS_S: Final = (
    0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
"""Bucket bounds of the wait in the queue, seconds."""
_TTFT_BUCKETS_S: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0, 120.0)
_TPOT_BUCKETS_S: Final = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.5, 1.0)
_E2E_BUCKETS_S: Final = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class MetricsError(InputError):
    """Metrics cannot be made in this process."""


@dataclass(frozen=True)
class Field:
    """How one field of telemetry becomes a metric."""

    field: str
    name: str
    """The metric's name without `trimtab_`."""
    kind: Literal["gauge", "counter"]
    help: str
    scale: float = 1.0
    """What the field is multiplied by, for the metric's unit."""


_MS: Final = 1e-3
TIER_FIELDS: Final = (
    Field("arrivals", "arrivals", "counter", "Requests that arrived."),
    Field("arrived_prompt_tokens", "arrived_prompt_tokens", "counter",
          "Prompt tokens of the requests that arrived."),
    Field("queue_length", "queue_length", "gauge", "Requests that wait."),
    Field("queued_prefill_tokens", "queued_prefill_tokens", "gauge",
          "Prompt tokens that the waiting requests still need computed."),
    Field("oldest_wait_s", "oldest_wait_seconds", "gauge",
          "Wait of the request that has waited longest."),
    Field("running", "running", "gauge", "Requests in the batch."),
    Field("kv_blocks_used", "kv_blocks_used", "gauge",
          "KV blocks that the running requests of the tier's pool hold."),
    Field("kv_blocks_guaranteed", "kv_blocks_guaranteed", "gauge",
          "KV blocks that the tier's pool is guaranteed."),
    Field("kv_blocks_lent", "kv_blocks_lent", "gauge",
          "Guaranteed KV blocks of the tier's pool that other pools' requests hold."),
    Field("prefill_tokens", "prefill_tokens", "counter", "Prompt tokens computed."),
    Field("decode_tokens", "decode_tokens", "counter", "Tokens generated."),
    Field("cached_tokens", "cached_tokens", "counter",
          "Prompt tokens that the cache saved from being computed."),
    Field("finished", "finished", "counter", "Requests that ended with their last token."),
    Field("refused", "refused", "counter", "Requests that were answered with an error."),
    Field("attainment", "attainment_ratio", "gauge",
          "Share of the requests judged in the interval that met their targets; NaN: no data."),
    Field("attainment_samples", "judged", "counter", "Requests judged against their targets."),
    Field("met_tokens", "met_priced_tokens", "counter",
          "Priced tokens (fresh prompt + 0.1 x cached prompt + 3 x output) of requests that met "
          "their targets."),
    Field("ttft_ms_p50", "ttft_p50_seconds", "gauge",
          "Median time to first token in the interval; NaN: no data.", _MS),
    Field("ttft_ms_p99", "ttft_p99_seconds", "gauge",
          "99th percentile of the time to first token in the interval; NaN: no data.", _MS),
    Field("tpot_ms_p50", "tpot_p50_seconds", "gauge",
          "Median time per output token in the interval; NaN: no data.", _MS),
    Field("tpot_ms_p99", "tpot_p99_seconds", "gauge",
          "99th percentile of the time per output token in the interval; NaN: no data.", _MS),
    Field("preemptions", "preemptions", "counter", "Requests that lost their place in the batch."),
    Field("recomputed_tokens", "recomputed_tokens", "counter",
          "Tokens computed again after a preemption."),
    Field("acceptance", "acceptance_ratio", "gauge",
          "Share of draft tokens accepted in the interval; NaN: no speculation."),
    Field("vft_skew_flags", "vft_skew_flags", "counter",
          "Finished requests whose virtual finish was off by more than the plan's fraction."),
    Field("service_ms", "service_seconds", "counter", "Engine time spent on the tier.", _MS),
)  # fmt: skip
"""Every field of `TierTelemetry`; counters add up the intervals, gauges show the last one."""
ENGINE_FIELDS: Final = (
    Field("time_s", "engine_time_seconds", "gauge",
          "End of the last control interval, since the engine's start."),
    Field("interval_s", "interval_seconds", "gauge", "Length of the last control interval."),
    Field("step_ms_mean", "step_mean_seconds", "gauge",
          "Mean time of a step in the interval; NaN: no step.", _MS),
    Field("steps", "steps", "counter", "Steps of the engine."),
    Field("batch_mean", "batch_mean_requests", "gauge",
          "Mean number of requests in a step of the interval; NaN: no step."),
    Field("kv_use_fraction", "kv_use_ratio", "gauge",
          "Part of all KV blocks that running requests hold."),
    Field("busy_fraction", "busy_ratio", "gauge", "Part of the interval in which a step ran."),
    Field("age_s", "telemetry_age_seconds", "gauge",
          "Age of the last interval's figures when they were reported."),
)  # fmt: skip
"""Every field of `Telemetry` that is a number."""
ALLOCATION_FIELDS: Final = (
    ("weights", "allocation_weight", "tier", "Applied weight of the fair queueing."),
    ("kv_fractions", "allocation_kv_ratio", "pool",
     "Applied guaranteed part of the KV blocks, by pool."),
    ("prefill_budget_tokens", "allocation_prefill_budget_tokens", None,
     "Applied most prefill tokens in a step."),
    ("prefill_shares", "allocation_prefill_share_ratio", "tier",
     "Applied share of the prefill budget."),
    ("retention", "allocation_retention_factor", "retention_class",
     "Applied retention factor of a class of cached blocks."),
    ("slack_fraction", "allocation_slack_ratio", None,
     "Applied part of the saved-up slack that one step may spend."),
    ("low_tier_chunk_share", "allocation_low_tier_chunk_share_ratio", None,
     "Applied part of the prefill budget that all low tiers together may use."),
    ("shed_at", "allocation_shed_at_ratio", "tier",
     "Applied multiple of the target at which a request is given up."),
    ("draft_tokens", "allocation_draft_tokens", "tier", "Applied draft length."),
    ("max_running", "allocation_max_running", "tier",
     "Applied cap on running requests; +Inf: none."),
    ("max_num_seqs", "allocation_max_num_seqs", None,
     "Applied cap on all running requests; +Inf: the engine's own."),
)  # fmt: skip
"""Every knob: field of `Allocation`, name, label of its entries, words."""


class Families:
    """Creates metrics in one registry, all with the label `engine`."""

    def __init__(self, registry: Any) -> None:
        """Load prometheus_client, after looking at the folder that it will write to.

        Args:
            registry: A `CollectorRegistry`; None: the process's own, which vLLM serves.

        Raises:
            MetricsError: prometheus_client is not installed, or PROMETHEUS_MULTIPROC_DIR names no
                folder.
        """
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        if folder is not None and not Path(folder).is_dir():
            raise MetricsError(
                "PROMETHEUS_MULTIPROC_DIR",
                value=folder,
                bound="a folder",
                remedy="make it before the server starts, empty",
            )
        try:
            import prometheus_client
        except ImportError as error:
            raise MetricsError(
                "metrics need prometheus-client", remedy="pip install prometheus-client"
            ) from error
        self._client = prometheus_client
        self._registry = prometheus_client.REGISTRY if registry is None else registry

    def gauge(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Any:
        """A gauge `trimtab_NAME`."""
        return self._client.Gauge(
            f"trimtab_{name}",
            help,
            (ENGINE, *labels),
            registry=self._registry,
            multiprocess_mode=GAUGE_MODE,
        )

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Any:
        """A counter `trimtab_NAME_total`."""
        return self._client.Counter(
            f"trimtab_{name}_total", help, (ENGINE, *labels), registry=self._registry
        )

    def histogram(
        self, name: str, help: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Any:
        """A histogram `trimtab_NAME`."""
        return self._client.Histogram(
            f"trimtab_{name}",
            help,
            (ENGINE, *labels),
            registry=self._registry,
            buckets=buckets,
        )


def latency_buckets(
    plan: Plan, target: Literal["ttft_ms", "tpot_ms", "e2e_ms"]
) -> tuple[float, ...]:
    """Bucket bounds of a latency, seconds: a general ladder, and every tier's target itself.

    A bound at the target makes the share of requests within it exact. All tiers have the same
    bounds, so that they can be added up.
    """
    general = {"ttft_ms": _TTFT_BUCKETS_S, "tpot_ms": _TPOT_BUCKETS_S, "e2e_ms": _E2E_BUCKETS_S}
    targets = {
        round(value * _MS, 9)
        for tier in plan.tiers.values()
        if (value := getattr(tier.targets, target)) is not None
    }
    return tuple(sorted({*general[target], *targets}))
