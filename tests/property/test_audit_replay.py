"""Whatever a loop sees and is told, its audit log decides the same again, bit for bit.

Telemetry is drawn with holes, huge figures, repeats and restarts of the engine; commands, swaps,
interruptions, failures of the policy and a disk that refuses for a while come in between.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.agents.bundles import random_bundle
from tests.conformance.policy_conformance import PLAN, telemetry, tier_telemetry
from trimtab.agents.audit_entry import (
    NOT_ASKED,
    AuditError,
    command_entry,
    decision_entry,
    interrupted_entry,
    start_entry,
    swap_entry,
)
from trimtab.agents.audit_read import read_audit
from trimtab.agents.guard import Guard
from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.learned import LearnedPolicy
from trimtab.agents.memory import remember
from trimtab.agents.policy import Policy
from trimtab.agents.reactive import ReactivePolicy
from trimtab.agents.static import StaticPolicy
from trimtab.agents.verdict import GuardMode
from trimtab.controller.daemon.audit_log import AuditLog
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry
from trimtab.training.whatif.audit_replay import RunReplay, replay

STATIC = Allocation.static(PLAN)
BUNDLES = {bundle.digest: bundle for bundle in (random_bundle(PLAN, seed, 0.2) for seed in (1, 2))}
DIGESTS = tuple(BUNDLES)
SETTINGS = GuardSettings(
    probation_s=4.0, ramp_s=6.0, cool_down_s=10.0, loss_allowance_s=0.5, novel_fraction=0.9
)
"""Short times, so that a run of some dozen intervals sees probations, ramps and trips."""
POLICIES = ("reactive", "static", *DIGESTS)
WEIRD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, -3.5)


class Finder:
    """The policies of these tests, by the names in their logs."""

    def find(self, name: str, digest: str | None, *, where: str) -> Policy:
        if digest is not None:
            return LearnedPolicy(BUNDLES[digest])
        return ReactivePolicy() if name == "reactive" else StaticPolicy()


class Failing(Policy):
    """Another policy, which may be late or busy as the daemon's are."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name, self.summary = policy.name, policy.summary
        self.fault = ""

    def _reset(self, plan: Plan, seed: int) -> None:
        self.policy.reset(plan, seed)

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        if self.fault.startswith(NOT_ASKED):
            raise TimeoutError(self.fault)
        answer = self.policy.act(telemetry)
        if self.fault:
            raise TimeoutError(self.fault)
        self.outside_fraction = self.policy.outside_fraction
        return answer


@dataclass(kw_only=True)
class Loop:
    """What the daemon's loop does with guard and log, without an engine."""

    log: AuditLog
    policy: str
    mode: GuardMode
    number: int = 0
    verdicts: int = 0

    def __post_init__(self) -> None:
        self.first_mode = self.mode
        self.failing = self._made()
        self.guard = Guard(self.failing, SETTINGS, mode=self.mode)
        self.guard.reset(PLAN, 0)
        self.log.begin(self.head)

    def _made(self) -> Failing:
        return Failing(Finder().find(self.policy, self.digest, where=""))

    @property
    def digest(self) -> str | None:
        return self.policy if self.policy in BUNDLES else None

    def head(self) -> Mapping[str, object]:
        return start_entry(
            unix_s=1e9,
            engine="a",
            plan=PLAN,
            policy=self.policy,
            bundle_digest=self.digest,
            settings=SETTINGS,
            mode=self.first_mode,
            seed=0,
            memory=remember(self.guard),
        )

    def tell(self, order: str) -> None:
        if order == "interrupted":
            self.guard.interrupted()
            self.log.append(interrupted_entry(unix_s=1e9, reason="the lease had run out"))
            return
        if order.startswith("swap:"):
            self.policy = order.removeprefix("swap:")
            self.failing = self._made()
            self.failing.reset(PLAN, 0)
            self.guard.policy = self.failing
            self.guard.interrupted()
            self.log.append(swap_entry(unix_s=1e9, policy=self.policy, bundle_digest=self.digest))
            return
        if order == "hold":
            self.guard.hold()
        elif order == "release":
            self.guard.release()
        else:
            self.guard.set_mode(GuardMode(order.removeprefix("mode:")))
        self.log.append(command_entry(unix_s=1e9, command=order, by="test"))

    def tick(self, seen: Telemetry | None, fault: str) -> Allocation:
        self.number += 1
        self.failing.fault = fault
        verdict = None if seen is None else self.guard.decide(seen)
        self.verdicts += verdict is not None
        self.log.append(
            decision_entry(
                number=self.number,
                unix_s=1e9 + self.number,
                static=STATIC,
                telemetry=seen,
                fresh=True,
                verdict=verdict,
                applied=None if verdict is None else verdict.apply,
                contact="controlling",
                policy_error=fault,
            )
        )
        return STATIC if verdict is None else verdict.apply


def drawn_tier(rng: np.random.Generator, weird: bool) -> TierTelemetry:
    figures: dict[str, float] = {}
    for name, kind in TierTelemetry.__annotations__.items():
        whole = kind == "int"
        if weird and rng.random() < 0.3:
            figures[name] = float(rng.choice(WEIRD)) if not whole else int(rng.integers(0, 2**62))
        else:
            figures[name] = int(rng.integers(0, 4000)) if whole else float(rng.random() * 1e3)
    if not weird or rng.random() < 0.5:
        figures["attainment"] = float(rng.random())
    return tier_telemetry(**figures)


def drawn_allocation(rng: np.random.Generator) -> Allocation:
    """What a live engine may say that it keeps to: near static, sometimes with whole numbers."""
    shares = rng.dirichlet(np.ones(len(PLAN.tiers)))
    weights = STATIC.weights if rng.random() < 0.5 else tuple(map(int, rng.integers(1, 9000, 4)))
    return replace(
        STATIC,
        weights=weights,
        prefill_shares=tuple(map(float, shares)),
        prefill_budget_tokens=int(rng.integers(256, 8000)),
        version=int(rng.integers(0, 50)),
    )


def drawn_telemetry(rng: np.random.Generator, time_s: float, applied: Allocation) -> Telemetry:
    weird = rng.random() < 0.3
    return telemetry(
        PLAN,
        [drawn_tier(rng, weird) for _ in PLAN.tiers],
        time_s=float(rng.choice(WEIRD)) if rng.random() < 0.05 else time_s,
        step_ms_mean=float(rng.choice(WEIRD)) if weird else float(rng.random() * 50),
        steps=int(rng.integers(0, 200)),
        kv_use_fraction=float(rng.random()),
        busy_fraction=float(rng.random()),
        applied=drawn_allocation(rng) if rng.random() < 0.1 else applied,
        age_s=float(rng.choice([0.0, 0.0, 0.0, 0.5, 3.0, 7.0, 30.0, math.nan])),
        read_back=bool(rng.integers(2)),
    )


ORDERS = (
    "hold",
    "release",
    "interrupted",
    *(f"mode:{mode}" for mode in GuardMode),
    *(f"swap:{policy}" for policy in POLICIES),
)


def play(loop: Loop, rng: np.random.Generator, ticks: int) -> None:
    time_s, applied, last = 0.0, STATIC, None
    for _ in range(ticks):
        time_s = 2.0 if rng.random() < 0.03 else time_s + 2.0
        for _ in range(int(rng.random() < 0.15) * int(rng.integers(1, 3))):
            loop.tell(str(rng.choice(ORDERS)))
        seen = drawn_telemetry(rng, time_s, applied)
        if rng.random() < 0.05:
            seen = None
        elif last is not None and rng.random() < 0.1:
            seen = replace(last, age_s=last.age_s + 2.0)
        fault = ""
        if rng.random() < 0.1:
            fault = str(rng.choice(["no answer within 1 s", f"{NOT_ASKED}busy"]))
        applied = loop.tick(seen, fault)
        last = seen if seen is not None else last


def replayed(folder: Path) -> list[RunReplay]:
    return [replay(run, Finder()) for run in read_audit([folder])]


def assert_equal(found: RunReplay) -> None:
    assert found.difference is None, found.difference
    assert found.equal == found.replayed


_checked = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@_checked
@given(
    seed=st.integers(0, 2**32 - 1),
    policies=st.lists(st.sampled_from(POLICIES), min_size=1, max_size=3),
    mode=st.sampled_from([*GuardMode]),
    most_bytes=st.sampled_from([1, 20_000, 60_000, 64 << 20]),
)
def test_every_decision_comes_out_as_recorded(
    seed: int, policies: list[str], mode: GuardMode, most_bytes: int
) -> None:
    """Several starts of a daemon into one folder, with files that turn over often."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        verdicts = []
        for start, policy in enumerate(policies):
            log = AuditLog(
                Path(folder),
                engine="a",
                most_bytes=most_bytes,
                most_files=1000,
                threaded=False,
                unix_s=lambda start=start: 1e9 + start,
            )
            loop = Loop(log=log, policy=policy, mode=mode)
            play(loop, rng, 40)
            log.close()
            assert log.lost == 0
            verdicts.append(loop.verdicts)
        found = replayed(Path(folder))
        assert [one.replayed for one in found] == verdicts
        for one in found:
            assert_equal(one)
            assert one.skipped == 0


@_checked
@given(seed=st.integers(0, 2**32 - 1), policy=st.sampled_from(POLICIES))
def test_a_run_whose_beginning_is_deleted_is_replayed_from_what_was_remembered(
    seed: int, policy: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = AuditLog(Path(folder), engine="a", most_bytes=50_000, most_files=3, threaded=False)
        loop = Loop(log=log, policy=policy, mode=GuardMode.ACTIVE)
        play(loop, np.random.default_rng(seed), 200)
        log.close()
        assert len(list(Path(folder).iterdir())) == 3
        (found,) = replayed(Path(folder))
        assert_equal(found)
        assert 0 < found.replayed < loop.verdicts
        assert found.skipped == 0


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), place=st.floats(0, 1, exclude_max=True))
def test_a_changed_digit_of_what_was_seen_or_decided_is_found(seed: int, place: float) -> None:
    """Any digit of a telemetry, a digest or a verdict, in any decision."""
    with tempfile.TemporaryDirectory() as folder:
        (path,) = recorded_once(Path(folder))
        text = path.read_text()
        places = [
            found.start(group) + at.start()
            for found in _JUDGED.finditer(text)
            for group in ("verdict", "seen")
            for at in re.finditer(r"\d", found[group])
        ]
        at = places[int(place * len(places))]
        other = str((int(text[at]) + 1 + seed % 9) % 10)
        path.write_text(text[:at] + other + text[at + 1 :])
        try:
            (found,) = replayed(Path(folder))
        except AuditError:
            return
        same = float(_number(text, at)) == float(_number(path.read_text(), at))
        assert same or found.difference is not None


def _number(text: str, at: int) -> str:
    """The number around a place, which a changed last digit may leave the same to a float."""
    begin, end = at, at
    while text[begin - 1] in "0123456789+-.eE":
        begin -= 1
    while text[end] in "0123456789+-.eE":
        end += 1
    return text[begin:end]


_JUDGED = re.compile(r'"verdict":(?P<verdict>\{.*?\}),"applied".*?(?P<seen>"digest":.*\})\}')


@cache
def _recording() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        log = AuditLog(Path(folder), engine="a", threaded=False)
        play(Loop(log=log, policy="reactive", mode=GuardMode.ACTIVE), np.random.default_rng(7), 25)
        log.close()
        (path,) = Path(folder).iterdir()
        return path.read_bytes()


def recorded_once(folder: Path) -> list[Path]:
    """A file of two dozen decisions, the same one each time."""
    path = folder / "a-00000001.jsonl"
    path.write_bytes(_recording())
    return [path]
