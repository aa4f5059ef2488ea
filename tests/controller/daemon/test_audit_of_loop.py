"""What the daemon's own loop records is decided the same again, whatever goes wrong around it."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.agents.bundles import random_bundle
from tests.virtual_deployment import SPEC, Page, Port, VirtualClock, VirtualEngine
from trimtab.agents.audit_read import read_audit
from trimtab.agents.bundle import write_bundle
from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.policy import Policy
from trimtab.agents.verdict import GuardMode
from trimtab.controller.daemon import bundle_watch
from trimtab.controller.daemon.audit_log import AuditLog
from trimtab.controller.daemon.bundle_watch import BundleWatch, Terms, policy_source
from trimtab.controller.daemon.command import Command, CommandKind
from trimtab.controller.daemon.loop import EngineLoop
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.live.live_engine import LiveEngine
from trimtab.engine_bridge.live.snapshot import Unavailable
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.generate import generate
from trimtab.training.whatif.audit_policies import RecordedPolicies
from trimtab.training.whatif.audit_replay import replay

PLAN = load_plan()
INTERVAL_S = float(PLAN.controller.interval_s)
GUARD = GuardSettings(probation_s=10.0, ramp_s=10.0, cool_down_s=20.0, novel_fraction=1.0)
HOLDER = "trimtab@test:1"


@cache
def traffic() -> Trace:
    return generate(hours=0.2, seed=2, load=0.6, spec=SPEC)


class Bench:
    """A real loop with its log beside a virtual engine."""

    def __init__(self, folder: Path, policy: str, *, most_bytes: int = 64 << 20) -> None:
        self.clock = VirtualClock()
        self.engine = VirtualEngine(PLAN, traffic(), self.clock)
        self.page, self.port = Page(self.engine), Port(self.engine)
        self.audit = AuditLog(
            folder, engine="a", unix_s=self.clock.unix_s, most_bytes=most_bytes, threaded=False
        )
        self.source = policy_source(
            policy, Terms(plan=PLAN, seed=0, deadline_s=0.0, threaded=False)
        )
        live = LiveEngine(
            PLAN, self.page, self.port, holder=HOLDER, threaded=False,
            monotonic_s=self.clock.monotonic_s, unix_s=self.clock.unix_s,
        )  # fmt: skip
        self.loop = EngineLoop(
            "a", live, self.source, self.audit, holder=HOLDER, settings=GUARD,
            mode=GuardMode.ACTIVE, monotonic_s=self.clock.monotonic_s, unix_s=self.clock.unix_s,
        )  # fmt: skip

    def ticks(self, count: int) -> None:
        for _ in range(count):
            for _ in range(round(INTERVAL_S)):
                self.clock.now_s += 1.0
                self.engine.step(1.0)
            self.loop.tick()

    def order(self, kind: CommandKind, mode: GuardMode | None = None) -> None:
        self.loop.command(Command(kind=kind, mode=mode, by="test"))


def all_equal(folder: Path) -> int:
    """Decisions that were decided again, all of them equal."""
    total = 0
    for run in read_audit([folder]):
        found = replay(run, RecordedPolicies())
        assert found.difference is None, found.difference
        assert (found.skipped, found.equal) == (0, found.replayed)
        total += found.replayed
    return total


@pytest.mark.parametrize("policy", ["static", "reactive", "learned"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_troubled_run_is_decided_the_same_again(tmp_path: Path, policy: str, seed: int) -> None:
    bench = Bench(tmp_path, policy, most_bytes=100_000)
    rng = np.random.default_rng(seed)
    bench.ticks(40)
    for _ in range(25):
        match rng.integers(7):
            case 0:
                bench.page.fault = Unavailable(str(rng.choice([*Unavailable])))
                bench.ticks(int(rng.integers(1, 12)))
                bench.page.fault = None
            case 1:
                bench.port.fault = str(
                    rng.choice(["down", "hung", "garbage", "refused", "unheard"])
                )
                bench.ticks(int(rng.integers(1, 12)))
                bench.port.fault = ""
            case 2:
                bench.engine.restart()
            case 3:
                bench.order(CommandKind.HOLD)
                bench.ticks(int(rng.integers(1, 6)))
                bench.order(CommandKind.RELEASE)
            case 4:
                bench.order(CommandKind.MODE, GuardMode(str(rng.choice([*GuardMode]))))
                bench.ticks(int(rng.integers(1, 6)))
                bench.order(CommandKind.MODE, GuardMode.ACTIVE)
            case 5:
                bench.clock.wall_off_s += 1000.0
            case 6:
                bench.order(CommandKind.RELOAD)
        bench.ticks(int(rng.integers(1, 15)))
    assert bench.loop.state.faults == 0
    bench.audit.close()
    assert len(list(tmp_path.iterdir())) > 2
    assert all_equal(tmp_path) > 100


def test_a_bundle_swapped_under_way_is_decided_the_same_again(tmp_path: Path) -> None:
    folder, audit = tmp_path / "policy", tmp_path / "audit"
    bench = Bench(audit, f"bundle:{folder}")
    assert isinstance(bench.source, BundleWatch)
    bench.ticks(5)
    for seed in (1, 2):
        write_bundle(random_bundle(PLAN, seed, 0.3), tmp_path / f"kept{seed}")
        shutil.copytree(tmp_path / f"kept{seed}", folder, dirs_exist_ok=True)
        bench.source.look()
        bench.ticks(20)
    bench.audit.close()
    assert all_equal(audit) > 40


class Failing(Policy):
    """The static plan, or an error."""

    name = "static"
    summary = "the static plan, or an error"
    failing = False

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        if self.failing:
            raise TimeoutError("no answer")
        return Allocation.static(plan)


@pytest.mark.parametrize("mode", [GuardMode.ACTIVE, GuardMode.SHADOW, GuardMode.HOLD])
def test_failures_of_the_policy_are_raised_again_in_every_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: GuardMode
) -> None:
    policy = Failing()
    monkeypatch.setattr(bundle_watch, "make_policy", lambda name: policy)
    bench = Bench(tmp_path, "static")
    bench.ticks(10)
    bench.order(CommandKind.MODE, mode)
    for _ in range(3):
        policy.failing = not policy.failing
        bench.ticks(5)
    bench.audit.close()
    assert all_equal(tmp_path) > 20
