"""A real vLLM (emulated GPUs) under `LiveEngine` keeps what an engine must keep, and the
environment over it passes the checkers of Gymnasium and Stable-Baselines3."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as check_gymnasium

pytest.importorskip("httpx", reason="it comes with vLLM")
import httpx

from tests.conformance.engine_conformance import EngineConformance
from tests.end_to_end.load import Wish, ask
from tests.vllm_server import ENGINE, INTERVAL_S, Server
from trimtab.engine_bridge.engine import Engine
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.live.live_engine import LiveEngine
from trimtab.engine_bridge.live.scrape import ScrapeSource
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.control_client import ControlClient
from trimtab.envs.allocation_env import AllocationEnv
from trimtab.envs.poisson_traffic import PoissonTraffic

pytestmark = pytest.mark.slow
SPEC = get_engine_spec(ENGINE)
PLAN = with_values(load_plan(), {"controller.interval_s": INTERVAL_S, "rules.late_shedding": False})
"""What the server runs."""
HOLDER = "conformance"


@pytest.fixture(scope="module")
def busy_server(server: Server) -> Iterator[Server]:
    """A server that serves two tiers all the time."""
    over = threading.Event()

    async def one(client: httpx.AsyncClient, tenant: str, tokens: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            await ask(client, server, Wish(tenant, f"bako {number} " * 20, tokens))

    async def serve_on() -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            await asyncio.gather(one(client, "acme", 100), one(client, "crowd", 300))

    load = threading.Thread(target=lambda: asyncio.run(serve_on()), daemon=True)
    load.start()
    yield server
    over.set()
    load.join(60)


class Connections:
    """Makes engines of one server, one at a time: a new one begins on the static plan."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._last: LiveEngine | None = None

    def new(self) -> LiveEngine:
        self.close()
        source = ScrapeSource(f"{self._server.url}/metrics", timeout_s=10)
        control = ControlClient(self._server.folder / "control.sock", timeout_s=10)
        engine = LiveEngine(PLAN, source, control, holder=HOLDER, read_deadline_s=10)
        self._last = engine
        engine.advance(TestLive.interval_s)
        return engine

    def close(self) -> None:
        if self._last is not None:
            self._last.release()
            self._last.close()
            self._last = None


@pytest.fixture
def connections(busy_server: Server) -> Iterator[Connections]:
    made = Connections(busy_server)
    yield made
    made.close()


class TestLive(EngineConformance):
    plan = PLAN
    virtual = False
    interval_s = 2 * INTERVAL_S
    """A page that comes late on a busy machine must not let a lease of this length run out."""
    intervals = 6

    @pytest.fixture(autouse=True)
    def _connect(self, connections: Connections) -> None:
        self._connections = connections

    def new(self) -> Engine:
        return self._connections.new()


def environment(connections: Connections) -> gymnasium.Env[Any, Any]:
    """Its trace only says what the traffic is worth: the server's is what it is."""
    name = "trimtab/Live-v0"
    if name not in gymnasium.registry:
        # The checker must be told that nothing in real time repeats.
        gymnasium.register(name, AllocationEnv, nondeterministic=True)
    trace = PoissonTraffic(PLAN, SPEC).draw(np.random.default_rng(11))

    def engine(trace: Trace, speed: float) -> Engine:
        return connections.new()

    return gymnasium.make(
        name, traces=trace, plan=PLAN, engine=SPEC, engines=engine, episode_intervals=6
    )


def test_gymnasiums_checker_has_nothing_to_say(connections: Connections) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_gymnasium(environment(connections).unwrapped)


def test_stable_baselines3s_checker_has_nothing_to_say(connections: Connections) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(environment(connections).unwrapped)


def test_an_episode_is_steered_and_ends(connections: Connections) -> None:
    env = environment(connections)
    _, info = env.reset(seed=1)
    assert not info["twin"]
    for _ in range(6):
        _, _, terminated, truncated, info = env.step(np.ones(env.action_space.shape, np.float32))
        assert not terminated
        assert info["telemetry"].read_back
        assert info["telemetry"].applied == info["applied"]
    assert truncated
    assert info["applied"].version > 0
