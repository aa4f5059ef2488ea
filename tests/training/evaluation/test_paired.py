"""Paired evaluation over the real replay: pairing, levels, differences, what may not matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trimtab.agents.guard import Guard
from trimtab.agents.static import StaticPolicy
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.errors import FlagError, PlanError
from trimtab.engine_bridge.plan import Plan, load_plan, plan_from_yaml, with_values
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace
from trimtab.training.evaluation import play as playing
from trimtab.training.evaluation.paired import Evaluation, evaluate
from trimtab.training.traces.generate import generate
from trimtab.training.whatif.run import Contender, Study, run_study

PLAN = load_plan()
SPEC = get_engine_spec("h100:llama-3.1-8b-tp1")
HOURS = 0.02


def traffic(seed: int, load: float = 1.2) -> Trace:
    return generate(hours=HOURS, seed=seed, preset="bursty", load=load, spec=SPEC)


def contender(label: str, policy: str | None = None, **values: object) -> Contender:
    plan = with_values(PLAN, {key.replace("__", "."): value for key, value in values.items()})
    return Contender(label=label, policy=policy or label, plan=plan)


TRACES = {"one": traffic(1), "two": traffic(2)}


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return evaluate(
        [contender("static"), contender("same", "static"), contender("stock-fcfs")],
        TRACES,
        spec=SPEC,
        seeds=(0, 1),
        speeds=(1.0, 1.5),
        drain_s=60.0,
        processes=1,
    )


def test_every_contender_plays_every_trace_speed_and_variation(evaluation: Evaluation) -> None:
    for label in evaluation.labels:
        assert evaluation.attainment(label).shape == (2, 2, 2)
        assert np.isfinite(evaluation.attainment(label)).all()


def test_levels_are_those_of_a_what_if(evaluation: Evaluation) -> None:
    study = Study(
        trace=TRACES["two"],
        plan=PLAN,
        contenders=(contender("stock-fcfs"),),
        spec=SPEC,
        seeds=(0, 1),
        drain_s=60.0,
    )
    runs = run_study(study, processes=1).result.results
    wanted = [run.engine.weighted_attainment for run in runs]
    assert evaluation.attainment("stock-fcfs")[1, 0] == pytest.approx(wanted)
    found = evaluation.select(traces=["two"], speeds=[1.0]).tier_attainment("stock-fcfs")
    for tier, attainment in found.items():
        mean = np.mean([run.tiers[tier].attainment for run in runs])
        assert attainment == pytest.approx(float(mean))


def test_a_slower_engine_serves_less(evaluation: Evaluation) -> None:
    attained = evaluation.attainment("static")
    assert attained[:, 1].mean() < attained[:, 0].mean()


def test_equal_contenders_differ_by_nothing_at_all(evaluation: Evaluation) -> None:
    same = evaluation.difference("same", "static")
    assert same.attainment.mean == 0
    assert same.attainment.ci95 == (0, 0)
    assert same.attainment.improvement == 0.5
    assert same.worst == 0


def test_a_difference_is_the_mean_of_the_paired_ones(evaluation: Evaluation) -> None:
    gap = evaluation.attainment("static") - evaluation.attainment("stock-fcfs")
    found = evaluation.difference("static", "stock-fcfs")
    assert found.attainment.mean == pytest.approx(gap.mean())
    assert found.by_trace == pytest.approx(dict(zip(TRACES, gap.mean(axis=(1, 2)), strict=True)))
    assert found.worst == min(found.by_trace.values())
    low, high = found.attainment.ci95
    assert 0 < low < found.attainment.mean < high
    assert found.attainment.shown
    assert found.attainment.improvement == 1


def test_differences_turn_round(evaluation: Evaluation) -> None:
    ours = evaluation.difference("static", "stock-fcfs")
    theirs = evaluation.difference("stock-fcfs", "static")
    assert ours.attainment.mean == pytest.approx(-theirs.attainment.mean)
    assert ours.attainment.ci95 == pytest.approx([-x for x in reversed(theirs.attainment.ci95)])
    for tier, gain in ours.tiers.items():
        assert gain.mean == pytest.approx(-theirs.tiers[tier].mean)


def test_goodput_is_relative(evaluation: Evaluation) -> None:
    found = evaluation.difference("static", "stock-fcfs").goodput
    rates = [
        np.array([run.met_tokens.sum() for run in evaluation.served[label].ravel()])
        for label in ("static", "stock-fcfs")
    ]
    assert found.mean == pytest.approx(float(np.mean(rates[0] / rates[1] - 1)))


def test_neither_the_processes_nor_the_company_change_a_difference(
    evaluation: Evaluation,
) -> None:
    again = evaluate(
        [contender("stock-fcfs"), contender("static")],
        TRACES,
        spec=SPEC,
        seeds=(0, 1),
        speeds=(1.0, 1.5),
        drain_s=60.0,
        processes=2,
    )
    assert again.difference("static", "stock-fcfs") == evaluation.difference("static", "stock-fcfs")


def test_the_measure_is_the_first_plan_whatever_a_contender_promises() -> None:
    easy = contender("easy", "static", tiers__T0__targets__ttft_ms=1e8)
    found = evaluate(
        [contender("static"), easy],
        {"one": TRACES["one"]},
        spec=SPEC,
        speeds=(2.0,),
        drain_s=60.0,
        processes=1,
    )
    strict = evaluate(
        [easy], {"one": TRACES["one"]}, spec=SPEC, speeds=(2.0,), drain_s=60.0, processes=1
    )
    assert found.tier_attainment("easy")["T0"] < strict.tier_attainment("easy")["T0"]


def test_a_trace_of_another_plan_is_refused() -> None:
    text = """
    name: other
    tiers: {gold: {weight: 1, pool: all, prefill_share: 1.0, targets: {ttft_ms: 800}}}
    pools: {all: 1.0}
    """
    other = Contender(label="other", policy="static", plan=plan_from_yaml(text))
    with pytest.raises(PlanError, match="T0"):
        evaluate([other], TRACES, spec=SPEC, processes=1)
    with pytest.raises(PlanError, match="gold"):
        evaluate([contender("static"), other], TRACES, spec=SPEC, processes=1)


def test_an_unknown_policy_is_refused_in_a_process_as_here() -> None:
    for processes in (1, 2):
        with pytest.raises(FlagError, match="statik"):
            evaluate([contender("statik")], TRACES, spec=SPEC, processes=processes)


class Broken(StaticPolicy):
    """A policy whose every proposal is no allocation."""

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        return replace(Allocation.static(plan), weights=(float("nan"),) * len(plan.tiers))


def test_the_share_of_intervals_that_a_guard_took_over_is_known(
    evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert np.isnan(evaluation.fallback_fraction("static"))
    monkeypatch.setattr(playing, "make_policy", lambda name: Guard(Broken()))
    guarded = evaluate(
        [contender("broken", "static")], {"one": TRACES["one"]}, spec=SPEC, processes=1
    )
    assert guarded.fallback_fraction("broken") > 0.9
