"""The control server over real sockets: right answers, and no client that can harm the others."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_bridge.vllm.sample_telemetry import telemetry, tier
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.vllm import control_server
from trimtab.engine_bridge.vllm.control_client import ControlClient
from trimtab.engine_bridge.vllm.control_errors import (
    ControlRefusedError,
    ControlSocketError,
    ControlUnavailableError,
)
from trimtab.engine_bridge.vllm.control_protocol import MOST_REQUEST_BYTES
from trimtab.engine_bridge.vllm.control_server import MOST_CONNECTIONS, ControlServer
from trimtab.engine_bridge.vllm.control_store import AllocationStore
from trimtab.engine_bridge.vllm.traffic_log import TrafficLog

PLAN = load_plan()
TOKEN = "a token of enough characters"
WAIT_S = 5.0


class Clock:
    """A clock that tests move; it starts where the real one cannot confuse it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def store() -> AllocationStore:
    return AllocationStore(PLAN, capacity_max_num_seqs=64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


@pytest.fixture
def server(store: AllocationStore, path: Path) -> Iterator[ControlServer]:
    with ControlServer(store, path=path) as server:
        yield server


@pytest.fixture
def client(server: ControlServer, path: Path) -> Iterator[ControlClient]:
    with ControlClient(path, timeout_s=WAIT_S) as client:
        yield client


def connect(path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(WAIT_S)
    link.connect(str(path))
    return link


def ask(link: socket.socket, data: bytes) -> dict[str, Any]:
    link.sendall(data)
    return read(link)


def read(link: socket.socket) -> dict[str, Any]:
    line = bytearray()
    while not line.endswith(b"\n"):
        data = link.recv(1)
        assert data, "the server has closed the connection"
        line += data
    answer: dict[str, Any] = json.loads(line)
    assert answer["trimtab"] == 1
    return answer


def closed(link: socket.socket) -> bool:
    try:
        while link.recv(65_536):
            pass
    except ConnectionResetError:
        pass
    return True


def test_set_and_get_answer_while_no_step_runs(
    client: ControlClient, store: AllocationStore
) -> None:
    answer = client.set({"weights": {"T1": 150}, "max_num_seqs": 128}, holder="ops", ttl_s=30)
    assert answer["version"] == 1
    assert answer["changed"] is True
    assert answer["allocation"]["weights"] == {"T0": 8800, "T1": 150, "T2": 5, "T3": 1}
    assert answer["limited"] == [{"knob": "max_num_seqs", "reason": "capacity"}]
    found = client.get()
    assert (found["state"], found["holder"], found["version"]) == ("leased", "ops", 1)
    assert 0 < found["lease_left_s"] <= 30
    assert found["allocation"] == answer["allocation"]
    assert found["taken_version"] == 0
    assert store.take(0.0) is store.allocation
    assert client.get()["taken_version"] == 1


def test_release_brings_the_static_plan_back(client: ControlClient) -> None:
    client.set({"max_num_seqs": 16}, holder="ops")
    assert client.release("ops")["version"] == 2
    found = client.get()
    assert (found["state"], found["holder"], found["lease_left_s"]) == ("static", None, None)


def test_a_refusal_names_its_code_and_the_connection_goes_on(client: ControlClient) -> None:
    client.set({}, holder="first")
    with pytest.raises(ControlRefusedError, match="first holds the lease") as refused:
        client.set({}, holder="second")
    assert refused.value.code == "held"
    with pytest.raises(ControlRefusedError, match="finite") as refused:
        client.set({"slack_fraction": float("nan")}, holder="first")
    assert refused.value.code == "bad_value"
    with pytest.raises(ControlRefusedError) as refused:
        client.set({}, holder="first", expected_version=7)
    assert refused.value.code == "stale_version"
    assert client.health()["refused"] == 3


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"trimtab": 1, "op": "gte"}', 'did you mean "get"?'),
        (b'{"trimtab": 1}', "op: null, must be a known op"),
        (b'{"trimtab": 2, "op": "get"}', "must be 1, the protocol's version"),
        (b'{"op": "get"}', "must be 1, the protocol's version"),
        (b'{"trimtab": 1, "op": "set", "holdr": "a"}', 'did you mean "holder"?'),
        (b'{"trimtab": 1, "op": "set"}', "holder"),
        (b'{"trimtab": 1, "op": "get", "id": [1]}', "id"),
        (b'{"trimtab": 1, "op": "get"', "a JSON object on one line"),
        (b'{"a":' * 5000, "a JSON object on one line"),
    ],
)
def test_a_wrong_request_is_answered_with_what_would_be_right(
    server: ControlServer, path: Path, line: bytes, told: str
) -> None:
    with connect(path) as link:
        answer = ask(link, line + b"\n")
        assert answer["ok"] is False
        assert told in answer["error"]["message"]
        assert ask(link, b'{"trimtab": 1, "op": "get", "id": 5}\n')["id"] == 5


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\n", b"[]\n", os.urandom(999) + b"\n"],
)
def test_noise_ends_the_connection_and_nothing_else(
    client: ControlClient, path: Path, noise: bytes
) -> None:
    before = client.get()
    with connect(path) as link:
        link.sendall(noise)
        assert closed(link)
    assert client.get() == before


def test_a_line_without_an_end_is_cut_off(client: ControlClient, path: Path) -> None:
    with connect(path) as link:
        answer = ask(link, b"{" * (MOST_REQUEST_BYTES + 1))
        assert "at most 65536 bytes" in answer["error"]["message"]
        assert closed(link)
    assert client.health()["ok"]


def test_several_requests_in_one_piece_are_answered_in_order(
    server: ControlServer, path: Path
) -> None:
    with connect(path) as link:
        lines = [b'{"trimtab": 1, "op": "health", "id": %d}\n' % n for n in range(700)]
        link.sendall(b"".join(lines))
        assert [read(link)["id"] for _ in lines] == list(range(700))


def test_a_client_that_never_reads_holds_nobody_up(client: ControlClient, path: Path) -> None:
    with connect(path) as deaf:
        deaf.setblocking(False)
        try:
            for _ in range(2000):
                deaf.send(b'{"trimtab": 1, "op": "get"}\n')
        except BlockingIOError:
            pass
        assert client.health()["ok"]


def test_clients_at_once_get_their_own_answers(server: ControlServer, path: Path) -> None:
    found: dict[int, set[int]] = {}

    def work(number: int) -> None:
        with connect(path) as link:
            marks = range(number * 1000, number * 1000 + 100)
            found[number] = {
                ask(link, b'{"trimtab":1,"op":"get","id":%d}\n' % mark)["id"] for mark in marks
            }

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert found == {n: set(range(n * 1000, n * 1000 + 100)) for n in range(8)}


def test_connections_are_bounded_and_a_silent_one_makes_room(
    store: AllocationStore, path: Path
) -> None:
    clock = Clock()
    with ControlServer(store, path=path, clock=clock):
        links = [connect(path) for _ in range(MOST_CONNECTIONS)]
        for link in links:
            ask(link, b'{"trimtab": 1, "op": "health"}\n')
        with connect(path) as refused:
            assert "connections are open" in read(refused)["error"]["message"]
            assert closed(refused)
        clock.now_s += 11.0
        for link in links[1:]:
            ask(link, b'{"trimtab": 1, "op": "health"}\n')
        with connect(path) as newcomer:
            assert ask(newcomer, b'{"trimtab": 1, "op": "health"}\n')["ok"]
        assert closed(links[0])
        for link in links:
            link.close()


@pytest.mark.parametrize(
    ("sent", "passed_s"), [(b"", 301.0), (b'{"trimtab"', 11.0), (b'{"trimtab": 1,', 11.0)]
)
def test_silent_and_slow_clients_are_let_go(
    store: AllocationStore, path: Path, sent: bytes, passed_s: float
) -> None:
    clock = Clock()
    with ControlServer(store, path=path, clock=clock), connect(path) as link:
        ask(link, b'{"trimtab": 1, "op": "health"}\n')
        link.sendall(sent)
        with connect(path) as other:
            # When this is answered, what was sent before has been read.
            ask(other, b'{"trimtab": 1, "op": "health"}\n')
        clock.now_s += passed_s
        assert closed(link)


def test_a_fault_of_the_engine_is_answered_and_survived(store: AllocationStore, path: Path) -> None:
    def broken() -> Telemetry:
        raise ZeroDivisionError

    with ControlServer(store, path=path, telemetry=broken), ControlClient(path) as client:
        with pytest.raises(ControlRefusedError, match="see its log"):
            client.telemetry()
        assert client.health()["ok"]


def test_telemetry_comes_by_names_and_no_data_is_null(store: AllocationStore, path: Path) -> None:
    interval = telemetry(PLAN, tier(arrivals=1))
    seen: list[Telemetry | None] = [None]
    with (
        ControlServer(
            store, path=path, telemetry=lambda: seen[0], health=lambda: {"steps": 3}
        ) as server,
        ControlClient(server.path or "") as client,
    ):
        assert client.telemetry() is None
        seen[0] = interval
        found = client.telemetry()
        assert client.health()["engine"] == {"steps": 3}
    assert found is not None
    assert tuple(found["tiers"]) == PLAN.tier_names
    assert found["tiers"]["T0"]["arrivals"] == 1
    assert found["tiers"]["T1"]["ttft_ms_p50"] is None
    assert found["applied_version"] == 0


def test_flush_has_the_traffic_log_written_while_no_step_runs(
    store: AllocationStore, path: Path, tmp_path: Path
) -> None:
    log = TrafficLog(tmp_path / "log", engine="x", plan_digest="y")
    log.add(arrival_s=1.0, tenant="a", tier="T0", prompt_tokens=10, output_tokens=2)
    with ControlServer(store, path=path, flush=log.flush_counted), ControlClient(path) as client:
        assert client.flush()["handed_over_rows"] == 1
        while client.flush()["written_rows"] < 1:
            pass
    assert len(list((tmp_path / "log").glob("traffic-*.parquet"))) == 1
    log.close()


def test_flush_of_an_engine_without_a_traffic_log_says_what_to_do(client: ControlClient) -> None:
    with pytest.raises(ControlRefusedError, match="traffic_log_dir") as refused:
        client.flush()
    assert refused.value.code == "bad_request"


def test_nobody_but_the_user_may_reach_the_socket(server: ControlServer, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_closing_removes_the_socket_and_ends_the_thread(store: AllocationStore, path: Path) -> None:
    server = ControlServer(store, path=path).start()
    threads = [t for t in threading.enumerate() if t.name == "trimtab-control"]
    assert [t.daemon for t in threads] == [True]
    server.close()
    assert not path.exists()
    assert not threads[0].is_alive()
    with pytest.raises(ControlUnavailableError, match="is the engine up"):
        ControlClient(path).get()


def test_a_dead_socket_is_replaced_and_a_live_one_refused(
    store: AllocationStore, path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with ControlServer(store, path=path), pytest.raises(ControlSocketError, match="another engine"):
        ControlServer(store, path=path).start()
    assert not path.exists()


def test_closing_leaves_the_socket_of_a_successor(store: AllocationStore, path: Path) -> None:
    old = ControlServer(store, path=path).start()
    path.unlink()
    with ControlServer(store, path=path), ControlClient(path) as client:
        old.close()
        assert client.health()["ok"]


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda path: path.write_text("mine"), "must be a socket or nothing"),
        (lambda path: path.parent.chmod(0o777), "must be writable by its owner alone"),
    ],
)
def test_an_unsafe_place_is_refused(
    store: AllocationStore, path: Path, prepare: Callable[[Path], None], told: str
) -> None:
    prepare(path)
    with pytest.raises(ControlSocketError, match=told):
        ControlServer(store, path=path).start()


def test_a_path_that_no_socket_can_have_is_refused(store: AllocationStore, tmp_path: Path) -> None:
    with pytest.raises(ControlSocketError, match="at most 107 bytes long"):
        ControlServer(store, path=tmp_path / ("x" * 120)).start()


def test_each_rank_listens_beside_the_first(store: AllocationStore, path: Path) -> None:
    with ControlServer(store, path=path), ControlServer(store, path=path, rank=2) as third:
        assert third.path == path.with_name("control.dp2.sock")
        with ControlClient(third.path) as client:
            assert client.health()["ok"]


def test_tcp_needs_the_token_first(store: AllocationStore) -> None:
    with ControlServer(store, tcp="127.0.0.1:0", token=TOKEN) as server:
        assert server.tcp_address is not None
        host, port = server.tcp_address
        address = f"tcp://{host}:{port}"
        with ControlClient(address, token=TOKEN) as client:
            assert client.set({"max_num_seqs": 16}, holder="ops")["version"] == 1
        with (
            ControlClient(address, token=TOKEN + "x") as wrong,
            pytest.raises(ControlRefusedError) as refused,
        ):
            wrong.get()
        assert refused.value.code == "unauthorized"
        with socket.create_connection((host, port), timeout=WAIT_S) as link:
            assert ask(link, b'{"trimtab": 1, "op": "get"}\n')["error"]["code"] == "unauthorized"
            assert closed(link)


def test_a_tcp_client_that_shows_no_token_is_let_go(store: AllocationStore) -> None:
    clock = Clock()
    with ControlServer(store, tcp="127.0.0.1:0", token=TOKEN, clock=clock) as server:
        assert server.tcp_address is not None
        with socket.create_connection(server.tcp_address, timeout=WAIT_S) as link:
            with ControlClient("tcp://{}:{}".format(*server.tcp_address), token=TOKEN) as other:
                other.health()
            clock.now_s += 6.0
            assert closed(link)


def test_tcp_without_a_token_does_not_start(
    store: AllocationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRIMTAB_CONTROL_TOKEN", raising=False)
    with pytest.raises(ControlSocketError, match='TRIMTAB_CONTROL_TOKEN: "0 characters"'):
        ControlServer(store, tcp="127.0.0.1:0")
    monkeypatch.setenv("TRIMTAB_CONTROL_TOKEN", "short")
    with pytest.raises(ControlSocketError, match="at least 16 characters"):
        ControlServer(store, tcp="127.0.0.1:0")


def test_the_client_connects_again_after_a_restart(store: AllocationStore, path: Path) -> None:
    with ControlClient(path) as client:
        with ControlServer(store, path=path):
            assert client.health()["ok"]
        with ControlServer(store, path=path):
            assert client.set({"max_num_seqs": 16}, holder="ops")["ok"]


def test_a_checked_set_is_not_repeated_over_a_new_connection(
    store: AllocationStore, path: Path
) -> None:
    with ControlClient(path) as client:
        with ControlServer(store, path=path):
            version = client.get()["version"]
        with ControlServer(store, path=path):
            with pytest.raises(ControlUnavailableError):
                client.set({"max_num_seqs": 16}, holder="ops", expected_version=version)
            assert client.get()["version"] == version


def test_the_client_gives_up_on_a_silent_engine(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(ControlUnavailableError, match=r"no answer within 0\.05 s"):
            ControlClient(path, timeout_s=0.05).get()


def test_requests_are_rationed_and_nonsense_costs_more(
    server: ControlServer, path: Path, client: ControlClient
) -> None:
    connection = control_server.Connection(connect(path), authorized=True, now_s=0.0)
    connection.bucket.spend(499.0, 0.0)
    assert connection.bucket.wait_s(0.0) == 0.0
    connection.bucket.spend(20.0, 0.0)
    assert connection.bucket.wait_s(0.0) == pytest.approx(0.02)
    assert connection.bucket.wait_s(0.02) == 0.0
    connection.link.close()
