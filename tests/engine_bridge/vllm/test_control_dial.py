"""Connecting over TCP ends with its deadline, whatever resolver and addresses do."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from trimtab.engine_bridge.vllm.control_client import ControlClient
from trimtab.engine_bridge.vllm.control_dial import Address, Dial, resolve
from trimtab.engine_bridge.vllm.control_errors import ControlUnavailableError

SOON_S = 0.2
LATE_S = 0.4
"""What it may take beyond its deadline on a busy machine."""


@pytest.fixture
def port() -> Iterator[int]:
    """Where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def mute_port() -> Iterator[int]:
    """Where nobody answers and nobody refuses: a queue of connections that is full."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listening.getsockname()
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        yield address[1]


def at(*ports: int) -> list[Address]:
    return [address for port in ports for address in resolve("127.0.0.1", port)]


def test_a_resolver_that_hangs_is_given_up_and_not_asked_again(port: int) -> None:
    goes_on, asked = threading.Event(), []

    def hangs(host: str, wanted: int) -> list[Address]:
        asked.append(host)
        goes_on.wait(60)
        return at(port)

    dial = Dial("engine.example", port, resolver=hangs)
    for _ in range(3):
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match=r"engine\.example takes too long"):
            dial.connect(began_s + 0.05)
        assert time.monotonic() - began_s < 0.05 + LATE_S
    goes_on.set()
    dial.connect(time.monotonic() + 30).close()
    assert asked == ["engine.example"]


def test_an_address_that_swallows_everything_leaves_the_next_ones_their_time(
    port: int, mute_port: int
) -> None:
    dial = Dial("h", 0, resolver=lambda host, wanted: at(mute_port, port))
    with dial.connect(time.monotonic() + 2 * SOON_S) as link:
        assert link.getpeername()[1] == port


def test_all_addresses_together_take_no_longer_than_the_deadline(mute_port: int) -> None:
    dial = Dial("h", 0, resolver=lambda host, wanted: at(*[mute_port] * 4))
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        dial.connect(began_s + SOON_S)
    assert time.monotonic() - began_s < SOON_S + LATE_S


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b", "x" * 70 + ".example"])
def test_a_name_without_an_address_is_a_clear_failure(host: str) -> None:
    client = ControlClient(f"tcp://{host}:1", token="x" * 16, timeout_s=20.0)
    with pytest.raises(ControlUnavailableError, match=r"cannot connect: .*is the engine up"):
        client.get()
