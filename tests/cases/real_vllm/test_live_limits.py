"""Case 10 on the real engine: limits change through its control socket while it serves.

The socket is a real one; only the time is virtual.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("vllm", reason="runs vLLM's own scheduler")

from tests.cases.real_vllm.serving import Engine
from tests.cases.replaying import FINISHED, T0, T2, T3, Row, engine_spec, trace_of
from tests.cases.test_live_limits import CAPACITY, PLAN
from trimtab.engine_bridge.plan import Plan, with_values
from trimtab.engine_bridge.vllm.control_client import ControlClient
from trimtab.engine_bridge.vllm.control_errors import ControlRefusedError
from trimtab.engine_bridge.vllm.control_server import ControlServer

ME = "the test"


class Live(NamedTuple):
    """An engine and its socket."""

    engine: Engine
    client: ControlClient
    path: Path


def live_engine(
    tmp_path: Path, rows: list[Row], plan: Plan = PLAN, **limits: Any
) -> Iterator[Live]:
    engine = Engine(trace_of(rows), engine_spec(**limits), plan=plan)
    path = tmp_path / "control.sock"
    with (
        ControlServer(engine.scheduler._store, path=path),
        ControlClient(path) as client,
    ):
        yield Live(engine, client, path)


def loaded_rows() -> list[Row]:
    rng = np.random.default_rng(10)
    return [Row(0.0, T2, 256, int(n)) for n in rng.integers(60, 200, 3 * CAPACITY)]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    """More requests than places; all places are taken."""
    for one in live_engine(tmp_path, loaded_rows(), max_num_seqs=CAPACITY):
        while len(one.engine.running) < CAPACITY:
            assert one.engine.step() is not None
        yield one


def set_cap(live: Live, cap: int, ttl_s: float = 3600.0) -> dict[str, Any]:
    answer = live.client.set({"max_num_seqs": cap}, holder=ME, ttl_s=ttl_s)
    return dict(answer)


def finish(live: Live) -> None:
    live.engine.advance(math.inf)
    q = live.engine.requests()
    assert (q["outcome"] == FINISHED).all()
    assert q["preemptions"].sum() == 0


def test_a_lower_cap_drains_and_admits_again_exactly_below_it(live: Live) -> None:
    engine = live.engine
    assert set_cap(live, 16)["allocation"]["max_num_seqs"] == 16
    counts = [CAPACITY]
    admitted = np.isfinite(engine.admitted_s).sum()
    while counts[-1] >= 16:
        engine.step()
        counts.append(len(engine.running))
        assert np.isfinite(engine.admitted_s).sum() == admitted
    assert np.all(np.diff(counts) <= 0)
    for _ in range(50):
        step = engine.step()
        assert step is not None
        assert len(step.tokens) <= 16
    assert np.isfinite(engine.admitted_s).sum() > admitted
    set_cap(live, CAPACITY)
    engine.advance(engine.now_s + 0.5)
    assert max(len(one.tokens) for one in [engine.step()] if one is not None) > 16
    finish(live)


def test_a_cap_above_the_capacity_is_refused_and_the_old_one_kept(live: Live) -> None:
    set_cap(live, 16)
    answer = set_cap(live, 128)
    assert answer["allocation"]["max_num_seqs"] == 16
    assert answer["limited"] == [{"knob": "max_num_seqs", "reason": "capacity"}]
    live.engine.step()
    assert live.engine.scheduler.ledger.allocation.max_num_seqs == 16
    finish(live)


def test_nonsense_over_the_socket_changes_no_step(live: Live) -> None:
    undisturbed = Engine(trace_of(loaded_rows()), engine_spec(max_num_seqs=CAPACITY), plan=PLAN)
    while len(undisturbed.running) < CAPACITY:
        undisturbed.step()
    before = live.client.get()
    values: list[dict[str, Any]] = [
        {"weights": {"T0": math.nan}},
        {"kv_fractions": {"interactive": math.inf}},
        {"weights": {"T9": 1.0}},
        {"max_num_seqs": "many"},
        {"no such knob": 1},
    ]
    for wrong in values:
        with pytest.raises((ControlRefusedError, ValueError)):
            live.client.set(wrong, holder=ME)
    for line in (b"\xff\x00garbage\n", b"{\n", b"[]\n", json.dumps({"op": "set"}).encode() + b"\n"):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(5.0)
            raw.connect(str(live.path))
            raw.sendall(line)
            assert b'"ok": false' in raw.recv(65536)
    after = live.client.get()
    assert after["version"] == before["version"]
    assert after["allocation"] == before["allocation"]
    while (step := undisturbed.step()) is not None:
        assert live.engine.step() == step
    finish(live)


def test_an_action_beyond_the_bounds_is_clamped_and_loses_nobody(live: Live) -> None:
    answer = live.client.set(
        {"prefill_budget_tokens": 10**12, "weights": {"T0": 1e300}}, holder=ME, ttl_s=3600.0
    )
    assert {entry["knob"] for entry in answer["limited"]} == {"prefill_budget_tokens", "weights"}
    finish(live)


def test_silence_brings_the_static_plan_back_within_the_lease(live: Live) -> None:
    engine = live.engine
    static = live.client.get()["allocation"]
    lease_s = 0.5
    assert set_cap(live, 16, ttl_s=lease_s)["changed"]
    engine.step()
    started_s = engine.now_s
    while engine.scheduler.ledger.allocation.max_num_seqs == 16:
        engine.step()
    assert lease_s - 0.05 <= engine.now_s - started_s <= lease_s + 0.1
    state = live.client.get()
    assert state["state"] == "static"
    assert state["allocation"] == static
    finish(live)


def test_every_change_is_one_version_from_one_step_on(live: Live) -> None:
    engine, versions = live.engine, []
    for cap in (40, 30, 20):
        budget = 8192 - 10 * cap
        asked = {"max_num_seqs": cap, "prefill_budget_tokens": budget}
        told = live.client.set(asked, holder=ME, ttl_s=3600.0)
        assert engine.scheduler.ledger.allocation.version != told["version"]
        engine.step()
        holds = engine.scheduler.ledger.allocation
        assert holds.version == told["version"]
        assert holds.max_num_seqs == cap
        assert holds.prefill_budget_tokens == told["allocation"]["prefill_budget_tokens"]
        assert live.client.get()["taken_version"] == told["version"]
        versions.append(holds.version)
    assert all(b == a + 1 for a, b in pairwise(versions))
    finish(live)


def test_a_smaller_pool_takes_no_block_from_a_running_paid_request(tmp_path: Path) -> None:
    plan = with_values(PLAN, {"tiers.T0.targets.ttft_ms": 60_000.0})
    rows = [Row(0.01 * k, T0, 2000, 300) for k in range(20)]
    rows += [Row(2.0 + 0.2 * k, T3, 1000, 100) for k in range(20)]
    blocks = 20 * 140 * 100 // 65
    for live in live_engine(tmp_path, rows, plan, num_gpu_blocks=blocks):
        engine = live.engine
        queue = engine.scheduler.kv_cache_manager.block_pool.free_block_queue
        while queue.held[0] < 0.55 * blocks:
            assert engine.step() is not None
        wish = {"interactive": 0.5, "batch": 0.3, "free": 0.2}
        guaranteed = []
        while engine.step() is not None:
            if engine.steps % 20 == 0:
                live.client.set({"kv_fractions": wish}, holder=ME, ttl_s=3600.0)
            assert sum(queue.held) + queue.num_free_blocks == blocks - 1
            assert sum(queue.guaranteed) == blocks - 1
            guaranteed.append(queue.guaranteed[0])
        assert guaranteed[0] >= int(0.64 * blocks)
        assert abs(guaranteed[-1] - 0.5 * blocks) <= 2
        q = engine.requests()
        assert q["preemptions"][q["tier"] == T0].sum() == 0
        assert (q["outcome"][q["tier"] == T0] == FINISHED).all()
