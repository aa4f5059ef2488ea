from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from tests.controller.web.states import (
    INTERVAL_S,
    MOVED,
    NOW_S,
    PLAN,
    decision,
    fresh_state,
    state,
)
from trimtab.controller.daemon.state import Contact, LoopState
from trimtab.controller.web.state_json import detail, overview


def written(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def of_tier(shown: dict[str, Any], name: str) -> dict[str, Any]:
    return next(tier for tier in shown["tiers"] if tier["tier"] == name)


def test_no_data_is_null_and_never_zero() -> None:
    shown = detail(fresh_state(), NOW_S)
    written(shown)
    assert shown["age_s"] is None
    assert shown["applied"] is None
    assert of_tier(shown, "T0")["now"] is None
    lost = replace(state(), age_s=math.inf)
    assert json.loads(written(overview({"a": lost}, NOW_S, "1")))["engines"][0]["age_s"] is None


def test_a_tier_without_requests_in_the_interval_attains_nothing_known() -> None:
    stands = state()
    assert stands.telemetry is not None
    quiet = replace(stands.telemetry.tiers[0], attainment=math.nan, attainment_samples=0)
    seen = replace(stands.telemetry, tiers=(quiet, *stands.telemetry.tiers[1:]))
    shown = detail(replace(stands, telemetry=seen), NOW_S)
    assert of_tier(shown, "T0")["now"]["attainment"] is None
    assert of_tier(shown, "T1")["now"]["attainment"] == 1.0
    assert of_tier(shown, "T0")["now"]["tpot_ms_p99"] is None


def test_allocation_stands_beside_the_static_plan() -> None:
    shown = detail(state(), NOW_S)
    assert shown["static"]["weights"]["T0"] == 8800
    assert shown["applied"]["weights"]["T0"] == 9900
    assert shown["decisions"][-1]["applied"]["kv_fractions"] == [*MOVED.kv_fractions]


def test_the_engines_last_word_counts_when_it_says_nothing_now() -> None:
    deaf = state(last={"applied": None}, contact=Contact.NO_CONTROL)
    assert detail(deaf, NOW_S)["applied"]["weights"]["T0"] == 9900
    assert detail(deaf, NOW_S)["decisions"][-1]["applied"] is None


def test_only_newer_decisions_are_sent_again() -> None:
    shown = detail(state(), NOW_S, since=97)
    assert [each["number"] for each in shown["decisions"]] == [98, 99, 100]


def history(*decisions: Any) -> LoopState:
    return replace(state(), history=decisions)


def test_attainment_counts_the_requests_of_five_minutes() -> None:
    half = (0.5, math.nan, 1.0, 1.0)
    shown = detail(
        history(
            decision(1, unix_s=NOW_S - 400, attainment=(0.0,) * 4),
            decision(2, unix_s=NOW_S - 100, attainment=half, samples=(30, 0, 1, 1)),
            decision(3, unix_s=NOW_S - 98),
        ),
        NOW_S,
    )
    counted = [(tier["met"], tier["judged"]) for tier in shown["tiers"]]
    assert counted == [(25, 40), (10, 10), (11, 11), (11, 11)]


def test_figures_told_again_for_want_of_newer_ones_are_not_counted_again() -> None:
    again = [decision(n, age_s=0.2 + n * INTERVAL_S, queue_length=(1,) * 4) for n in range(1, 5)]
    shown = detail(history(*again, decision(9, queue_length=(1,) * 4)), NOW_S)
    assert of_tier(shown, "T0")["judged"] == 20
    assert [each["judged"] is None for each in shown["decisions"]] == [
        False, True, True, True, False,
    ]  # fmt: skip


def test_decisions_before_the_first_telemetry_have_no_figures() -> None:
    nothing: dict[str, Any] = {
        "attainment": (),
        "samples": (),
        "ttft_ms_p99": (),
        "queue_length": (),
    }
    shown = detail(history(decision(1, age_s=math.inf, **nothing), decision(2)), NOW_S)
    written(shown)
    assert of_tier(shown, "T0")["judged"] == 10


def test_age_grows_while_a_loop_hangs() -> None:
    assert detail(state(), NOW_S + 50)["age_s"] == 0.2 + 51.0


def test_every_tier_and_pool_is_in_it_by_name() -> None:
    shown = detail(state(), NOW_S)
    assert [tier["tier"] for tier in shown["tiers"]] == list(PLAN.tier_names)
    assert shown["pools"] == list(PLAN.pool_names)
    assert of_tier(shown, "T0")["targets"] == {
        "ttft_ms": 800, "tpot_ms": 40, "e2e_ms": None, "attainment": 0.995,
    }  # fmt: skip
