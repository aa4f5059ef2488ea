"""Prometheus fails in every way: the daemon holds, then falls back, and comes back by itself."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("httpx", reason="it comes with vLLM")

from tests.chaos.rig import SLACK_S, Rig, trial
from tests.faulty_links import Behaviour

pytestmark = pytest.mark.slow
STATIC_AFTER = 5
"""Control intervals: `static_after_intervals` of the guard."""


def within_s(rig: Rig) -> float:
    """Until when the static plan must hold: the guard's patience, a tick, a scrape, a read."""
    return (STATIC_AFTER + 3) * rig.interval_s + SLACK_S


def test_killed(rig: Rig) -> None:
    rig.usual_daemon()
    with trial(rig, "Prometheus killed (SIGKILL)") as tried:
        rig.prometheus.kill()
        rig.prometheus_link.behave(Behaviour.DOWN)
        tried.falls_back(within_s(rig))
        assert tried.look()["contact"] == "no_telemetry"
        rig.prometheus.start()
        rig.prometheus_link.behave(Behaviour.NORMAL)
        tried.healed()


def test_paused(rig: Rig) -> None:
    rig.usual_daemon()
    with trial(rig, "Prometheus paused (SIGSTOP)") as tried:
        rig.prometheus.pause()
        try:
            tried.falls_back(within_s(rig))
            assert tried.look()["contact"] == "no_telemetry"
        finally:
            rig.prometheus.resume()
        tried.healed()


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour.SLOW,
        Behaviour.DRIP,
        Behaviour.UNAVAILABLE,
        Behaviour.NAN,
        Behaviour.STALE,
        Behaviour.GARBAGE,
    ],
)
def test_answers_that_are_no_use(rig: Rig, behaviour: Behaviour) -> None:
    rig.usual_daemon()
    words = {
        Behaviour.SLOW: "answers after 3 s",
        Behaviour.DRIP: "answers a byte at a time",
        Behaviour.UNAVAILABLE: "answers 503",
        Behaviour.NAN: "answers NaN for every number",
        Behaviour.STALE: "answers the same for ever",
        Behaviour.GARBAGE: "answers nonsense",
    }
    with trial(rig, f"Prometheus {words[behaviour]}") as tried:
        rig.prometheus_link.behave(behaviour)
        try:
            tried.falls_back(within_s(rig))
            assert tried.look()["contact"] == "no_telemetry"
            # It holds the lease all the same, so that nobody else is let in.
            assert rig.watcher.now.leased
        finally:
            rig.prometheus_link.behave(Behaviour.NORMAL)
        tried.healed()


def test_a_gap_that_is_shorter_than_the_guards_patience(rig: Rig) -> None:
    rig.usual_daemon()
    with trial(rig, "Prometheus answers 503 for one second") as tried:
        begun_s = time.monotonic()
        rig.prometheus_link.behave(Behaviour.UNAVAILABLE)
        tried.acts_on(2 * rig.interval_s)
        tried.look()
        rig.prometheus_link.behave(Behaviour.NORMAL)
        tried.healed()
    assert not any(look.static for look in rig.watcher.since(begun_s))
