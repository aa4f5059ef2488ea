"""The real server: address, limits, start and stop."""

from __future__ import annotations

import http.client
import socket
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.controller.web.states import TOKEN, FakeDaemon
from trimtab.controller.web.app import make_app
from trimtab.controller.web.serve import ListenError, WebServer, parse_listen


@pytest.fixture
def server() -> Iterator[WebServer]:
    running = WebServer(make_app(FakeDaemon(), TOKEN), "127.0.0.1:0")
    running.start()
    yield running
    running.stop()


def port_of(server: WebServer) -> int:
    return parse_listen(server.url.removeprefix("http://"))[1]


@pytest.mark.parametrize(
    ("listen", "parsed"),
    [("127.0.0.1:9464", ("127.0.0.1", 9464)), ("[::1]:1", ("::1", 1)), ("all:0", ("all", 0))],
)
def test_addresses_are_read(listen: str, parsed: tuple[str, int]) -> None:
    assert parse_listen(listen) == parsed


@pytest.mark.parametrize("listen", ["", "9464", ":9464", "a:", "a:x", "a:65536", "::1:80", "a:-1"])
def test_other_addresses_are_refused(listen: str) -> None:
    with pytest.raises(ListenError, match=r"listen: .*host:port"):
        parse_listen(listen)


def test_it_answers_when_start_comes_back_and_not_after_stop() -> None:
    server = WebServer(make_app(FakeDaemon(), TOKEN), "127.0.0.1:0")
    server.start()
    with urllib.request.urlopen(f"{server.url}/healthz", timeout=5) as answer:
        assert answer.status == 200
        assert answer.headers["server"] is None
    server.stop()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port_of(server)), timeout=5)


def test_a_reader_that_stays_connected_does_not_keep_it_from_stopping(server: WebServer) -> None:
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=10) as idle:
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(100).startswith(b"HTTP/1.1 200")
        server.stop()
        while idle.recv(65536):
            pass


def test_an_order_that_never_arrives_does_not_keep_it_from_stopping(server: WebServer) -> None:
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=10) as slow:
        slow.sendall(
            b"POST /api/hold HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
            b"Expect: 100-continue\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
        )
        assert slow.recv(100).startswith(b"HTTP/1.1 100")
        begun_s = time.monotonic()
        server.stop()
        assert time.monotonic() - begun_s < 4


def test_a_port_in_use_is_named(server: WebServer) -> None:
    again = WebServer(make_app(FakeDaemon(), TOKEN), f"127.0.0.1:{port_of(server)}")
    with pytest.raises(ListenError, match=r'listen: "127.0.0.1:\d+".*in use'):
        again.start()


def test_endless_headers_are_cut_off(server: WebServer) -> None:
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=10) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 40_000)
        assert raw.recv(100).startswith(b"HTTP/1.1 4")


def test_a_body_of_unknown_length_is_held_to_the_same_size(server: WebServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=10)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    parts = iter([b" " * 1000] * 20)
    connection.request("POST", "/api/hold", body=parts, headers=headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
