"""The judge of all trials can tell a lawful change from one that is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the stand-in's metrics need it")

from tests.chaos.watcher import Look, Watcher
from tests.live_parts import StandIn, write_plan
from tests.waiting import poll
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.vllm.control_client import ControlClient


def look(allocation: Allocation, plan: Plan, *, leased: bool = True) -> Look:
    static = replace(allocation, version=0) == Allocation.static(plan)
    return Look(0.0, allocation, static, leased, "x" if leased else None)


def judged(plan: Plan, *looks: Look) -> int:
    watcher = Watcher(Path("nowhere"), plan)
    watcher.looks = list(looks)
    return len(watcher.unlawful())


def test_unlawful_changes_are_found(default_plan: Plan) -> None:
    static = Allocation.static(default_plan)
    bounds = default_plan.controller.bounds.prefill_budget_tokens
    assert bounds is not None
    near = replace(static, prefill_budget_tokens=static.prefill_budget_tokens + 100, version=1)
    far = replace(static, prefill_budget_tokens=int(bounds.ceiling), version=1)
    start = look(static, default_plan, leased=False)
    assert judged(default_plan, start, look(near, default_plan)) == 0
    # Too far for one change, not for several.
    assert judged(default_plan, start, look(far, default_plan)) == 1
    assert judged(default_plan, start, look(replace(far, version=9), default_plan)) == 0
    # Outside of the bounds, without a version of its own, without a lease.
    outside = replace(static, prefill_budget_tokens=int(bounds.ceiling) + 1, version=9)
    assert judged(default_plan, start, look(outside, default_plan)) == 1
    assert judged(default_plan, start, look(replace(near, version=0), default_plan)) == 1
    assert judged(default_plan, start, look(near, default_plan, leased=False)) == 1
    # Back to static is always right; after a restart nothing else is.
    assert judged(default_plan, look(far, default_plan), start) == 0
    assert judged(
        default_plan, look(replace(far, version=9), default_plan), look(near, default_plan)
    )


def test_it_sees_what_a_controller_sets(tmp_path: Path) -> None:
    with StandIn(tmp_path, write_plan(tmp_path)) as engine:
        watcher = Watcher(engine.control_path, engine.plan)
        watcher.start()
        poll(lambda: bool(watcher.looks), what="a look")
        assert watcher.now.static
        assert not watcher.now.leased
        with ControlClient(engine.control_path) as control:
            control.set({"prefill_budget_tokens": 6500}, holder="test", ttl_s=60)
            poll(lambda: watcher.now.holder == "test", what="the lease")
            assert not watcher.now.static
            control.release("test")
        poll(lambda: watcher.now.static, what="the static plan")
        watcher.close()
    assert not watcher.unlawful()
