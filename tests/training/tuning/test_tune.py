"""Tuning over the real replay: it finds what is to be found, says when nothing is, and repeats."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.errors import PlanError
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.trace import Trace
from trimtab.training.evaluation.play import Served
from trimtab.training.traces.generate import generate
from trimtab.training.tuning import search as searching
from trimtab.training.tuning.objective import PROMISE_WEIGHT, score
from trimtab.training.tuning.search import Progress
from trimtab.training.tuning.space import value_at
from trimtab.training.tuning.tune import Task, Tuned, tune
from trimtab.training.whatif.statistics import BINS

SPEC = get_engine_spec("h100:llama-3.1-8b-tp1")
PLAN = load_plan()
BAD = with_values(PLAN, {f"tiers.{name}.weight": 1.0 for name in PLAN.tiers})
"""Equal weights: there is much to gain, and an easy way to it."""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(hours=0.03, seed=4, preset="steady", load=1.6, spec=SPEC)


def task(plan: Plan, trace: Trace, **changes: object) -> Task:
    given: dict[str, object] = {
        "plan": plan, "traces": {"t": trace}, "validation": {}, "spec": SPEC,
        "trials": 12, "seed": 1, "variations": 1,
    }  # fmt: skip
    return Task(**{**given, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tuned(trace: Trace) -> Tuned:
    return tune(task(BAD, trace), processes=2)


def test_it_finds_a_better_plan_and_shows_the_gain(tuned: Tuned) -> None:
    assert tuned.gain is not None
    assert tuned.shown
    assert tuned.gain.attainment.mean > 0.03


def test_changes_are_those_between_the_plans(tuned: Tuned) -> None:
    assert tuned.changes
    for change in tuned.changes:
        assert value_at(tuned.given, change.place) == change.before
        assert value_at(tuned.plan, change.place) == change.after
    assert tuned.plan.name == tuned.given.name
    assert tuned.plan.controller == tuned.given.controller


def test_the_given_plan_is_the_first_trial_and_every_trial_counts(tuned: Tuned) -> None:
    assert [trial.number for trial in tuned.trials] == list(range(12))
    assert tuned.trials[0].changes == {}
    assert not tuned.trials[0].pruned


def test_the_gain_is_measured_on_variations_that_no_trial_has_seen(tuned: Tuned) -> None:
    assert tuned.evaluation is not None
    assert min(tuned.evaluation.seeds) >= 1000


def test_neither_the_processes_nor_the_machine_change_what_is_found(
    tuned: Tuned, trace: Trace
) -> None:
    again = tune(task(BAD, trace), processes=1)
    assert again.trials == tuned.trials
    assert again.plan == tuned.plan
    assert again.gain == tuned.gain


def test_another_seed_searches_elsewhere(tuned: Tuned, trace: Trace) -> None:
    other = tune(task(BAD, trace, seed=2, trials=4), processes=1)
    assert [t.changes for t in other.trials[1:]] != [t.changes for t in tuned.trials[1:4]]


def test_the_gain_is_measured_on_other_traffic_where_it_is_given(trace: Trace) -> None:
    other = generate(hours=0.02, seed=9, preset="steady", load=1.6, spec=SPEC)
    found = tune(task(BAD, trace, trials=8, validation={"v": other}), processes=1)
    assert found.evaluation is not None
    assert found.evaluation.traces == ("v",)
    assert found.evaluation.seeds[0] == 0


def test_one_trial_is_the_given_plan(trace: Trace) -> None:
    found = tune(task(PLAN, trace, trials=1), processes=1)
    assert found.plan == PLAN
    assert found.changes == ()
    assert found.gain is None
    assert not found.shown


def test_an_interrupt_keeps_the_best_so_far(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.done == 8:
            raise KeyboardInterrupt

    found = tune(task(BAD, trace), processes=1, tell=interrupt)
    assert found.interrupted
    assert len(found.trials) == 8
    best = max((t for t in found.trials if not t.pruned), key=lambda t: t.score)
    assert {c.place: c.after for c in found.changes} == best.changes
    assert found.gain is None


def test_a_trial_that_begins_badly_is_not_played_to_the_end(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "_UNPRUNED", 1)
    found = tune(task(PLAN, trace, variations=3, trials=12), processes=2)
    assert any(trial.pruned for trial in found.trials)


def test_a_plan_that_closes_everything_is_refused(trace: Trace) -> None:
    bounds = PLAN.controller.bounds
    frozen = {
        "weights.max_change_factor": 1.0,
        "kv_fractions.max_change": 0.0,
        "prefill_budget_tokens.max_change_factor": 1.0,
        "prefill_shares.max_change": 0.0,
        **{name: None for name in type(bounds).model_fields if name not in (
            "weights", "kv_fractions", "prefill_budget_tokens", "prefill_shares"
        )},
    }  # fmt: skip
    plan = with_values(PLAN, {f"controller.bounds.{key}": v for key, v in frozen.items()})
    with pytest.raises(PlanError, match="at least one knob"):
        tune(task(plan, trace), processes=1)


def served(*, attained: float, tiers: list[float]) -> Served:
    def spread(value: float) -> np.ndarray:
        return np.full(BINS, value / BINS)

    return Served(
        demand=spread(100.0),
        met_demand=spread(100.0 * attained),
        met_tokens=spread(0.0),
        requests=np.stack([spread(0.0 if np.isnan(x) else 100.0) for x in tiers]),
        met_requests=np.stack([spread(0.0 if np.isnan(x) else 100.0 * x) for x in tiers]),
        fallback_fraction=float("nan"),
    )


def test_a_missed_promise_costs_a_part_of_what_it_is_missed_by() -> None:
    kept = score(served(attained=0.9, tiers=[1.0, 1.0, 1.0, 1.0]), PLAN)
    assert kept == pytest.approx(0.9)
    # T1 is promised 95 %; three tiers have promises.
    missed = score(served(attained=0.9, tiers=[1.0, 0.8, 1.0, 1.0]), PLAN)
    assert missed == pytest.approx(0.9 - PROMISE_WEIGHT * 0.15 / 3)


def test_best_effort_and_absent_tiers_break_no_promise() -> None:
    found = score(served(attained=0.9, tiers=[1.0, float("nan"), 1.0, 0.1]), PLAN)
    assert found == pytest.approx(0.9)
