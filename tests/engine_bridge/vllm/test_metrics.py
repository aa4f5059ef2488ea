"""The metrics as a scraper sees them, in one process and through vLLM's folder of several."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.engine_bridge.vllm.sample_telemetry import telemetry, tier
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry
from trimtab.engine_bridge.vllm.metric_families import (
    ALLOCATION_FIELDS,
    ENGINE_FIELDS,
    OUTCOMES,
    TIER_FIELDS,
    MetricsError,
    latency_buckets,
)
from trimtab.engine_bridge.vllm.metrics import TierMetrics

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

PLAN = load_plan()
Key = tuple[str, frozenset[tuple[str, str]]]


class Scrape:
    """A page of /metrics, by name and labels; `engine` is 0 and left out."""

    def __init__(self, text: str) -> None:
        self.families = list(parser.text_string_to_metric_families(text))
        self.values: dict[Key, float] = {}
        for family in self.families:
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("engine") == "0"
                self.values[sample.name, frozenset(labels.items())] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[f"trimtab_{name}", frozenset(labels.items())]


@pytest.fixture
def registry() -> object:
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def metrics(registry: object) -> TierMetrics:
    return TierMetrics(PLAN, registry, wall_s=lambda: 1000.0)


def scrape(registry: object) -> Scrape:
    return Scrape(prometheus_client.generate_latest(registry).decode())


def test_every_field_of_telemetry_and_every_knob_is_a_metric() -> None:
    assert {spec.field for spec in TIER_FIELDS} == {f.name for f in fields(TierTelemetry)}
    reported = {spec.field for spec in ENGINE_FIELDS} | {"tiers", "applied"}
    assert reported | {"read_back"} == {f.name for f in fields(Telemetry)}
    knobs = {name for name, *_ in ALLOCATION_FIELDS} | {"version"}
    assert knobs == {f.name for f in fields(Allocation)}


def test_names_follow_the_conventions(metrics: TierMetrics, registry: object) -> None:
    metrics.observe_interval(telemetry(PLAN))
    for family in scrape(registry).families:
        assert family.name.startswith("trimtab_")
        assert family.documentation.endswith(".")
        assert not family.name.endswith(("_ms", "_s"))
        names = {sample.name for sample in family.samples}
        if family.type == "counter" and not family.name.endswith("_created"):
            assert names == {f"{family.name}_total"}


def test_counts_add_up_and_levels_are_replaced(metrics: TierMetrics, registry: object) -> None:
    first = tier(arrivals=3, queue_length=7, service_ms=1500.0, ttft_ms_p99=250.0, running=2)
    metrics.observe_interval(telemetry(PLAN, first, time_s=2.0, kv_use_fraction=0.5))
    metrics.observe_interval(telemetry(PLAN, tier(arrivals=2, queue_length=1), time_s=4.0))
    page = scrape(registry)
    assert page("arrivals_total", tier="T0") == 5
    assert page("arrivals_total", tier="T3") == 0
    assert page("queue_length", tier="T0") == 1
    assert page("service_seconds_total", tier="T0") == pytest.approx(1.5)
    assert math.isnan(page("ttft_p99_seconds", tier="T0"))
    assert page("steps_total") == 400
    assert page("step_mean_seconds") == pytest.approx(0.01)
    assert page("engine_time_seconds") == 4.0
    assert page("kv_use_ratio") == 0.25


def test_attainment_is_a_level_and_two_counters(metrics: TierMetrics, registry: object) -> None:
    metrics.observe_interval(telemetry(PLAN, tier(attainment=0.75, attainment_samples=8)))
    metrics.observe_interval(telemetry(PLAN, tier()))
    page = scrape(registry)
    assert page("judged_total", tier="T0") == 8
    assert page("attained_total", tier="T0") == 6
    assert math.isnan(page("attainment_ratio", tier="T0"))


def test_the_applied_allocation_shows_by_names(metrics: TierMetrics, registry: object) -> None:
    page = scrape(registry)
    assert page("allocation_weight", tier="T0") == 8800
    assert page("allocation_max_running", tier="T3") == math.inf
    applied = replace(
        Allocation.static(PLAN),
        weights=(9000.0, 1.0, 2.0, 3.0),
        kv_fractions=(0.6, 0.3, 0.1),
        max_num_seqs=16,
        version=7,
    )
    metrics.observe_interval(telemetry(PLAN, applied=applied))
    page = scrape(registry)
    assert page("allocation_weight", tier="T3") == 3
    assert page("allocation_kv_ratio", pool="batch") == 0.3
    assert page("allocation_retention_factor", retention_class="T2-reused") == 0.05
    assert page("allocation_max_num_seqs") == 16
    assert page("allocation_version") == 7
    assert page("plan_info", plan="default", digest=PLAN.digest[:16]) == 1


def test_the_age_can_be_told_even_when_the_engine_has_stopped(
    metrics: TierMetrics, registry: object
) -> None:
    metrics.observe_interval(telemetry(PLAN, age_s=3.0))
    page = scrape(registry)
    assert page("telemetry_age_seconds") == 3.0
    assert page("telemetry_timestamp_seconds") == 997.0


def test_the_plans_targets_show_and_a_best_effort_tiers_are_a_wish(
    metrics: TierMetrics, registry: object
) -> None:
    page = scrape(registry)
    assert page("target_attainment_ratio", tier="T0", kind="promise") == 0.995
    assert page("target_attainment_ratio", tier="T3", kind="wish") == 0.9
    assert page("target_seconds", tier="T0", latency="ttft") == 0.8
    assert page("target_seconds", tier="T2", latency="e2e") == 240.0
    asked = {key for key in page.values if key[0] == "trimtab_target_seconds"}
    assert len(asked) == 7


def test_the_lease_shows(metrics: TierMetrics, registry: object) -> None:
    metrics.observe_lease(8.5)
    page = scrape(registry)
    assert (page("allocation_leased"), page("lease_left_seconds")) == (1, 8.5)
    metrics.observe_lease(math.inf)
    page = scrape(registry)
    assert page("allocation_leased") == 0
    assert math.isnan(page("lease_left_seconds"))


def test_a_request_counts_once_by_outcome(metrics: TierMetrics, registry: object) -> None:
    metrics.observe_finished("T1", 0.3, 0.02, 2.0, 0.1, "finished")
    metrics.observe_finished(1, None, math.nan, 5.0, None, "cancelled")
    metrics.observe_finished(1, None, None, None, None, "a word that nobody has agreed on")
    page = scrape(registry)
    assert page("requests_total", tier="T1", outcome="finished") == 1
    assert page("requests_total", tier="T1", outcome="cancelled") == 1
    assert page("requests_total", tier="T1", outcome="other") == 1
    assert page("ttft_seconds_count", tier="T1") == 1
    assert page("tpot_seconds_sum", tier="T1") == pytest.approx(0.02)
    assert page("e2e_seconds_count", tier="T1") == 2
    assert page("queue_wait_seconds_count", tier="T1") == 1
    outcomes = {
        dict(labels)["outcome"] for name, labels in page.values if name == "trimtab_requests_total"
    }
    assert outcomes == set(OUTCOMES)


def test_a_bucket_ends_at_each_target(metrics: TierMetrics, registry: object) -> None:
    assert {0.8, 4.0, 15.0} <= set(latency_buckets(PLAN, "ttft_ms"))
    assert {0.04, 0.06, 0.15} <= set(latency_buckets(PLAN, "tpot_ms"))
    assert 240.0 in latency_buckets(PLAN, "e2e_ms")
    metrics.observe_finished("T0", 0.8, 0.0401, 1.0, 0.0, "finished")
    page = scrape(registry)
    assert page("ttft_seconds_bucket", tier="T0", le="0.8") == 1
    assert page("tpot_seconds_bucket", tier="T0", le="0.04") == 0


def test_steps_are_histograms(metrics: TierMetrics, registry: object) -> None:
    metrics.observe_step(0.012, 33)
    page = scrape(registry)
    assert page("step_seconds_bucket", le="0.01") == 0
    assert page("step_seconds_bucket", le="0.015") == 1
    assert page("step_batch_requests_bucket", le="48.0") == 1


def test_what_is_encoded_is_counted_by_kind(metrics: TierMetrics, registry: object) -> None:
    for counts in ((2, 900, 0, 0, 0, 0), (1, 100, 1, 750, 0, 0)):
        metrics.observe_encoded(counts)
    page = scrape(registry)
    assert page("encoded_items_total", kind="image") == 3
    assert page("encoded_tokens_total", kind="image") == 1000
    assert page("encoded_tokens_total", kind="audio") == 750
    assert page("encoded_items_total", kind="video") == 0


def test_tenants_are_named_only_if_the_plan_asks(metrics: TierMetrics, registry: object) -> None:
    metrics.observe_tenants({(0, "acme"): 10.0})
    assert "acme" not in prometheus_client.generate_latest(registry).decode()


def test_the_heaviest_tenants_show_and_the_rest_is_one(registry: object) -> None:
    metrics = TierMetrics(with_values(PLAN, {"metrics.top_tenants": 2}), registry)
    metrics.observe_tenants({(0, "a"): 50.0, (0, "b"): 10.0, (3, "c"): 30.0, (3, "d"): 10.0})
    page = scrape(registry)
    assert page("top_tenant_service_ratio", tier="T0", tenant="a") == 0.5
    assert page("top_tenant_service_ratio", tier="T3", tenant="c") == 0.3
    assert page("top_tenant_service_ratio", tier="T0", tenant="") == 0.1
    assert page("top_tenant_service_ratio", tier="T3", tenant="") == 0.1
    metrics.observe_tenants({(0, "b"): 10.0})
    page = scrape(registry)
    assert page("top_tenant_service_ratio", tier="T0", tenant="a") == 0
    assert page("top_tenant_service_ratio", tier="T0", tenant="b") == 1


def test_names_of_tenants_are_bounded_for_ever(registry: object) -> None:
    metrics = TierMetrics(with_values(PLAN, {"metrics.top_tenants": 2}), registry)
    for n in range(500):
        metrics.observe_tenants({(0, f"tenant-{n}"): 1.0})
    names = {
        dict(labels)["tenant"]
        for name, labels in scrape(registry).values
        if name == "trimtab_top_tenant_service_ratio"
    }
    assert len(names) == 21
    assert scrape(registry)("top_tenant_service_ratio", tier="T0", tenant="") == 1


ENGINE_PROCESS = """
import sys
from tests.engine_bridge.vllm.sample_telemetry import telemetry, tier
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.vllm.metrics import TierMetrics
plan = load_plan()
metrics = TierMetrics(plan, start_id=int(sys.argv[3]) if len(sys.argv) > 3 else None)
arrivals, queue = int(sys.argv[1]), int(sys.argv[2])
metrics.observe_interval(telemetry(plan, tier(arrivals=arrivals, queue_length=queue)))
metrics.observe_finished(0, 0.3, 0.02, 2.0, 0.1, "finished")
"""


def run(code: str, folder: Path, *arguments: str) -> str:
    root = Path(__file__).resolve().parents[3]
    environment = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join((str(root), os.environ.get("PYTHONPATH", ""))),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRAPE = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_another_process_serves_what_the_engine_has_written(tmp_path: Path) -> None:
    run(ENGINE_PROCESS, tmp_path, "5", "9")
    page = Scrape(run(SCRAPE, tmp_path))
    assert page("arrivals_total", tier="T0") == 5
    assert page("queue_length", tier="T0") == 9
    assert page("allocation_weight", tier="T0") == 8800
    assert page("ttft_seconds_bucket", tier="T0", le="0.4") == 1
    assert page("requests_total", tier="T0", outcome="finished") == 1


def test_after_a_restart_levels_are_the_new_ones_and_counts_go_on(tmp_path: Path) -> None:
    first, second = 2**48 - 1, 2**48 - 3
    run(ENGINE_PROCESS, tmp_path, "5", "9", str(first))
    assert Scrape(run(SCRAPE, tmp_path))("start_id") == first
    run(ENGINE_PROCESS, tmp_path, "2", "0", str(second))
    page = Scrape(run(SCRAPE, tmp_path))
    assert page("start_id") == second
    assert page("queue_length", tier="T0") == 0
    assert page("arrivals_total", tier="T0") == 7


def test_after_the_folder_is_wiped_a_restart_begins_at_nothing(tmp_path: Path) -> None:
    run(ENGINE_PROCESS, tmp_path, "5", "9")
    for file in tmp_path.iterdir():
        file.unlink()
    run(ENGINE_PROCESS, tmp_path, "2", "1")
    assert Scrape(run(SCRAPE, tmp_path))("arrivals_total", tier="T0") == 2


def test_a_missing_folder_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "gone"))
    with pytest.raises(MetricsError, match=r"PROMETHEUS_MULTIPROC_DIR.*must be a folder"):
        TierMetrics(PLAN)


def test_without_prometheus_client_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MetricsError, match="pip install prometheus-client"):
        TierMetrics(PLAN)
