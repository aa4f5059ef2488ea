"""What became of a script on an engine, in one shape for the replay and for real vLLM.

It serves nothing itself: `replayed` and `emulated` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.engine_bridge.replay.report import DraftCounts
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

INTERVAL_S = 1.0
"""How often an engine is looked at."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """An engine over time: levels at the end of each interval, counts of it."""

    time_s: FloatArray
    """End of each interval, seconds, shape (intervals,)."""
    kv_fraction: FloatArray
    """Part of all KV blocks that running requests of each pool hold, shape (intervals, pools)."""
    preemptions: FloatArray
    """Requests of each tier that lost their place, shape (intervals, tiers)."""
    queue: FloatArray
    """Waiting requests of each tier, shape (intervals, tiers)."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A finished run."""

    requests: Mapping[str, npt.NDArray[Any]]
    """One value a request, in the trace's order; the columns of `ReplayResult.requests`."""
    timeline: Timeline
    end_s: float
    """When the last step ended, seconds."""
    busy_s: float
    """How long the engine was in steps, seconds."""
    drafts: tuple[DraftCounts, ...] = ()
    """Draft tokens by tier; empty for an engine without a draft model."""
    telemetry: Sequence[Telemetry] = ()
    """Of each interval; the replay's only."""

    @property
    def ttft_s(self) -> FloatArray:
        """Time to first token of each request, seconds; NaN without one."""
        wait: FloatArray = self.requests["first_token_s"] - self.requests["arrival_s"]
        return wait

    @property
    def e2e_s(self) -> FloatArray:
        """Time to last token, seconds; NaN without one."""
        whole: FloatArray = self.requests["last_token_s"] - self.requests["arrival_s"]
        return whole

    @property
    def tpot_s(self) -> FloatArray:
        """Mean time per token after the first, seconds; NaN for answers of one token."""
        later = self.requests["generated_tokens"].astype(np.float64) - 1.0
        span: FloatArray = self.requests["last_token_s"] - self.requests["first_token_s"]
        return np.divide(span, later, out=np.full(len(span), np.nan), where=later > 0)

    @property
    def finished(self) -> BoolArray:
        """Whether each request ended with its last token."""
        ended: BoolArray = self.requests["outcome"] == FINISHED
        return ended


FINISHED = 1
"""`outcome` of a request that ended with its last token."""


class Serve(Protocol):
    """Runs a trace to its end."""

    def __call__(self, trace: Trace, plan: Plan, spec: EngineSpec, rules: RuleSet) -> Served:
        """Serve all requests of the trace; the static plan holds throughout."""
        ...


def quantile(values: FloatArray, q: float) -> float:
    """A quantile of what is known; NaN of nothing."""
    known = values[np.isfinite(values)]
    return float(np.quantile(known, q)) if len(known) else float("nan")
