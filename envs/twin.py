"""The static twin: what the static plan earns on the same traffic, interval by interval.

Taken from the reward it leaves what the policy adds, whatever the traffic does. With open-loop
traffic it does not depend on the actions, so it biases nothing; with sessions whose turns wait for
answers the two runs drift apart, and it is a control variate only. A live engine has none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.envs.reward import Reward, total

FloatArray = npt.NDArray[np.float64]

MOST_TWINS: Final = 256
"""Twins that are remembered; one of an hour takes 15 kB."""


class Twin:
    """What the static plan earned in each interval of one run."""

    def __init__(self, totals: FloatArray) -> None:
        """Keep the totals, shape (intervals,)."""
        self._totals = totals

    def earned(self, interval: int, *, last: bool) -> float:
        """Total of one interval, counted from 0; with `last` of all from it on.

        A run under a policy may end before its twin: the rest then counts in its last interval.
        """
        rest = self._totals[interval:]
        return float(rest.sum() if last else rest[0]) if len(rest) else 0.0


def replay_twin(
    engine: ReplayEngine,
    reward: Reward,
    *,
    interval_s: float,
    intervals: int,
    offered_value_per_s: float,
) -> Twin:
    """Run a new engine for so many intervals under its static plan, and price them."""
    # Added up one by one as the engine does, so that the last interval is a whole one.
    until_s = float(np.full(intervals, interval_s).cumsum()[-1])
    engine.run(interval_s=interval_s, until_s=until_s)
    return Twin(
        np.array([total(reward.earned(t, offered_value_per_s)) for t in engine.result().telemetry])
    )


class TwinMemory:
    """The twins that were asked for last; a trace that comes again is not replayed again."""

    def __init__(self, most: int = MOST_TWINS) -> None:
        """Begin without any; `most` are kept."""
        self._most = most
        self._twins: OrderedDict[Hashable, Twin] = OrderedDict()

    def twin(self, key: Hashable, make: Callable[[], Twin]) -> Twin:
        """The twin of `key`, made if it is not remembered."""
        if key in self._twins:
            self._twins.move_to_end(key)
            return self._twins[key]
        twin = self._twins[key] = make()
        if len(self._twins) > self._most:
            self._twins.popitem(last=False)
        return twin
