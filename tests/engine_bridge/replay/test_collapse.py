"""Collapsed steps give what single steps give, whoever schedules and whenever it looks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine_bridge.replay.workloads import aging_plan, random_trace, small_engine
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine, ReplayResult

# With seed 4 a plan takes a victim and lets nobody join: the queue must be looked at again.
SEEDS = (0, 4, 11)


def run(
    seed: int, rules: str, *, collapse: bool, lagging: bool, plan: Plan | None = None
) -> ReplayResult:
    spec = small_engine().with_limits(async_scheduling=lagging)
    engine = ReplayEngine(
        random_trace(seed),
        plan or load_plan(None),
        spec,
        rules=rules,  # type: ignore[arg-type]
        collapse=collapse,
    )
    engine.run(interval_s=2.0)
    return engine.result()


@pytest.mark.parametrize("lagging", [False, True])
@pytest.mark.parametrize("rules", ["fair", "fcfs", "priority"])
@pytest.mark.parametrize("seed", SEEDS)
def test_collapsing_changes_nothing(seed: int, rules: str, lagging: bool) -> None:
    whole = run(seed, rules, collapse=True, lagging=lagging)
    single = run(seed, rules, collapse=False, lagging=lagging)
    assert whole.digest() == single.digest()


@pytest.mark.parametrize("lagging", [False, True])
@pytest.mark.parametrize("feasible", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_collapsing_changes_nothing_where_the_waiting_age(
    seed: int, feasible: bool, lagging: bool
) -> None:
    """An order that time alone changes is looked at at the same moments in both modes."""
    aging = with_values(aging_plan(), {"rules.feasible_first": feasible})
    plain = with_values(aging, {"aging.tier_window_ms": 0.0, "aging.tenant_window_ms": 0.0})
    whole = run(seed, "fair", collapse=True, lagging=lagging, plan=aging)
    single = run(seed, "fair", collapse=False, lagging=lagging, plan=aging)
    assert whole.digest() == single.digest()
    assert whole.digest() != run(seed, "fair", collapse=True, lagging=lagging, plan=plain).digest()


@pytest.mark.parametrize("lagging", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_collapsing_changes_nothing_where_prefills_are_passed(seed: int, lagging: bool) -> None:
    """Who is urgent changes with time alone, too."""
    late = with_values(
        load_plan(None),
        {f"tiers.{name}.targets.ttft_ms": 150.0 for name in ("T0", "T1", "T3")}
        | {"feasible.chunks": True, "feasible.prefill_factor": 5.0},
    )
    plain = with_values(late, {"feasible.chunks": False})
    whole = run(seed, "fair", collapse=True, lagging=lagging, plan=late)
    single = run(seed, "fair", collapse=False, lagging=lagging, plan=late)
    assert whole.digest() == single.digest()
    assert whole.digest() != run(seed, "fair", collapse=True, lagging=lagging, plan=plain).digest()


@pytest.mark.parametrize("rules", ["fair", "fcfs"])
def test_asynchronous_scheduling_costs_a_light_load_up_to_a_step(rules: str) -> None:
    sync, lagging = (run(1, rules, collapse=True, lagging=lag) for lag in (False, True))

    def median_ttft_s(result: ReplayResult) -> float:
        columns = result.requests
        return float(np.nanmedian(columns["first_token_s"] - columns["arrival_s"]))

    assert lagging.steps > 0
    if rules == "fair":
        assert median_ttft_s(lagging) > median_ttft_s(sync)
