"""The shipped rules: what promtool says of them, and that they read what is really there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.expressions import (
    PROMETHEUS,
    ROOT,
    RULES,
    dashboard_expressions,
    metrics,
    rules,
    template_queries,
    wanted_labels,
)
from tests.deploy.pages import Controller, Engine
from tests.test_docs import anchor

parser = pytest.importorskip("prometheus_client.parser")

TESTS = sorted(PROMETHEUS.glob("*_test.yaml"))


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (it comes with Prometheus)")
    return found


@pytest.fixture(scope="module")
def scraped() -> dict[str, list[dict[str, str]]]:
    """Labels of every sample of the real pages, by metric."""
    found: dict[str, list[dict[str, str]]] = {}
    for page in (Engine(), Controller()):
        for family in parser.text_string_to_metric_families(page.page()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def run(*words: str | Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_the_example(promtool: str) -> None:
    run(promtool, "check", "rules", RULES)
    run(promtool, "check", "config", PROMETHEUS / "prometheus.yml")


@pytest.mark.parametrize("file", TESTS, ids=lambda file: file.stem)
def test_alerts_fire_for_their_cause_and_only_then(promtool: str, file: Path) -> None:
    run(promtool, "test", "rules", file)


def test_every_alert_is_tested_to_fire_and_not_to_fire() -> None:
    fires: dict[str, set[bool]] = {}
    for file in TESTS:
        for test in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]:
            for case in test.get("alert_rule_test", ()):
                fires.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert set(fires) == alerts
    assert {name for name, seen in fires.items() if seen != {True, False}} == set()


def test_every_alert_has_words_figures_and_a_heading_that_says_what_to_do() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    headings = {anchor(title) for title in re.findall(r"^#+ (.*)$", page, re.MULTILINE)}
    for rule in rules():
        if "alert" not in rule:
            continue
        words = rule["annotations"]
        assert set(words) == {"summary", "description", "runbook"}, rule["alert"]
        path, _, heading = words["runbook"].partition("#")
        assert (ROOT / path).is_file(), rule["alert"]
        assert heading == anchor(rule["alert"])
        assert heading in headings, f"docs/alerts.md has no heading {rule['alert']}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_every_metric_of_rules_and_dashboard_is_on_a_real_page(
    scraped: dict[str, list[dict[str, str]]],
) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    known = {*scraped, *recorded, "up"}
    for text in [rule["expr"] for rule in rules()] + dashboard_expressions() + template_queries():
        assert metrics(text), f"no metric in {text}"
        assert metrics(text) - known == set(), text


def test_every_label_that_is_asked_for_is_on_a_real_page(
    scraped: dict[str, list[dict[str, str]]],
) -> None:
    for text in [rule["expr"] for rule in rules()] + dashboard_expressions():
        for metric, label, value in wanted_labels(text):
            if label in ("job", "instance"):
                continue  # Prometheus' own.
            assert any(labels.get(label) == value for labels in scraped[metric]), (
                f'{metric}{{{label}="{value}"}} in {text}'
            )


def test_every_recorded_series_is_read_by_something() -> None:
    read = set[str]().union(*(metrics(rule["expr"]) for rule in rules()))
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert recorded - read == set()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("sum by (tier) (rate(a_total[5m])) / on (x) b", {"a_total", "b"}),
        ('a{b="c d"} unless on (e) f offset 5m and g >= 40', {"a", "f", "g"}),
        ("histogram_quantile(0.99, x:y_bucket:rate5m) or vector(0)", {"x:y_bucket:rate5m"}),
        ("time() - t_seconds > 5 * i_seconds", {"t_seconds", "i_seconds"}),
    ],
)
def test_the_names_in_an_expression_are_found(text: str, names: set[str]) -> None:
    assert metrics(text) == names
