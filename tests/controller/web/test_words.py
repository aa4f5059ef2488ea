from __future__ import annotations

import pytest

from tests.controller.web.states import INTERVAL_S, NOW_S, fresh_state, state
from trimtab.agents.verdict import GuardMode, GuardReason
from trimtab.controller.daemon.state import Contact, LoopState
from trimtab.controller.web.words import (
    CONTACTS,
    MODES,
    REASONS,
    Level,
    age_words,
    policy_words,
    seconds,
    standing,
)

STALE = (GuardReason.STALE,)
LOST = (GuardReason.SLO_REGRESSION,)


def test_every_code_has_words_of_its_own() -> None:
    for words, codes in ((REASONS, GuardReason), (CONTACTS, Contact), (MODES, GuardMode)):
        assert set(words) == set(codes)
        assert len(set(words.values())) == len(words)


@pytest.mark.parametrize(
    ("stands", "level", "headline"),
    [
        (state(), Level.GOOD, "Controlling; learned policy in full"),
        (state(last={"exposure": 0.6}), Level.GOOD,
         "Controlling; learned policy at 60 % of its residual"),
        (state(last={"exposure": 0.0}), Level.GOOD,
         "Controlling; static plan while learned policy is on probation"),
        (state(mode=GuardMode.CANARY, last={"exposure": 0.25}), Level.GOOD,
         "Controlling (canary); learned policy at 25 % of its residual"),
        (state(policy="static"), Level.GOOD, "Controlling; the static plan is the policy"),
        (state(mode=GuardMode.SHADOW, last={"exposure": 0.0}), Level.NOTE,
         "Static plan, as ordered: learned policy is watched in shadow mode"),
        (state(mode=GuardMode.STATIC, last={"exposure": 0.0}), Level.NOTE,
         "Static plan, as ordered: the policy is not asked"),
        (state(mode=GuardMode.HOLD), Level.NOTE, "Held by an operator: the last allocation stays"),
        (state(last={"fell_back": True, "exposure": 0.0, "reasons": LOST}), Level.BAD,
         "Fell back to the static plan: promises were kept worse than under the static plan"),
        (state(mode=GuardMode.HOLD, last={"fell_back": True, "reasons": LOST}), Level.BAD,
         "Fell back to the static plan: promises were kept worse than under the static plan"),
        (state(last={"reasons": STALE}), Level.NOTE,
         "Keeps the last allocation: the telemetry is late"),
        (state(latched=True), Level.BAD, "Latched on the static plan after 0 trips"),
        (state(contact=Contact.NO_TELEMETRY, last={"fell_back": True, "reasons": STALE}), Level.BAD,
         "Fell back to the static plan: the telemetry is too old to act on"),
        (state(contact=Contact.NO_TELEMETRY), Level.BAD,
         "Keeps the last allocation: the telemetry is too old to act on"),
        (state(contact=Contact.NO_TELEMETRY, telemetry=None), Level.BAD,
         "No telemetry yet: the static plan is asked for"),
        (state(contact=Contact.STANDBY, holder="ops@x"), Level.NOTE,
         "Standing by: ops@x holds the engine's lease"),
        (state(contact=Contact.NO_CONTROL), Level.BAD,
         "The engine's control socket does not answer"),
        (state(contact=Contact.NO_CONTROL, age_s=30.0), Level.BAD,
         "The engine answers neither for control nor for metrics"),
        (state(contact=Contact.WRONG_PLAN), Level.BAD,
         "Not controlling: the engine runs another plan than this daemon"),
        (state(contact=Contact.WRONG_ENGINE), Level.BAD,
         "Not controlling: the figures are those of another engine than the socket's"),
        (fresh_state(), Level.NOTE, "Starting: the engine has not answered yet"),
    ],
)  # fmt: skip
def test_a_sentence_says_how_an_engine_stands(
    stands: LoopState, level: Level, headline: str
) -> None:
    found = standing(stands, NOW_S)
    assert (found.level, found.headline) == (level, headline)
    assert found.level is not Level.BAD or found.hint


def test_a_loop_that_does_not_tick_is_worse_than_whatever_it_said_last() -> None:
    assert standing(state(), NOW_S + 5 * INTERVAL_S - 2).level is Level.GOOD
    stuck = standing(state(), NOW_S + 5 * INTERVAL_S)
    assert stuck.level is Level.BAD
    assert stuck.headline == "The daemon's loop for this engine has not ticked for 11 s"


def test_no_control_says_when_the_engine_is_on_its_own() -> None:
    left = standing(state(contact=Contact.NO_CONTROL, lease_left_s=6.0), NOW_S)
    over = standing(state(contact=Contact.NO_CONTROL, lease_left_s=0.0), NOW_S)
    assert "within 6.0 s" in left.hint
    assert "lease is over" in over.hint


@pytest.mark.parametrize(
    ("time_s", "shown"),
    [(0.0, "0.0 s"), (1.24, "1.2 s"), (14.4, "14 s"), (119.0, "119 s"), (180.0, "3 min"),
     (7200.0, "2 h"), (float("inf"), "an unknown time")],
)  # fmt: skip
def test_times_have_two_figures(time_s: float, shown: str) -> None:
    assert seconds(time_s) == shown


def test_no_data_has_no_age() -> None:
    assert age_words(float("inf")) == "no data"
    assert age_words(1.2) == "data 1.2 s old"


def test_a_bundle_is_no_adjective() -> None:
    assert policy_words("reactive") == "reactive policy"
    assert policy_words("bundle:run/best") == "policy bundle:run/best"
