"""The doctor beside engines with real sockets and pages, a real Prometheus, a gateway's engines."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("prometheus_api_client")
pytest.importorskip("limits")

from limits.storage import storage_from_string

from tests.end_to_end.gateway_process import engine_process
from tests.live_parts import StandIn, prometheus, traffic, write_plan
from tests.redis_server import redis_server
from tests.waiting import free_port, poll
from trimtab.controller.cli import doctor as command
from trimtab.controller.cli.app import main
from trimtab.controller.daemon.settings import PrometheusSettings, settings_from
from trimtab.controller.doctor import engines, gateway
from trimtab.controller.doctor import prometheus as prometheus_look
from trimtab.controller.doctor.finding import Finding, Verdict
from trimtab.engine_bridge.plan import load_plan

INTERVAL_S = 0.25
RULES = Path(__file__).parents[3] / "deploy" / "prometheus" / "trimtab-rules.yaml"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan(tmp_path_factory.mktemp("plan"), interval_s=INTERVAL_S)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, plan: Path) -> Iterator[StandIn]:
    with StandIn(tmp_path_factory.mktemp("e"), plan, traffic(load=0.3, hours=0.2)) as engine:
        poll(lambda: engine.telemetry is not None, what="the first interval")
        yield engine


def settings_for(engine: StandIn, plan: Path, folder: Path, **own: Any) -> dict[str, Any]:
    source = {} if "prometheus" in own else {"metrics": engine.metrics_url}
    one = {"plan": str(plan), "control": str(engine.control_path), **source, **own}
    return {"listen": None, "state_dir": str(folder), "engines": {"a": one}}


def looked(settings: dict[str, Any]) -> dict[str, Finding]:
    parsed = settings_from(settings, where="test")
    told = engines.look(parsed, wait=time.sleep, timeout_s=5.0)
    return {f"{one.area}: {one.check}": one for one in told}


def faults(told: dict[str, Finding]) -> list[str]:
    return [name for name, one in told.items() if one.verdict is Verdict.FAULT]


def test_a_healthy_engine_has_no_fault_and_keeps_its_lease(
    engine: StandIn, plan: Path, tmp_path: Path
) -> None:
    told = looked(settings_for(engine, plan, tmp_path))
    assert faults(told) == []
    assert "static" in told["engine a: control socket"].found
    assert told["engine a: KV cache"].verdict is Verdict.OK
    assert told["engine a: figures"].verdict in (Verdict.OK, Verdict.NOTE)
    assert engine.store.describe().holder is None


def test_each_thing_that_is_wrong_is_named(engine: StandIn, plan: Path, tmp_path: Path) -> None:
    settings = settings_for(engine, plan, tmp_path, traffic_log=str(tmp_path / "none"))
    settings["engines"]["b"] = {
        "plan": "default",
        "control": f"unix:{engine.control_path}",
        "metrics": f"http://127.0.0.1:{free_port()}/metrics",
    }
    settings["engines"]["b"]["control"] = str(tmp_path / "no.sock")
    told = looked(settings)
    assert told["engine a: traffic log"].verdict is Verdict.WARNING
    assert faults(told) == ["engine b: control socket", "engine b: figures"]
    other = looked(settings_for(engine, Path("default"), tmp_path))
    assert faults(other) == ["engine a: plan"]
    assert "same plan file" in other["engine a: plan"].remedy
    engine.control_path.chmod(0o666)
    assert faults(looked(settings_for(engine, plan, tmp_path))) == [
        "engine a: control socket's permissions"
    ]
    engine.control_path.chmod(0o600)


def test_settings_that_cannot_hold_are_one_fault(plan: Path, tmp_path: Path) -> None:
    one = {"plan": str(tmp_path / "no.yaml"), "control": "x.sock", "metrics": "http://h/metrics"}
    told = looked({"engines": {"a": one}})
    assert faults(told) == ["controller: settings"]


def test_prometheus_is_asked_for_targets_intervals_and_alerts(
    engine: StandIn, plan: Path, tmp_path: Path
) -> None:
    with prometheus(tmp_path / "p", [engine.target], "1s", rules=[RULES]) as started:
        match = {"job": "vllm", "instance": engine.target}
        told = looked(
            settings_for(engine, plan, tmp_path, prometheus={"url": started.url, "match": match})
        )
        area = f"prometheus {started.url}"
        slow = told[f"{area}: target {engine.metrics_url}"]
        assert slow.verdict is Verdict.WARNING
        assert "every 1 s" in slow.found
        assert "trimtab-tiers" in told[f"{area}: alerts"].found
        match["instance"] = "nobody:1"
        told = looked(
            settings_for(engine, plan, tmp_path, prometheus={"url": started.url, "match": match})
        )
        assert f"{area}: targets" in faults(told)


def test_a_gateways_engines_models_and_books(tmp_path: Path) -> None:
    with engine_process("a") as one, redis_server(tmp_path) as books:
        config = tmp_path / "gateway.yaml"
        limits = tmp_path / "limits.yaml"
        limits.write_text(yaml.safe_dump({"storage": books.url}))
        settings = {
            "admission": str(limits),
            "engines": {
                "a": {"url": one.url, "models": ["m"]},
                "b": {"url": f"http://127.0.0.1:{free_port()}", "models": ["m"]},
                "c": {"url": f"{one.url}/", "models": ["other"]},
            },
        }
        config.write_text(yaml.safe_dump(settings))

        def told() -> dict[str, Finding]:
            return {f"{f.area}: {f.check}": f for f in gateway.look(config, timeout_s=5.0)}

        seen = told()
        assert faults(seen) == [
            "gateway's engine b: answers",
            "gateway's engine c: models",
        ]
        assert seen["gateway: quotas"].verdict is Verdict.OK
        assert seen["gateway: keys"].verdict is Verdict.WARNING
        books.kill()
        assert "gateway: quotas" in faults(told())


@contextmanager
def says(body: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server that answers everything with this; its URL and what it was asked for."""
    asked: list[str] = []

    class Says(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Says)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ODD = {
    "deep": b"[" * 200_000,
    "no JSON": b"",
    "numbers": b'{"data": [1, 2]}',
    "labels": b'{"data": {"activeTargets": [{"labels": [1]}], "groups": []}}',
}


@pytest.mark.parametrize("name", ODD)
def test_whoever_answers_oddly_is_a_fault(name: str, plan: Path, tmp_path: Path) -> None:
    loaded = load_plan(str(plan))
    with says(ODD[name]) as (url, _):
        settings = PrometheusSettings(url=url, match={"job": "vllm"})
        (one,) = prometheus_look.look(settings, loaded, timeout_s=5.0)
        assert (one.verdict, one.check) == (Verdict.FAULT, "answers")
        config = tmp_path / "gateway.yaml"
        config.write_text(yaml.safe_dump({"engines": {"a": {"url": url, "models": ["m"]}}}))
        told = {f.check: f for f in gateway.look(config, timeout_s=5.0)}
        assert told["models"].verdict is Verdict.FAULT


def test_each_engines_own_targets_are_looked_for(
    engine: StandIn, plan: Path, tmp_path: Path
) -> None:
    """Engines share a Prometheus, not its labels."""
    body: dict[str, list[str]] = {"activeTargets": [], "groups": []}
    with says(json.dumps({"data": body}).encode()) as (url, _):
        settings = settings_for(
            engine, plan, tmp_path, prometheus={"url": url, "match": {"instance": "a:1"}}
        )
        other = {"url": url, "match": {"instance": "b:1"}}
        no = str(tmp_path / "no.sock")
        settings["engines"]["b"] = {"plan": str(plan), "control": no, "prometheus": other}
        parsed = settings_from(settings, where="test")
        told = [f.found for f in engines.look(parsed, wait=lambda _: None, timeout_s=5.0)]
    assert [text for text in told if "has instance=" in text] == [
        "none of 0 active targets has instance=a:1",
        "none of 0 active targets has instance=b:1",
    ]


def test_books_that_hang_are_waited_for_no_longer_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    def noted(url: str, **options: Any) -> Any:
        given.append(options)
        return storage_from_string(url, **options)

    monkeypatch.setattr("limits.storage.storage_from_string", noted)
    limits, config = tmp_path / "limits.yaml", tmp_path / "gateway.yaml"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        limits.write_text(f"storage: redis://127.0.0.1:{silent.getsockname()[1]}/0\n")
        engines = {"a": {"url": f"http://127.0.0.1:{free_port()}", "models": ["m"]}}
        config.write_text(yaml.safe_dump({"admission": str(limits), "engines": engines}))
        told = {f"{f.area}: {f.check}": f for f in gateway.look(config, timeout_s=0.05)}
    assert "gateway: quotas" in faults(told)
    (options,) = given
    assert options["socket_timeout"] == options["socket_connect_timeout"] == 0.05
    assert options["retry"].get_retries() == 0


def test_paths_that_cannot_be_are_faults(engine: StandIn, plan: Path, tmp_path: Path) -> None:
    long = str(tmp_path / ("x" * 5000))
    settings = settings_for(engine, plan, tmp_path, control=long, traffic_log=long)
    settings["state_dir"] = f"{long}/state"
    told = looked(settings)
    assert "engine a: control socket" in faults(told)
    assert told["engine a: traffic log"].verdict is Verdict.WARNING


def test_a_daemons_bad_file_is_a_finding_and_the_gateway_is_looked_at_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.controller.doctor.installation.look", lambda: iter(()))
    out = tmp_path / "doctor.json"
    words = ["--daemon", str(tmp_path / "no.yaml"), "--gateway", str(tmp_path / "none.yaml")]
    assert main(["doctor", *words, "--json", str(out)]) == command.DoctorError.exit_code
    areas = [(one["area"], one["verdict"]) for one in json.loads(out.read_text())["findings"]]
    assert areas == [("controller", "fault"), ("gateway", "fault")]
    assert "2 faults" in capsys.readouterr().err


def test_the_command_prints_exits_and_writes(
    engine: StandIn, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("trimtab.controller.doctor.installation.engine_seams", lambda version: ())
    words = ["doctor", "--control", str(engine.control_path), "--metrics", engine.metrics_url]
    out = tmp_path / "doctor.json"
    assert main([*words, "--plan", str(plan), "--json", str(out)]) == 0
    assert "0 faults" in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert content["schema"] == 1
    assert {"area", "check", "verdict", "found", "remedy"} == set(content["findings"][0])
    assert main(words) == command.DoctorError.exit_code == 1
    shown = capsys.readouterr()
    assert "fault" in shown.out
    assert "the same plan file" in shown.out
    assert "1 fault" in shown.err


@pytest.mark.parametrize(
    "words",
    [
        ["--control", "x.sock"],
        ["--plan", "default"],
        ["--daemon", "d.yaml", "--plan", "default"],
        ["--timeout-s", "0"],
    ],
)
def test_flags_that_do_not_fit_are_refused(words: list[str]) -> None:
    assert main(["doctor", *words]) == 2
