from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.controller.web.states import INTERVAL_S, NOW_S, TOKEN, FakeDaemon, fresh_state, state
from trimtab.agents.verdict import GuardMode
from trimtab.controller.daemon.command import CommandKind
from trimtab.controller.daemon.state import Contact
from trimtab.controller.web.app import PAGE, make_app
from trimtab.controller.web.protect import MOST_BODY_BYTES

BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon(state("a"), state("b"))


def client_of(daemon: FakeDaemon, host: str = "127.0.0.1:9464") -> TestClient:
    app = make_app(daemon, TOKEN, hosts=["Trimtab.example"])
    return TestClient(app, base_url=f"http://{host}")


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[TestClient]:
    with client_of(daemon) as found:
        yield found


@pytest.mark.parametrize("path", PAGE)
def test_every_file_of_the_page_is_served_with_its_type(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] == PAGE[path][1]
    assert answer.content


@pytest.mark.parametrize("path", ["/", "/api/state", "/metrics", "/healthz", "/nothing"])
def test_every_answer_forbids_foreign_parts(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers


def test_no_other_origin_is_let_in_by_a_preflight(client: TestClient) -> None:
    answer = client.options(
        "/api/hold",
        headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"},
    )
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_state_has_a_line_an_engine_and_details_on_demand(client: TestClient) -> None:
    lines = client.get("/api/state").json()
    assert [line["engine"] for line in lines["engines"]] == ["a", "b"]
    assert "detail" not in lines
    shown = client.get("/api/state?engine=b&since=99").json()["detail"]
    assert shown["engine"] == "b"
    assert [each["number"] for each in shown["decisions"]] == [100]


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("engine=c", 404, "engines are a, b"),
        ("engine=a&since=x", 400, "number"),
        ("engine=a&since=-1", 400, "number"),
        ("engine=a&since=" + "9" * 5000, 400, "number"),
        ("engine=a&since=%C2%B2", 400, "number"),
    ],
)
def test_wrong_questions_are_refused_in_words(
    client: TestClient, query: str, status: int, words: str
) -> None:
    answer = client.get(f"/api/state?{query}")
    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_a_hold_of_one_engine_reaches_its_loop(client: TestClient, daemon: FakeDaemon) -> None:
    answer = client.post("/api/hold", headers=BEARER, json={"engine": "a", "by": "anna\x1b[31m"})
    assert answer.status_code == 202
    assert answer.json() == {"ordered": "hold", "engines": ["a"]}
    ((engine, command),) = daemon.orders
    assert (engine, command.kind) == ("a", CommandKind.HOLD)
    assert command.by == "anna[31m over HTTP from testclient"


def test_without_an_engine_all_are_meant(client: TestClient, daemon: FakeDaemon) -> None:
    assert client.post("/api/release", headers=BEARER).json()["engines"] == ["a", "b"]
    assert [(engine, order.kind) for engine, order in daemon.orders] == [(None, "release")]


@pytest.mark.parametrize("mode", ["static", "shadow", "canary", "active"])
def test_modes_can_be_ordered(client: TestClient, daemon: FakeDaemon, mode: str) -> None:
    assert client.post("/api/mode", headers=BEARER, json={"mode": mode}).status_code == 202
    assert daemon.orders[0][1].mode is GuardMode(mode)


@pytest.mark.parametrize(
    ("path", "order", "status"),
    [
        ("mode", {}, 400),
        ("mode", {"mode": "hold"}, 400),
        ("mode", {"mode": "actve"}, 400),
        ("mode", {"mode": ["active"]}, 400),
        ("hold", {"mode": "active"}, 400),
        ("hold", {"engin": "a"}, 400),
        ("hold", {"engine": "c"}, 404),
        ("hold", {"engine": 1}, 404),
        ("hold", {"engine": ["a"]}, 404),
        ("hold", {"engine": ""}, 404),
        ("hold", {"by": 3}, 400),
        ("hold", ["a"], 400),
        ("reload", {}, 404),
    ],
)
def test_wrong_orders_change_nothing(
    client: TestClient, daemon: FakeDaemon, path: str, order: Any, status: int
) -> None:
    answer = client.post(f"/api/{path}", headers=BEARER, json=order)
    assert answer.status_code == status
    assert answer.json()["error"]
    assert not daemon.orders


@pytest.mark.parametrize("path", ["/api/hold", "/api/release", "/api/mode"])
@pytest.mark.parametrize(
    ("shown", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer ", 401),
        (f"Basic {TOKEN}", 401),
        (TOKEN, 401),
        ("Bearer wrong", 403),
        (f"Bearer {TOKEN}x", 403),
        (f"Bearer {TOKEN[:-1]}", 403),
    ],
)
def test_orders_need_the_token(
    client: TestClient, daemon: FakeDaemon, path: str, shown: str | None, status: int
) -> None:
    headers = {} if shown is None else {"Authorization": shown}
    answer = client.post(path, headers=headers, json={"mode": "static"})
    assert answer.status_code == status
    assert TOKEN not in answer.text
    assert ("www-authenticate" in answer.headers) == (status == 401)
    assert not daemon.orders


def test_a_token_that_is_no_ascii_is_a_wrong_one(client: TestClient) -> None:
    headers = {"Authorization": "Bearer tökén".encode()}
    assert client.post("/api/hold", headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9464", 202),
        ("[::1]:9464", 202),
        ("localhost:9464", 202),
        ("trimtab.example", 202),
        ("TRIMTAB.example:80", 202),
        ("evil.example", 403),
        ("trimtab.example.evil.example", 403),
        ("evil.example:9464", 403),
        ("[", 403),
    ],
)
def test_orders_must_be_addressed_to_us(daemon: FakeDaemon, host: str, status: int) -> None:
    with client_of(daemon) as client:
        answer = client.post("/api/hold", headers={**BEARER, "Host": host})
    assert answer.status_code == status
    assert bool(daemon.orders) == (status == 202)


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:9464", 200), ("trimtab.example", 200), ("evil.example", 403)]
)
def test_what_is_read_by_browsers_must_be_asked_of_us(
    daemon: FakeDaemon, host: str, status: int
) -> None:
    with client_of(daemon) as client:
        answer = client.get("/api/state", headers={"Host": host})
        assert answer.status_code == status
        assert status == 200 or "`hosts`" in answer.json()["error"]
        # Programs read these under whatever name leads here.
        for path in ("/metrics", "/healthz", "/readyz"):
            assert client.get(path, headers={"Host": host}).status_code != 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:8000", "http://["]
)
def test_orders_of_a_foreign_page_are_refused(
    client: TestClient, daemon: FakeDaemon, origin: str
) -> None:
    answer = client.post("/api/hold", headers={**BEARER, "Origin": origin})
    assert answer.status_code == 403
    assert not daemon.orders
    own = client.post("/api/hold", headers={**BEARER, "Origin": "http://127.0.0.1:9464"})
    assert own.status_code == 202


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff", 400),
        (b"[" * MOST_BODY_BYTES, 400),
        (b" " * (MOST_BODY_BYTES + 1), 413),
    ],
)
def test_bodies_are_small_json_objects(
    client: TestClient, daemon: FakeDaemon, body: bytes, status: int
) -> None:
    assert client.post("/api/hold", headers=BEARER, content=body).status_code == status
    assert not daemon.orders


def test_orders_are_posted(client: TestClient) -> None:
    assert client.get("/api/hold", headers=BEARER).status_code == 405


def health(daemon: FakeDaemon, path: str) -> tuple[int, dict[str, str]]:
    with client_of(daemon) as client:
        answer = client.get(path)
    said = answer.json()
    assert said["alive" if path == "/healthz" else "ready"] == (answer.status_code == 200)
    return answer.status_code, said["engines"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_loops_that_tick_with_fresh_figures_are_alive_and_ready(path: str) -> None:
    assert health(FakeDaemon(state("a"), state("b", contact=Contact.STANDBY)), path) == (200, {})


def test_a_loop_that_hangs_is_neither_alive_nor_ready() -> None:
    daemon = FakeDaemon(state("a"))
    app_client = client_of(daemon)
    daemon.now_s = NOW_S - 1 + 5 * INTERVAL_S
    assert app_client.get("/healthz").status_code == 200
    daemon.now_s += 0.1
    for path in ("/healthz", "/readyz"):
        answer = app_client.get(path)
        assert answer.status_code == 503
        assert answer.json()["engines"] == {"a": "no tick for 10 s; at most 10 s is right"}


def test_a_loop_may_take_a_while_to_begin_but_not_for_ever() -> None:
    daemon = FakeDaemon(fresh_state())
    client = client_of(daemon)
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").json()["engines"] == {"a": "starting"}
    daemon.now_s += 5 * INTERVAL_S + 1
    assert client.get("/healthz").status_code == 503


@pytest.mark.parametrize(
    ("stands", "why"),
    [
        ({"contact": Contact.NO_CONTROL, "detail": "run/a.sock: refused"},
         "the control socket does not answer: run/a.sock: refused"),
        ({"contact": Contact.WRONG_PLAN}, "the engine runs another plan"),
        ({"contact": Contact.NO_TELEMETRY}, "no usable telemetry"),
        ({"contact": Contact.STANDBY, "age_s": 60.0},
         "telemetry is 61 s old; at most 10 s is right"),
        ({"contact": Contact.STANDBY, "telemetry": None}, "no telemetry yet"),
    ],
)  # fmt: skip
def test_not_ready_says_which_engine_and_why(stands: dict[str, Any], why: str) -> None:
    daemon = FakeDaemon(state("a"), state("b", **stands))
    assert health(daemon, "/readyz") == (503, {"b": why})
    assert health(daemon, "/healthz") == (200, {})


def test_metrics_are_served_in_both_forms(client: TestClient) -> None:
    plain = client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert 'trimtab_controller_ticks_total{engine="b"} 100.0' in plain.text
    openmetrics = client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert openmetrics.text.endswith("# EOF\n")
