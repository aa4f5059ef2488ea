"""Engines that go and come back, in virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine_bridge.gateway.health import Health, HealthRules, HealthState

RULES = HealthRules(fail_after=3, eject_after=2, eject_s=2.0, longest_eject_s=8.0, back_after=2)


def up() -> Health:
    health = Health(RULES)
    health.looked(True, 0.0)
    return health


def test_an_engine_is_not_used_before_the_first_look() -> None:
    health = Health(RULES)
    assert not health.usable
    health.looked(True, 0.0)
    assert health.usable


def test_an_engine_that_is_not_there_at_the_start_is_out_and_comes_up_later() -> None:
    health = Health(RULES)
    health.looked(False, 0.0)
    assert health.state is HealthState.OUT
    health.looked(True, 2.5)
    assert health.state is HealthState.TRIAL


def test_looks_that_fail_now_and_then_take_nothing_out() -> None:
    health = up()
    for number in range(20):
        health.looked(number % 3 == 0, float(number))
    assert health.usable
    for number in range(3):
        health.looked(False, 20.0 + number)
    assert not health.usable


def test_requests_that_fail_in_a_row_take_it_out_and_an_answer_between_does_not() -> None:
    health = up()
    for _ in range(5):
        health.unanswered(1.0)
        health.answered()
    assert health.usable
    health.unanswered(1.0)
    health.unanswered(1.0)
    assert health.state is HealthState.OUT
    assert health.ejections == 1


def test_it_comes_back_by_one_trial_request_at_a_time() -> None:
    health = up()
    health.unanswered(10.0)
    health.unanswered(10.0)
    health.looked(True, 11.0)
    assert not health.usable, "its time is not up"
    health.looked(True, 12.0)
    assert health.usable
    trial = health.begin()
    assert not health.usable, "one is on its way"
    health.ended(trial)
    assert health.usable, "its client left: nothing is known"
    health.begin()
    assert health.answered()
    health.begin()
    assert health.usable
    assert health.state is HealthState.UP


def test_the_end_of_an_older_request_lets_no_second_trial_in() -> None:
    health = up()
    before = [health.begin() for _ in range(3)]
    health.unanswered(10.0)
    health.unanswered(10.0)
    health.looked(True, 12.0)
    trial = health.begin()
    for older in before:
        health.ended(older)
        assert not health.usable, "one is on its way still"
    # Nor does that of a trial from before it was out once more.
    health.unanswered(13.0)
    health.looked(True, 20.0)
    second = health.begin()
    health.ended(trial)
    assert not health.usable
    health.ended(second)
    assert health.usable


def test_each_trial_that_fails_doubles_the_time_up_to_the_longest() -> None:
    health = up()
    now_s, waits = 0.0, []
    health.unanswered(now_s)
    health.unanswered(now_s)
    for _ in range(5):
        began_s = now_s
        while not health.usable:
            now_s += 0.5
            health.looked(True, now_s)
        waits.append(now_s - began_s)
        trial = health.begin()
        health.unanswered(now_s)
        health.ended(trial)
    assert waits == [2.0, 4.0, 8.0, 8.0, 8.0]


def test_good_looks_alone_bring_it_back_where_nobody_asks() -> None:
    health = up()
    for _ in range(3):
        health.looked(False, 0.0)
    for number in range(3):
        assert health.state is not HealthState.UP
        health.looked(True, 3.0 + number)
    assert health.state is HealthState.UP


def test_a_long_outage_does_not_make_the_way_back_longer() -> None:
    health = up()
    for number in range(1000):
        health.looked(False, float(number))
    health.looked(True, 1000.0)
    assert health.usable


EVENTS = st.lists(
    st.tuples(st.sampled_from(("good", "bad", "begin", "ok", "fail", "end")), st.floats(0, 5)),
    max_size=60,
)


@given(EVENTS)
def test_whatever_happens_an_engine_that_is_well_again_comes_back(
    history: list[tuple[str, float]],
) -> None:
    health, now_s = Health(RULES), 0.0
    running: list[int] = []
    for what, wait_s in history:
        now_s += wait_s
        match what:
            case "good" | "bad":
                health.looked(what == "good", now_s)
            case "begin":
                running.append(health.begin())
            case "ok":
                health.answered()
            case "fail":
                health.unanswered(now_s)
            case "end" if running:
                health.ended(running.pop(0))
    for trial in running:
        health.ended(trial)  # every request ends
    for _ in range(int(RULES.longest_eject_s) + RULES.back_after + 2):
        now_s += 1.0
        health.looked(True, now_s)
    assert health.state is HealthState.UP
