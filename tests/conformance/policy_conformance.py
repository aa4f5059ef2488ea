"""What every policy must keep; a policy's test inherits `PolicyConformance` and names its factory.

class TestStatic(PolicyConformance):
    make = StaticPolicy
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.agents.policy import Policy
from trimtab.engine_bridge import limits
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.errors import AllocationError
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry

NAN = float("nan")
PLAN = load_plan()

# Each policy's class runs the inherited property; examples are derandomised, so none is replayed
# under another class.
_inherited = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
)
_latencies = st.one_of(st.just(NAN), st.floats(0, 1e7), st.just(float("inf")))
_counts = st.integers(0, 10**7)
_shares = st.one_of(st.just(NAN), st.floats(0, 1))


def tier_telemetry(**seen: float) -> TierTelemetry:
    """A tier without any data, but for what is given."""
    quiet = {name: 0 for name in TierTelemetry.__dataclass_fields__}
    unknown = dict.fromkeys(
        ("attainment", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "acceptance"),
        NAN,
    )
    return TierTelemetry(**{**quiet, **unknown, **seen})


def telemetry(plan: Plan, tiers: list[TierTelemetry] | None = None, **seen: object) -> Telemetry:
    """One interval; without arguments nothing happened in it."""
    figures = {
        "time_s": 2.0,
        "interval_s": 2.0,
        "tiers": tuple(tiers or [tier_telemetry() for _ in plan.tiers]),
        "step_ms_mean": NAN,
        "steps": 0,
        "batch_mean": NAN,
        "kv_use_fraction": 0.0,
        "busy_fraction": 0.0,
        "applied": Allocation.static(plan),
        "age_s": 0.0,
    }
    return Telemetry(**{**figures, **seen})


@st.composite
def any_tier(draw: st.DrawFn) -> TierTelemetry:
    counts = ("queue_length", "running", "kv_blocks_used", "finished", "refused", "preemptions")
    return tier_telemetry(
        attainment=draw(_shares),
        attainment_samples=draw(_counts),
        ttft_ms_p50=draw(_latencies),
        ttft_ms_p99=draw(_latencies),
        tpot_ms_p50=draw(_latencies),
        tpot_ms_p99=draw(_latencies),
        oldest_wait_s=draw(st.floats(0, 1e5)),
        **{name: draw(_counts) for name in counts},
    )


@st.composite
def any_run(draw: st.DrawFn) -> list[Telemetry]:
    """Telemetry of a few intervals; what is applied is filled in as the run goes."""
    intervals = draw(st.integers(1, 6))
    return [
        telemetry(
            PLAN,
            [draw(any_tier()) for _ in PLAN.tiers],
            time_s=2.0 * (i + 1),
            kv_use_fraction=draw(_shares),
            busy_fraction=draw(_shares),
        )
        for i in range(intervals)
    ]


def follow(policy: Policy, run: list[Telemetry], seed: int = 0) -> list[Allocation]:
    """The policy's proposals when each is applied before the next interval."""
    policy.reset(PLAN, seed)
    applied = Allocation.static(PLAN)
    proposals = []
    for seen in run:
        applied = policy.act(replace(seen, applied=applied))
        proposals.append(applied)
    return proposals


class PolicyConformance:
    """Inherit it, set `make`."""

    make: Callable[[], Policy]
    moves_without_data = False
    """Whether it may leave the static plan while nothing is known."""

    def new(self) -> Policy:
        return type(self).make()

    def test_has_a_name_a_summary_and_known_rules(self) -> None:
        policy = self.new()
        assert policy.name
        assert policy.name == policy.name.lower().strip()
        assert policy.summary
        assert policy.engine_rules in ("fair", "fcfs", "priority")

    @given(any_run())
    @_inherited
    def test_every_proposal_is_lawful(self, run: list[Telemetry]) -> None:
        before = Allocation.static(PLAN)
        for proposal in follow(self.new(), run):
            proposal.check_shape(PLAN)
            held = limits.project(proposal, before, PLAN)
            assert replace(held.allocation, version=0) == replace(proposal, version=0)
            before = proposal

    @given(any_run(), st.integers(0, 3))
    @_inherited
    def test_is_deterministic_and_reset_forgets(self, run: list[Telemetry], seed: int) -> None:
        policy = self.new()
        first = follow(policy, run, seed)
        assert follow(policy, run, seed) == first
        assert follow(self.new(), run, seed) == first

    def test_does_nothing_without_data(self) -> None:
        static = Allocation.static(PLAN)
        quiet = [telemetry(PLAN, time_s=2.0 * (i + 1)) for i in range(5)]
        stays = [replace(proposal, version=0) == static for proposal in follow(self.new(), quiet)]
        assert all(stays) or self.moves_without_data

    def test_refuses_telemetry_of_another_plan(self) -> None:
        policy = self.new()
        policy.reset(PLAN, 0)
        with pytest.raises(AllocationError, match="tiers"):
            policy.act(telemetry(PLAN, [tier_telemetry()]))

    def test_act_before_reset_is_a_fault_of_the_caller(self) -> None:
        with pytest.raises(RuntimeError, match="reset"):
            self.new().act(telemetry(PLAN))
