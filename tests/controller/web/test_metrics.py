from __future__ import annotations

import math
import shutil
import subprocess
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.controller.web.states import NOW_S, FakeDaemon, decision, fresh_state, state, tally
from trimtab.agents.verdict import GuardMode, GuardReason
from trimtab.controller.daemon.state import Contact
from trimtab.controller.web.metrics import METRICS, PREFIX, TICK_BUCKETS_S, DaemonMetrics


def metrics_of(daemon: FakeDaemon) -> DaemonMetrics:
    return DaemonMetrics(daemon.states, daemon.now_unix_s, version="1.2.3")


def samples(metrics: DaemonMetrics) -> dict[tuple[str, ...], float]:
    """By the name without prefix, the engine, and the other labels' values in the labels' order."""
    text = metrics.scrape()[0].decode()
    return {
        (sample.name.removeprefix(PREFIX), *_values(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    }


def _values(labels: dict[str, str]) -> list[str]:
    return [labels[name] for name in sorted(labels, key=lambda name: (name != "engine", name))]


def test_every_number_of_an_engine_is_there_from_the_start() -> None:
    found = samples(metrics_of(FakeDaemon(fresh_state())))
    for metric in METRICS:
        name = metric.name + ("_total" if metric.kind == "counter" else "")
        assert (name, "a") in found
    assert found["telemetry_age_seconds", "a"] == math.inf
    assert found["last_tick_timestamp_seconds", "a"] == 0


def test_every_contact_mode_and_reason_is_there_from_the_start() -> None:
    found = samples(metrics_of(FakeDaemon(fresh_state())))
    assert {key[2]: value for key, value in found.items() if key[0] == "contact"} == {
        contact.value: float(contact is Contact.STARTING) for contact in Contact
    }
    assert {key[2] for key in found if key[0] == "mode"} == {mode.value for mode in GuardMode}
    for name, members in (("guard_reasons_total", GuardReason), ("contact_ticks_total", Contact)):
        assert {key[2:]: value for key, value in found.items() if key[0] == name} == {
            (member.value,): 0.0 for member in members
        }


def test_figures_are_those_of_the_state() -> None:
    reasons = {**dict.fromkeys(GuardReason, 0), GuardReason.STALE: 4}
    stands = state(
        last={"exposure": 0.25, "fell_back": True},
        latched=True,
        tally=tally(intervals=90, fell_back=7, trips=3, reasons=reasons),
        late_ticks=2,
        audit_lost=5,
        faults=6,
        bundle_error="no manifest",
        bundle_digest="ab",
        lease_left_s=8.0,
    )
    found = samples(metrics_of(FakeDaemon(stands)))
    assert found["ticks_total", "a"] == 100
    assert found["late_ticks_total", "a"] == 2
    assert found["exposure_ratio", "a"] == 0.25
    assert found["fallen_back", "a"] == 1
    assert found["latched", "a"] == 1
    assert found["judged_intervals_total", "a"] == 90
    assert found["fell_back_intervals_total", "a"] == 7
    assert found["trips_total", "a"] == 3
    assert found["guard_reasons_total", "a", "stale"] == 4
    assert found["audit_lost_total", "a"] == 5
    assert found["faults_total", "a"] == 6
    assert found["bundle_refused", "a"] == 1
    assert found["lease_left_seconds", "a"] == 8
    assert found["last_tick_timestamp_seconds", "a"] == NOW_S - 1
    assert found["policy_info", "a", "ab", "learned"] == 1
    assert found["build_info", "1.2.3"] == 1


def test_age_grows_while_a_loop_hangs() -> None:
    daemon = FakeDaemon()
    metrics = metrics_of(daemon)
    assert samples(metrics)["telemetry_age_seconds", "a"] == pytest.approx(1.2)
    daemon.now_s += 60
    assert samples(metrics)["telemetry_age_seconds", "a"] == pytest.approx(61.2)


def test_another_bundle_leaves_no_trace_of_the_old_one() -> None:
    daemon = FakeDaemon(state(bundle_digest="old"))
    metrics = metrics_of(daemon)
    samples(metrics)
    daemon.by_engine["a"] = state(bundle_digest="new")
    assert [key[2] for key in samples(metrics) if key[0] == "policy_info"] == ["new"]


def test_each_tick_is_observed_once_however_often_is_scraped() -> None:
    daemon = FakeDaemon(replace(state(), history=()))
    metrics = metrics_of(daemon)
    first = [decision(n, tick_ms=4.0) for n in (1, 2)]
    daemon.by_engine["a"] = replace(state(), history=tuple(first))
    samples(metrics)
    third = decision(3, tick_ms=60_000.0, contact=Contact.NO_CONTROL)
    daemon.by_engine["a"] = replace(state(), history=(*first, third))
    samples(metrics)
    found = samples(metrics)
    assert found["tick_seconds_count", "a"] == 3
    assert found["tick_seconds_sum", "a"] == pytest.approx(60.008)
    counts = [found["tick_seconds_bucket", "a", str(bound)] for bound in TICK_BUCKETS_S]
    assert counts == [0.0 if bound < 0.004 else 2.0 for bound in TICK_BUCKETS_S]
    assert found["contact_ticks_total", "a", "controlling"] == 2
    assert found["contact_ticks_total", "a", "no_control"] == 1


def test_a_loop_that_was_made_anew_counts_on() -> None:
    daemon = FakeDaemon()
    metrics = metrics_of(daemon)
    samples(metrics)
    daemon.by_engine["a"] = replace(state(), history=(decision(1), decision(2)))
    assert samples(metrics)["tick_seconds_count", "a"] == 102


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_finds_no_fault_in_them() -> None:
    text = metrics_of(FakeDaemon(state("a"), fresh_state("b"))).scrape()[0]
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
