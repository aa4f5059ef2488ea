"""The operator's commands against the real server, with loops that stand as the test says."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.controller.web.states import TOKEN, FakeDaemon, state
from trimtab.agents.verdict import GuardMode
from trimtab.controller.cli.app import main
from trimtab.controller.daemon.command import CommandKind
from trimtab.controller.daemon.state import Contact, LoopState
from trimtab.controller.web.app import make_app
from trimtab.controller.web.client import DaemonClient, DaemonUnavailableError
from trimtab.controller.web.serve import WebServer


class TickingDaemon(FakeDaemon):
    """Its loops tick twice whenever somebody looks."""

    def states(self) -> Mapping[str, LoopState]:
        self.by_engine = {
            name: replace(each, ticks=each.ticks + 2) for name, each in self.by_engine.items()
        }
        return self.by_engine


Run = Callable[..., int]


@pytest.fixture
def daemon() -> FakeDaemon:
    return TickingDaemon(state("a"), state("b"))


@pytest.fixture
def run(daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMTAB_DAEMON_TOKEN", TOKEN)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server = WebServer(make_app(daemon, TOKEN), "127.0.0.1:0")
    server.start()
    monkeypatch.setenv("TRIMTAB_DAEMON_URL", server.url)
    yield lambda *words: main(words)
    server.stop()


def test_hold_waits_until_the_loop_has_it(
    run: Run, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("hold", "a", "--by", "anna") == 0
    ((engine, command),) = daemon.orders
    assert (engine, command.kind) == ("a", CommandKind.HOLD)
    assert command.by.startswith("anna over HTTP from 127.0.0.1")
    assert capsys.readouterr().out.splitlines() == [
        "hold ordered for a",
        "note a: Held by an operator: the last allocation stays; data 1.2 s old",
        "     Release ends the hold; the policy then begins with a probation.",
    ]


def test_release_without_a_name_is_for_all(run: Run, daemon: FakeDaemon) -> None:
    assert run("release") == 0
    assert [(engine, order.kind) for engine, order in daemon.orders] == [
        (None, CommandKind.RELEASE)
    ]


def test_mode_changes_the_mode(
    run: Run, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("mode", "shadow", "b") == 0
    assert daemon.orders[0][1].mode is GuardMode.SHADOW
    assert "note b: Static plan, as ordered" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("mode", "actve"), "refused: mode must be one of static, shadow, canary, active"),
        (("hold", "c"), "refused: no engine of this name; engines are a, b"),
        (("status", "c"), "refused: no engine of this name; engines are a, b"),
        (("hold", "--token-file", "none"), "none: No such file or directory"),
        (("status", "--at", "localhost:9464"), '--at: "localhost:9464", must be an address'),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    run: Run,
    daemon: FakeDaemon,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    line: str,
) -> None:
    assert run(*words) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
    assert not daemon.orders


def test_a_wrong_token_is_refused(
    run: Run, daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.write_text("another-token-of-ours")
    other.chmod(0o600)
    assert run("hold", "--token-file", str(other)) == 2
    assert "refused: this is not the daemon's token" in capsys.readouterr().err
    assert not daemon.orders


def test_the_token_is_found_in_the_state_folder(
    run: Run, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRIMTAB_DAEMON_TOKEN")
    (tmp_path / "state").mkdir()
    path = tmp_path / "state" / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    assert run("hold") == 0
    assert daemon.orders


def test_status_is_a_line_an_engine_and_fails_if_one_is_in_trouble(
    run: Run, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("status") == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok   a: Controlling; learned policy in full; data 1.2 s old",
        "ok   b: Controlling; learned policy in full; data 1.2 s old",
    ]
    daemon.by_engine["b"] = state("b", contact=Contact.NO_CONTROL)
    assert run("status") == 1
    assert "BAD  b: The engine's control socket does not answer" in capsys.readouterr().out
    assert run("status", "a") == 0


def test_status_of_one_engine_shows_its_tiers_beside_the_plan(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("status", "a") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1][:4] == ["tier", "within", "target", "judged"]
    assert rows[2] == [
        "T0", "100.0", "%", "99.5", "%", "1,000", "0", "0", "500", "ms",
        "9900", "8800", "66.0", "%", "70.0", "%",
    ]  # fmt: skip


def test_status_shows_no_control_characters(
    run: Run, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.by_engine["a"] = state("a", contact=Contact.STANDBY, holder="x\x1b[2Jy", detail="z\x07")
    run("status", "a")
    said = capsys.readouterr().out
    assert "x [2Jy" in said
    assert "\x1b" not in said
    assert "\x07" not in said


def test_status_as_json_is_all_that_is_known(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "a", "--json") == 0
    assert json.loads(capsys.readouterr().out)["detail"]["decisions"]


def test_nobody_there_is_a_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    monkeypatch.setenv("TRIMTAB_DAEMON_URL", f"http://127.0.0.1:{port}")
    assert main(["status"]) == 1
    assert f"127.0.0.1:{port}: Connection refused; is `trimtab run` up" in capsys.readouterr().err


class Stranger(BaseHTTPRequestHandler):
    """Sends whoever comes elsewhere, and notes what it was shown."""

    shown: list[str | None]

    def do_GET(self) -> None:
        self.shown.append(self.headers["Authorization"])
        if self.path.startswith("/elsewhere"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")
            return
        self.send_response(307)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, form: str, *args: object) -> None:
        pass


def test_the_token_follows_no_redirect() -> None:
    Stranger.shown = []
    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = DaemonClient(f"http://127.0.0.1:{server.server_port}", TOKEN)
        with pytest.raises(Exception, match="refused: status 307"):
            client.order("hold", {})
        with pytest.raises(DaemonUnavailableError, match="not the daemon's"):
            DaemonClient(f"http://127.0.0.1:{server.server_port}/elsewhere?").state()
        server.shutdown()
    assert Stranger.shown == [f"Bearer {TOKEN}", None]


def test_waiting_for_a_tick_has_an_end(daemon: FakeDaemon) -> None:
    now_s = [0.0]
    stuck = FakeDaemon(state("a"))
    server = WebServer(make_app(stuck, TOKEN), "127.0.0.1:0")
    server.start()

    def wait(seconds: float) -> None:
        now_s[0] += seconds

    client = DaemonClient(server.url, TOKEN, wait=wait, monotonic_s=lambda: now_s[0])
    assert [each["engine"] for each in client.after_next_tick(["a"])] == ["a"]
    assert now_s[0] == pytest.approx(6.0, abs=0.3)
    server.stop()
