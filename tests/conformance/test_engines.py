"""Every engine keeps what an engine must keep."""

from __future__ import annotations

from functools import cache

import numpy as np

from tests.conformance.engine_conformance import EngineConformance
from trimtab.engine_bridge.engine import Engine
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.trace import Trace
from trimtab.envs.poisson_traffic import PoissonTraffic

SPEC = get_engine_spec("h100:llama-3.1-8b-tp1")


@cache
def traffic() -> Trace:
    return PoissonTraffic(load_plan(), SPEC).draw(np.random.default_rng(11))


class TestReplay(EngineConformance):
    plan = load_plan()

    def new(self) -> Engine:
        return ReplayEngine(traffic(), self.plan, SPEC)


class TestSlowReplay(EngineConformance):
    """Drifted and short of memory: requests queue, are preempted and refused."""

    plan = load_plan()

    def new(self) -> Engine:
        spec = SPEC.with_limits(num_gpu_blocks=4000)
        return ReplayEngine(traffic(), self.plan, spec, speed=1.3)


class TestReplayOfAnotherPlan(EngineConformance):
    plan = load_plan("published")

    def new(self) -> Engine:
        return ReplayEngine(traffic(), self.plan, SPEC)
