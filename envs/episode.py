"""One episode: an engine on one trace, what its intervals are worth, and its twin.

It knows no actions and no observations; `allocation_env` drives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from trimtab.engine_bridge.engine import Engine
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.replay.report import ReplayResult
from trimtab.engine_bridge.trace import Trace
from trimtab.envs import score
from trimtab.envs.reward import Reward
from trimtab.envs.twin import Twin, TwinMemory, replay_twin

EngineSource = Callable[[Trace, float], Engine]
"""Makes the engine of an episode from its traffic and its speed (true step time over the model's).
"""


@runtime_checkable
class _Tells(Protocol):
    """An engine that knows what became of every request."""

    def result(self) -> ReplayResult: ...


@runtime_checkable
class _Closes(Protocol):
    """An engine that holds connections or a lease."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What one episode plays, and with what."""

    name: str
    """Of its trace."""
    trace: Trace
    speed: float
    engine: Engine
    intervals: int
    """Most control intervals, the one before the first action among them."""
    demand: score.FloatArray
    """Value that each request asks for, shape (n,) (`score.demand`)."""
    offered_value_per_s: float
    """The demand over the trace's duration."""
    twin: Twin | None
    """None for an engine that is no replay."""

    def close(self) -> None:
        """Let an engine of its own time go; a replay has nothing to give back."""
        if isinstance(self.engine, _Closes):
            self.engine.close()

    def weighted_attainment(self, plan: Plan) -> float:
        """Demand served within its targets over the demand that has come so far.

        After a whole trace it is the headline of a what-if; at the end of a window what still runs
        counts as not served. NaN for an engine that does not know its requests, or none came.
        """
        if not isinstance(self.engine, _Tells):
            return math.nan
        columns = self.engine.result().requests
        came = self.trace.arrival_s <= self.engine.now_s
        met = score.judge(
            tier=np.asarray(columns["tier"], np.int64),
            outcome=np.asarray(columns["outcome"], np.int64),
            seen=score.latencies(
                arrival_s=np.asarray(columns["arrival_s"], np.float64),
                first_token_s=np.asarray(columns["first_token_s"], np.float64),
                last_token_s=np.asarray(columns["last_token_s"], np.float64),
                generated_tokens=np.asarray(columns["generated_tokens"], np.int64),
            ),
            to=score.targets(plan),
        )
        return score.weighted_attainment(self.demand[came], met.every[came])


class EpisodeMaker:
    """Sets episodes up, with the twins that it remembers."""

    def __init__(
        self,
        plan: Plan,
        spec: EngineSpec,
        reward: Reward,
        *,
        engines: EngineSource | None,
        episode_intervals: int | None,
        drain_s: float,
    ) -> None:
        """Keep what all episodes share.

        Args:
            plan: Of the engines.
            spec: The engine that is replayed.
            reward: Prices the twins' intervals.
            engines: What to control instead of a replay; its episodes have no twin.
            episode_intervals: Steps of an episode; None: until the trace has drained.
            drain_s: Then an episode goes on for at most this long after the last arrival.
        """
        self._plan = plan
        self._spec = spec
        self._reward = reward
        self._engines = engines
        self._steps = episode_intervals
        self._drain_s = drain_s
        self._twins = TwinMemory()

    def make(self, name: str, trace: Trace, speed: float) -> Episode:
        """A new episode, before its first interval.

        Raises:
            TraceError: the trace does not fit the plan or the engine.
        """
        interval_s = self._plan.controller.interval_s
        intervals = max(2, math.ceil((trace.duration_s + self._drain_s) / interval_s))
        if self._steps is not None:
            intervals = self._steps + 1
        engine = (self._engines or self._replay)(trace, speed)
        duration_s = max(trace.duration_s, interval_s)
        demand = score.demand(trace, _values(trace, self._plan))
        offered = float(demand.sum()) / duration_s
        twin = None
        if self._engines is None:
            twin = self._twins.twin(
                (trace.digest(), speed, intervals),
                lambda: replay_twin(
                    self._replay(trace, speed),
                    self._reward,
                    interval_s=interval_s,
                    intervals=intervals,
                    offered_value_per_s=offered,
                ),
            )
        return Episode(
            name=name,
            trace=trace,
            speed=speed,
            engine=engine,
            intervals=intervals,
            demand=demand,
            offered_value_per_s=offered,
            twin=twin,
        )

    def _replay(self, trace: Trace, speed: float) -> ReplayEngine:
        return ReplayEngine(trace, self._plan, self._spec, speed=speed)


def _values(trace: Trace, plan: Plan) -> score.FloatArray:
    tiers = list(plan.tiers.values())
    return np.array([tiers[plan.tier_index(name)].value for name in trace.tier_names])
