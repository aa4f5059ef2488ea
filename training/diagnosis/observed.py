"""The requests of a run as a diagnosis reads them, whatever they were read from.

It holds columns and knows how to take them from a replay or a traffic log; what they mean is
`signs`' and `signatures`' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.cache_reach import find_reuse
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.trace import Trace
from trimtab.envs import score

if TYPE_CHECKING:
    from trimtab.training.profile.logged import Logged

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_LOGGED: Final = {
    "finished": score.FINISHED,
    "refused": score.REFUSED,
    "shed": score.SHED,
    "cancelled": score.CANCELLED,
}


class Run(Protocol):
    """What of a replay's result is looked at."""

    @property
    def requests(self) -> Mapping[str, npt.NDArray[Any]]:
        """As `ReplayResult.requests`."""

    @property
    def end_s(self) -> float:
        """When it ended, seconds."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """n requests; every array has shape (n,). Times are seconds on one clock."""

    tier: IntArray
    """Index of the tier in the plan."""
    arrival_s: FloatArray
    admitted_s: FloatArray
    """Joined the batch; NaN where that is not known or never happened."""
    first_token_s: FloatArray
    """NaN without one."""
    last_token_s: FloatArray
    """NaN without one."""
    prompt_tokens: IntArray
    cached_tokens: IntArray
    """Prompt tokens that the cache saved."""
    repeated_tokens: IntArray
    """Prompt tokens that a cache which forgets nothing would have saved; `cached_tokens` where that
    is not known."""
    generated_tokens: IntArray
    preemptions: IntArray
    recomputed_tokens: FloatArray
    """Tokens computed again after a preemption; NaN where that is not known."""
    outcome: IntArray
    """As `score` numbers them."""
    end_s: float
    """End of what was observed."""

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.arrival_s)

    @property
    def uncached_tokens(self) -> IntArray:
        """Prompt tokens that were to be computed, at least 1."""
        return np.maximum(self.prompt_tokens - self.cached_tokens, 1)

    @property
    def new_tokens(self) -> IntArray:
        """Prompt tokens that nobody has sent before, as far as is known, at least 1."""
        known = np.maximum(self.cached_tokens, self.repeated_tokens)
        return np.maximum(self.prompt_tokens - known, 1)

    @property
    def waited_until_s(self) -> FloatArray:
        """When the wait for the first token was over, one way or the other."""
        return np.where(np.isfinite(self.first_token_s), self.first_token_s, self.end_s)


def of_run(result: Run, trace: Trace) -> Observed:
    """A replay's requests that arrived.

    Args:
        result: The run.
        trace: Its traffic, for the prompts' prefixes.
    """
    rows = result.requests
    arrived = np.isfinite(np.asarray(rows["arrival_s"], np.float64))

    def floats(name: str) -> FloatArray:
        return np.asarray(rows[name], np.float64)[arrived]

    def ints(name: str) -> IntArray:
        return np.asarray(rows[name], np.int64)[arrived]

    return Observed(
        tier=ints("tier"),
        arrival_s=floats("arrival_s"),
        admitted_s=floats("admitted_s"),
        first_token_s=floats("first_token_s"),
        last_token_s=floats("last_token_s"),
        prompt_tokens=ints("prompt_tokens"),
        cached_tokens=ints("cached_tokens"),
        repeated_tokens=find_reuse(trace).cached_tokens[arrived],
        generated_tokens=ints("generated_tokens"),
        preemptions=ints("preemptions"),
        recomputed_tokens=floats("recomputed_tokens"),
        outcome=ints("outcome"),
        end_s=float(result.end_s),
    )


def of_log(logged: Logged, plan: Plan) -> Observed:
    """The window of a traffic log. When a request joined the batch is not in it.

    Raises:
        PlanError: the log has a tier that the plan lacks.
    """
    trace, inside = logged.trace, logged.in_window
    place = np.array([plan.tier_index(name) for name in trace.tier_names], np.int64)
    arrival_s = trace.arrival_s[inside]
    first_s = arrival_s + logged.ttft_s[inside]
    last_s = arrival_s + logged.e2e_s[inside]
    outcome = [_LOGGED.get(name, score.UNFINISHED) for name in logged.outcomes]
    unknown = np.full(len(arrival_s), np.nan)
    ends = np.concatenate((arrival_s, first_s, last_s))
    return Observed(
        tier=place[trace.tier][inside],
        arrival_s=arrival_s,
        admitted_s=unknown,
        first_token_s=first_s,
        last_token_s=np.where(logged.ended_well[inside], last_s, np.nan),
        prompt_tokens=trace.prompt_tokens[inside].astype(np.int64),
        cached_tokens=logged.cached_tokens[inside],
        repeated_tokens=find_reuse(trace).cached_tokens[inside],
        generated_tokens=trace.output_tokens[inside].astype(np.int64),
        preemptions=logged.preemptions[inside],
        recomputed_tokens=unknown,
        outcome=np.array(outcome, np.int64)[inside],
        end_s=float(np.nanmax(ends)),
    )
