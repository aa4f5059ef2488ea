"""The Grafana dashboard: a real Prometheus that scrapes the real pages answers all of it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.expressions import (
    PROMETHEUS,
    RULES,
    dashboard,
    dashboard_expressions,
    rules,
    template_queries,
)
from tests.deploy.pages import Controller, Engine, served

WAIT_S = 60.0


class Prometheus:
    """A Prometheus of this test's own."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query"

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The result; an expression that it cannot parse fails the test."""
        query = urllib.parse.urlencode({"query": expression}).encode()
        try:
            with urllib.request.urlopen(self._url, query, timeout=10) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{expression}: {error.read().decode()}")
        return found

    def wait_for(self, expression: str) -> None:
        """Until the expression has a result."""
        ends_s = time.monotonic() + WAIT_S
        while time.monotonic() < ends_s:
            try:
                if self.ask(expression):
                    return
            except (urllib.error.URLError, ConnectionError):
                pass  # It is still starting.
            time.sleep(0.2)
        pytest.fail(f"{expression}: nothing within {WAIT_S:g} s")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """The example's configuration with the shipped rules, on other ports and in a hurry."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    with served(Engine()) as engine, served(Controller()) as controller:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = dict.fromkeys(("scrape_interval", "evaluation_interval"), "500ms")
        config["global"]["scrape_timeout"] = "500ms"
        for job, port in zip(config["scrape_configs"], (engine, controller), strict=True):
            job.pop("scrape_interval", None)
            job.pop("scrape_timeout", None)
            job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        slow = RULES.read_text(encoding="utf-8")
        text = re.sub(r"interval: (15s|1m)$", "interval: 1s", slow, flags=re.MULTILINE)
        (folder / RULES.name).write_text(text, encoding="utf-8")
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = subprocess.Popen(
            [
                binary, f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            found = Prometheus(port)
            found.wait_for("count_over_time(trimtab_steps_total[1m]) > 4")
            found.wait_for("count_over_time(trimtab_controller_ticks_total[1m]) > 4")
            yield found
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


@pytest.mark.parametrize("expression", dashboard_expressions())
def test_every_panel_shows_something(prometheus: Prometheus, expression: str) -> None:
    assert prometheus.ask(expression), f"nothing to draw: {expression}"


def test_prometheus_takes_every_expression_of_the_rules(prometheus: Prometheus) -> None:
    for text in [rule["expr"] for rule in rules()] + template_queries():
        prometheus.ask(text)


def test_an_engine_that_is_well_alerts_nobody(prometheus: Prometheus) -> None:
    for rule in rules():
        # The page of this test loses audit entries on purpose, so that the panel shows some.
        if rule.get("alert") in (None, "TrimtabAuditLost", "TrimtabNotFollowing"):
            continue
        assert prometheus.ask(rule["expr"]) == [], rule["alert"]


def test_the_dashboard_is_whole() -> None:
    content = dashboard()
    variables = {entry["name"] for entry in content["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(content["panels"])))
    assert used - {"__rate_interval"} == variables
    panels = content["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert panel["type"] == "row" or panel["description"], panel["title"]


def test_no_panel_covers_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_the_example_scrapes_as_often_as_the_rules_need() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert "trimtab-controller" in jobs
    assert config["rule_files"] == [Path(RULES).name]
