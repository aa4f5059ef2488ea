"""The guard, one check at a time: every reason is provoked, counted, and recovered from."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.agents.guarded_run import INTERVAL_S, MOVED, STATIC, GuardedRun
from tests.conformance.policy_conformance import PLAN, telemetry, tier_telemetry
from trimtab.agents.guard import Guard
from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.stock import StockFcfsPolicy
from trimtab.agents.verdict import GuardMode, GuardReason

NAN = float("nan")


def only(run: GuardedRun) -> dict[GuardReason, int]:
    return {reason: count for reason, count in run.guard.counts.items() if count}


def test_a_run_begins_with_a_probation_and_a_ramp() -> None:
    run = GuardedRun()
    settings = run.guard.settings
    verdict = run.run_s(settings.probation_s - INTERVAL_S)
    assert verdict.apply == STATIC
    assert (verdict.exposure, verdict.fell_back, verdict.reasons) == (0.0, False, ())
    exposures = [run.tick().exposure for _ in range(round(settings.ramp_s / INTERVAL_S))]
    assert exposures == sorted(exposures)
    assert exposures[0] == pytest.approx(INTERVAL_S / settings.ramp_s)
    assert exposures[-1] == 1.0
    assert run.applied == MOVED
    assert only(run) == {}


def test_a_policy_that_proposes_static_changes_nothing() -> None:
    run = GuardedRun()
    run.answer(STATIC)
    for _ in range(100):
        assert run.tick().apply == STATIC
    assert only(run) == {}


@pytest.mark.parametrize(
    "proposal",
    [
        replace(STATIC, weights=(NAN, 1.0, 1.0, 1.0)),
        replace(STATIC, kv_fractions=(math.inf, 0.0, 0.0)),
        replace(STATIC, prefill_budget_tokens=NAN),
        replace(STATIC, prefill_budget_tokens=10**400),
        replace(STATIC, slack_fraction="0.5"),
        replace(STATIC, weights=(None, 1.0, 1.0, 1.0)),
    ],
)
def test_what_is_no_finite_number_falls_back_at_once(proposal: object) -> None:
    run = GuardedRun()
    run.to_full_exposure()
    run.answer(proposal)
    verdict = run.tick()
    assert verdict.apply == STATIC
    assert verdict.proposed is None
    assert verdict.fell_back
    assert verdict.reasons == (GuardReason.NON_FINITE,)
    assert run.guard.tally.trips == 1


@pytest.mark.parametrize("answer", [None, "static", replace(STATIC, weights=(1.0,)), 7])
def test_an_answer_that_is_no_allocation_is_a_failure(answer: object) -> None:
    run = GuardedRun()
    run.to_full_exposure()
    run.answer(answer)
    verdict = run.tick()
    assert (verdict.apply, verdict.reasons) == (STATIC, (GuardReason.POLICY_FAILED,))


def test_a_policy_that_raises_is_kept_out_for_the_cool_down() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    run.fail()
    assert run.tick().reasons == (GuardReason.POLICY_FAILED,)
    run.answer(MOVED)
    cool_down_s = run.guard.settings.cool_down_s
    verdict = run.run_s(cool_down_s - INTERVAL_S)
    assert verdict.fell_back
    assert verdict.reasons == (GuardReason.POLICY_FAILED,)
    assert run.tick().exposure > 0
    assert only(run) == {GuardReason.POLICY_FAILED: round(cool_down_s / INTERVAL_S)}


def test_a_policy_that_fails_in_its_probation_does_not_pass_it_and_is_not_tripped() -> None:
    run = GuardedRun()
    run.fail()
    verdict = run.run_s(10 * run.guard.settings.probation_s)
    assert verdict.apply == STATIC
    assert run.guard.tally.trips == 0
    run.answer(MOVED)
    assert run.run_s(run.guard.settings.probation_s - INTERVAL_S).exposure == 0
    assert run.tick().exposure > 0


def test_slightly_old_data_holds_and_old_data_falls_back() -> None:
    run = GuardedRun()
    held = run.to_full_exposure().apply
    asked = run.policy.asked
    assert run.tick(age_s=2 * INTERVAL_S).reasons == ()
    for age in (2.1, 5.0):
        verdict = run.tick(age_s=age * INTERVAL_S)
        assert (verdict.apply, verdict.fell_back) == (held, False)
        assert verdict.reasons == (GuardReason.STALE,)
    verdict = run.tick(age_s=5.1 * INTERVAL_S)
    assert (verdict.apply, verdict.fell_back) == (STATIC, True)
    assert run.policy.asked == asked + 1
    assert only(run) == {GuardReason.STALE: 3}
    assert run.tick().exposure == 0
    assert run.guard.tally.trips == 0


@pytest.mark.parametrize("age_s", [NAN, math.inf, -1.0])
def test_an_age_that_is_no_age_is_old(age_s: float) -> None:
    run = GuardedRun()
    run.to_full_exposure()
    assert run.tick(age_s=age_s).reasons == (GuardReason.STALE,)
    assert run.applied == STATIC


def test_the_same_telemetry_again_and_again_grows_old() -> None:
    run = GuardedRun()
    held = run.to_full_exposure().apply
    again = [run.tick(time_s=120.0) for _ in range(6)]
    assert [GuardReason.STALE in verdict.reasons for verdict in again] == [False] * 2 + [True] * 4
    assert again[4].apply == held
    assert again[5].apply == STATIC


def test_a_restarted_engine_begins_with_a_probation() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    run.time_s, run.applied = 0.0, STATIC
    assert run.run_s(run.guard.settings.probation_s - INTERVAL_S).exposure == 0
    assert run.tick().exposure > 0
    assert only(run) == {}


def test_novel_observations_fall_back_until_they_are_gone() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    settings = run.guard.settings
    run.policy.outside_fraction = 0.5
    for _ in range(settings.novel_intervals - 1):
        assert run.tick().exposure == 1.0
    verdict = run.tick()
    assert (verdict.apply, verdict.reasons) == (STATIC, (GuardReason.OUT_OF_ENVELOPE,))
    run.policy.outside_fraction = 0.0
    for _ in range(settings.novel_window - 1):
        assert GuardReason.OUT_OF_ENVELOPE in run.tick().reasons
    assert run.run_s(settings.probation_s).exposure > 0
    assert run.guard.tally.trips == 0


def test_a_proposal_out_of_reach_is_moved_inside_it() -> None:
    run = GuardedRun()
    run.answer(replace(STATIC, prefill_budget_tokens=10**9, max_num_seqs=1))
    verdict = run.to_full_exposure()
    reach = run.guard.settings.reach["prefill_budget_tokens"]
    most = STATIC.prefill_budget_tokens * math.exp(reach)
    assert verdict.apply.prefill_budget_tokens == pytest.approx(most, abs=1)
    assert verdict.apply.max_num_seqs == STATIC.max_num_seqs
    assert verdict.reasons == (GuardReason.FLOORS_AND_TOTALS,)


def test_a_proposal_beyond_one_interval_goes_as_far_as_it_may() -> None:
    run = GuardedRun(ramp_s=0.0, reach={"weights": 5.0})
    run.answer(replace(STATIC, weights=(900.0, 100.0, 5.0, 1.0)))
    run.run_s(run.guard.settings.probation_s - INTERVAL_S)
    verdict = run.tick()
    assert verdict.reasons == (GuardReason.SLEW,)
    assert verdict.apply.weights[0] == STATIC.weights[0] / 2
    assert verdict.proposed == verdict.apply


def test_promises_kept_worse_than_under_static_trip_and_the_engine_is_back_at_once() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    ticks = 0
    while run.tick(attainment=0.5).exposure:
        ticks += 1
        assert ticks < 60
    assert run.applied == STATIC
    assert run.verdict.reasons == (GuardReason.SLO_REGRESSION,)
    assert run.guard.tally.trips == 1


def test_a_tier_that_waits_long_trips_before_its_deadlines_are_missed() -> None:
    run = GuardedRun()
    run.answer(replace(STATIC, prefill_budget_tokens=256, low_tier_chunk_share=0.01))
    run.to_full_exposure()
    waiting = [tier_telemetry(arrivals=40) for _ in PLAN.tiers]
    waiting[2] = tier_telemetry(arrivals=40, oldest_wait_s=200.0)
    for _ in range(60):
        if not run.tick(tiers=tuple(waiting)).exposure:
            break
    assert run.applied == STATIC
    assert GuardReason.SLO_REGRESSION in run.verdict.reasons


def test_promises_that_static_keeps_no_better_do_not_trip() -> None:
    run = GuardedRun(reference_s=1e9)
    run.run_s(run.guard.settings.probation_s, attainment=0.6)
    assert run.run_s(600, attainment=0.6).exposure == 1.0
    assert run.guard.tally.trips == 0


def test_a_poor_reference_is_measured_again() -> None:
    run = GuardedRun()
    settings = run.guard.settings
    run.run_s(settings.probation_s, attainment=0.6)
    assert run.run_s(settings.reference_s, attainment=0.6).exposure == 1.0
    assert run.run_s(2 * INTERVAL_S, attainment=0.6).exposure == 0.0
    assert not run.verdict.fell_back
    run.run_s(settings.probation_s, attainment=0.99)
    for _ in range(60):
        if not run.tick(attainment=0.6).exposure:
            break
    assert run.verdict.reasons == (GuardReason.SLO_REGRESSION,)


def test_cool_downs_double_and_so_many_trips_latch_until_the_operator_releases() -> None:
    run = GuardedRun(most_trips=3)
    outs = []
    for _ in range(2):
        run.answer(MOVED)
        while not run.tick().exposure:
            pass
        run.answer(None)
        run.tick()
        run.answer(MOVED)
        start_s = run.time_s
        while not run.tick().exposure:
            pass
        outs.append(run.time_s - start_s)
    assert outs == [300.0, 600.0]
    run.answer(None)
    run.tick()
    run.answer(MOVED)
    assert run.guard.latched
    assert run.run_s(20_000).fell_back
    run.guard.release()
    assert run.run_s(run.guard.settings.probation_s - INTERVAL_S).exposure == 0
    assert run.tick().exposure > 0


def test_trips_are_forgotten() -> None:
    run = GuardedRun(most_trips=2, trip_memory_s=1000.0)
    for _ in range(4):
        run.answer(MOVED)
        run.run_s(1200)
        run.answer(None)
        run.tick()
    assert run.guard.tally.trips == 4
    assert not run.guard.latched


def test_an_engine_that_does_not_follow_falls_back() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    assert run.tick(applied=STATIC).exposure == 1.0
    verdict = run.tick(applied=STATIC)
    assert (verdict.apply, verdict.reasons) == (STATIC, (GuardReason.ACTUATION_MISMATCH,))
    assert run.guard.tally.trips == 1


def test_what_an_engine_rounds_is_no_mismatch() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    rounded = replace(MOVED, weights=tuple(w * (1 + 1e-9) for w in MOVED.weights), version=9)
    for _ in range(5):
        assert run.tick(applied=rounded).reasons == ()


def test_hold_keeps_what_was_applied_whatever_the_policy_does() -> None:
    run = GuardedRun()
    run.run_s(run.guard.settings.probation_s + 10)
    held = run.applied
    assert held != STATIC
    run.guard.hold()
    run.fail()
    for _ in range(50):
        verdict = run.tick()
        assert (verdict.apply, verdict.reasons) == (held, (GuardReason.OPERATOR_HOLD,))
        assert verdict.mode is GuardMode.HOLD
    run.answer(MOVED)
    run.guard.release()
    assert run.guard.mode is GuardMode.ACTIVE
    assert run.tick().exposure == 0
    assert run.guard.counts[GuardReason.OPERATOR_HOLD] == 50


def test_an_age_that_grows_with_the_repeats_counts_once() -> None:
    run = GuardedRun()
    held = run.to_full_exposure().apply
    told_s = run.tick(age_s=0.5 * INTERVAL_S) and run.time_s
    for late in (1, 2, 3, 4):
        age_s = (0.5 + late) * INTERVAL_S
        verdict = run.tick(time_s=told_s, age_s=age_s)
        assert (verdict.apply, verdict.fell_back) == (held, False), late
    assert run.tick(time_s=told_s, age_s=5.5 * INTERVAL_S).fell_back


def test_after_an_interruption_a_probation_begins_when_the_engine_is_back() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    run.guard.interrupted()
    run.time_s += 10 * run.guard.settings.probation_s
    run.applied = STATIC
    assert run.tick().apply == STATIC
    assert run.run_s(run.guard.settings.probation_s - INTERVAL_S).exposure == 0
    assert run.tick().exposure > 0
    assert run.guard.tally.trips == 0


def test_a_hold_that_was_interrupted_holds_the_static_plan() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    run.guard.hold()
    run.guard.interrupted()
    run.applied = STATIC
    verdict = run.tick()
    assert (verdict.apply, verdict.mode) == (STATIC, GuardMode.HOLD)


def test_a_read_back_tells_of_a_deaf_engine_however_old_the_figures_are() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    late_s = 1.5 * INTERVAL_S
    for _ in range(run.guard.settings.mismatch_intervals):
        verdict = run.tick(applied=STATIC, age_s=late_s, read_back=True)
    assert GuardReason.ACTUATION_MISMATCH in verdict.reasons


def test_a_figure_beyond_every_engine_does_not_blind_the_watch() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    tiers = [
        tier_telemetry(arrivals=40, attainment=1.0, attainment_samples=40, met_tokens=1e308)
        for _ in PLAN.tiers
    ]
    for _ in range(3):
        run.tick(tiers=tiers)
    assert run.run_s(120, attainment=0.3).reasons == (GuardReason.SLO_REGRESSION,)


def test_hold_does_not_outlast_broken_promises() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    run.guard.hold()
    verdict = run.run_s(120, attainment=0.3)
    assert verdict.apply == STATIC
    assert verdict.reasons == (GuardReason.SLO_REGRESSION, GuardReason.OPERATOR_HOLD)


def test_static_mode_does_not_ask_and_shadow_mode_does_not_apply() -> None:
    run = GuardedRun(mode=GuardMode.STATIC)
    verdict = run.run_s(200)
    assert (verdict.apply, verdict.proposed, run.policy.asked) == (STATIC, None, 0)
    run = GuardedRun(mode=GuardMode.SHADOW)
    verdict = run.run_s(200)
    assert (verdict.apply, verdict.proposed, verdict.fell_back) == (STATIC, MOVED, False)
    run.guard.set_mode(GuardMode.ACTIVE)
    assert run.tick().exposure == 0
    run.run_s(run.guard.settings.probation_s)
    assert run.tick().exposure > 0


def test_static_mode_is_static_at_once_and_with_old_data_too() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    run.guard.set_mode(GuardMode.STATIC)
    verdict = run.tick(age_s=3 * INTERVAL_S)
    assert (verdict.apply, verdict.exposure) == (STATIC, 0.0)


def test_canary_applies_its_fraction_of_the_residual() -> None:
    run = GuardedRun(mode=GuardMode.CANARY, canary_fraction=0.25)
    verdict = run.run_s(200)
    assert verdict.exposure == 0.25
    moved = MOVED.weights[0] / STATIC.weights[0]
    assert verdict.apply.weights[0] == pytest.approx(STATIC.weights[0] * moved**0.25)
    assert verdict.proposed == MOVED


def test_reset_forgets_everything() -> None:
    run = GuardedRun()
    run.to_full_exposure()
    run.answer(None)
    run.tick()
    run.guard.hold()
    run.guard.reset(PLAN, 0)
    assert run.guard.mode is GuardMode.ACTIVE
    assert run.guard.tally.intervals == run.guard.tally.trips == 0
    assert only(run) == {}


def test_the_guard_stands_for_the_policy_it_guards() -> None:
    guard = Guard(StockFcfsPolicy())
    assert (guard.name, guard.engine_rules) == ("stock-fcfs", "fcfs")
    guard.reset(PLAN, 0)
    assert guard.act(telemetry(PLAN)) == STATIC


def test_the_budget_grows_with_what_the_settings_tolerate() -> None:
    usual = GuardSettings()
    assert usual.trips_within(1200) == 3
    assert usual.trips_within(300) == 1
    assert usual.budget(1200) <= 0.02
    assert GuardSettings(loss_allowance_s=20.0).budget(1200) > usual.budget(1200)
    assert usual.budget(usual.probation_s) == usual.loss_drift
    assert GuardSettings(probation_s=0.0).budget(1.0) == 1.0
