"""What a what-if says: frozen values, and their JSON form (schema 1).

Times are milliseconds unless the name says otherwise; a figure without data is NaN here and null in
JSON. Nothing is computed here.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from trimtab.training.diagnosis.signs import Signs
from trimtab.training.economics.statement import Economics

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Quantiles of a latency, milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class TierMetrics:
    """How one tier fared in one run."""

    requests: int
    finished: int
    refused: int
    """Refused or shed."""
    unfinished: int
    """Still waiting or running when the drain limit came, or never arrived because of that."""
    cancelled: int
    attainment: float
    """Share of `requests` served within every target of the tier."""
    attainment_ttft: float
    attainment_tpot: float
    attainment_e2e: float
    """NaN for a tier without an E2E target; likewise the two above."""
    ttft_ms: Quantiles
    tpot_ms: Quantiles
    e2e_ms: Quantiles
    goodput_tokens_per_s: float
    """Output tokens of requests within their targets, over the trace's duration."""
    preemptions: int
    recomputed_tokens: int
    prompt_tokens: int
    """Of the requests that were admitted: what `cached_tokens` is a part of."""
    cached_tokens: int
    kv_blocks_held: float
    """Mean KV blocks that the running requests of the tier's pool held."""
    kv_blocks_lent: float
    """Mean KV blocks that the tier's pool had lent to others."""
    service_share: float
    """The tier's share of the engine time spent on requests."""
    cost_per_1k_calls: float
    """The tier's part of the engine's cost (`economics`), USD for 1,000 finished requests."""


@dataclass(frozen=True, kw_only=True)
class EngineMetrics:
    """How the engine fared in one run."""

    tokens_per_s: float
    """Output tokens a second while the trace arrived."""
    utilization: float
    """Busy share of the time while the trace arrived."""
    weighted_goodput: float
    """Goodput of the tiers, each times its value."""
    weighted_attainment: float
    steps: int
    end_s: float
    """When the last request ended, or the drain limit."""
    digest: str
    """Digest of the whole run; equal digests are equal runs."""


@dataclass(frozen=True, kw_only=True)
class Fairness:
    """How evenly one run served."""

    jain: dict[str, float]
    """By tier: Jain's index over tenants of the part of their demand that was served."""
    service_gap_ms: float
    """Largest gap of weight-normalised service between two backlogged tiers; NaN under stock
    rules, which keep no such account."""
    service_gap_bound_ms: float
    """What the fair scheduler proves that gap to stay under."""


@dataclass(frozen=True, kw_only=True)
class GuardFacts:
    """What the guard of one run's policy did (`trimtab.agents.guard`)."""

    intervals: int
    """Control intervals judged."""
    fell_back: int
    """Intervals on the static plan for a reason, cool-downs included."""
    trips: int
    """Times that the policy was sent into a cool-down."""
    latched: bool
    """Whether it ended on the static plan for good."""
    reasons: dict[str, int]
    """Intervals by reason; reasons that did not occur are left out."""


@dataclass(frozen=True, kw_only=True)
class TierDrafts:
    """What one tier's requests verified of a draft model's tokens in one run."""

    draft_tokens: int
    acceptance: float
    """Share of them that was accepted; NaN without any."""
    mean_draft_tokens: float
    """Draft tokens that a request verified in a step, mean over its decode steps."""
    tokens_per_step: float
    """Tokens that a request got in a decode step, mean; 1 without drafts."""


@dataclass(frozen=True, kw_only=True)
class TierMedia:
    """What one tier's prompts showed, and what that took the engine in one run."""

    media_tokens: int
    """Prompt tokens of its images, clips of audio and videos."""
    encode_ms: float
    """Engine time spent on encoding them; 0 on an engine without an encoder."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One policy, one seed."""

    policy: str
    seed: int
    tiers: dict[str, TierMetrics]
    engine: EngineMetrics
    fairness: Fairness
    economics: Economics
    """Who paid for the engine, and what that comes to a call and a token."""
    guard: GuardFacts | None = None
    """None for a policy without a guard."""
    signs: Signs | None = None
    """What `trimtab diagnose` reads; None without a request."""
    speculation: dict[str, TierDrafts] | None = None
    """By tier; None for an engine without a draft model."""
    media: dict[str, TierMedia] | None = None
    """By tier; None for a trace without media."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A paired difference, policy minus against, with its 95 % interval."""

    policy: str
    against: str
    metric: str
    """`weighted_attainment`, `weighted_goodput`, or `TIER.attainment`, `TIER.ttft_p99_ms`."""
    mean: float
    ci95: tuple[float, float]

    @property
    def settled(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.ci95[0] > 0 or self.ci95[1] < 0


@dataclass(frozen=True, kw_only=True)
class TraceFacts:
    """Which traffic was replayed."""

    digest: str
    requests: int
    duration_s: float
    offered_load: float
    """Engine time asked for over wall time."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TierFacts:
    """What the plan promises a tier; NaN where it promises nothing."""

    name: str
    value: float
    target: float
    """Share of requests that must be within the targets below."""
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float


@dataclass(frozen=True, kw_only=True)
class WhatIfResult:
    """Everything that a what-if found out, and what is needed to repeat it."""

    engine: str
    plan: str
    trace: TraceFacts
    tiers: tuple[TierFacts, ...]
    results: tuple[RunResult, ...]
    differences: tuple[Difference, ...]
    drain_s: float
    engine_limits: dict[str, Any] = field(default_factory=dict)
    fidelity: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] | None = None
    """The engine's draft model as `DraftSpec` has it; None without one."""
    encoder: dict[str, Any] | None = None
    """The engine's encoders as `EncoderSpec` has them; None without."""
    command: str = ""
    """The command line that repeats it."""

    @property
    def policies(self) -> tuple[str, ...]:
        """The compared labels, in the order given."""
        return tuple(dict.fromkeys(run.policy for run in self.results))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, in the order run."""
        return tuple(dict.fromkeys(run.seed for run in self.results))

    def runs(self, policy: str) -> tuple[RunResult, ...]:
        """The runs of one label, by seed."""
        return tuple(run for run in self.results if run.policy == policy)

    def difference(self, policy: str, metric: str) -> Difference | None:
        """The difference of one label in one metric, if it was compared."""
        for difference in self.differences:
            if difference.policy == policy and difference.metric == metric:
                return difference
        return None

    def to_json(self) -> str:
        """The result as JSON, the same bytes for the same result."""
        return json.dumps(
            jsonable({"schema": SCHEMA, **dataclasses.asdict(self)}), indent=1, allow_nan=False
        )


def jsonable(value: Any) -> Any:
    """The value with tuples as lists and every number that is not finite as None."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
