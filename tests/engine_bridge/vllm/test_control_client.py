"""The control client against whatever sits at the other end: it never waits beyond its time-out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faulty_links import Behaviour, SocketProxy
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.vllm.control_client import ControlClient
from trimtab.engine_bridge.vllm.control_errors import ControlUnavailableError
from trimtab.engine_bridge.vllm.control_server import ControlServer
from trimtab.engine_bridge.vllm.control_store import AllocationStore

TIMEOUT_S = 0.5
LATE_S = 0.4
"""What a request may take beyond its time-out on a busy machine: less than a second time-out."""


@pytest.fixture
def link(tmp_path: Path) -> Iterator[SocketProxy]:
    store = AllocationStore(load_plan())
    with (
        ControlServer(store, path=tmp_path / "engine.sock", switch_interval_s=None) as server,
        SocketProxy(tmp_path / "engine.sock", tmp_path / "link.sock") as made,
    ):
        assert server.path is not None
        yield made


@pytest.fixture
def client(link: SocketProxy) -> Iterator[ControlClient]:
    with ControlClient(link.path, timeout_s=TIMEOUT_S) as made:
        yield made


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (Behaviour.HANG, "within 0.5 s"),
        (Behaviour.DRIP, "within 0.5 s"),
        (Behaviour.GARBAGE, "no Trimtab engine"),
        (Behaviour.UNAVAILABLE, "link.sock: "),
        (Behaviour.DOWN, "link.sock: "),
    ],
)
def test_a_faulty_engine_is_named_in_time_and_found_again(
    link: SocketProxy, client: ControlClient, behaviour: Behaviour, words: str, kept: bool
) -> None:
    if kept:
        client.get()
    link.behave(behaviour)
    began_s = time.monotonic()
    with pytest.raises(ControlUnavailableError) as error:
        client.get()
    assert time.monotonic() - began_s < TIMEOUT_S + LATE_S
    assert words in str(error.value)
    link.behave(Behaviour.NORMAL)
    assert client.get()["state"] == "static"


def test_a_connection_that_the_engine_has_closed_is_opened_again(
    link: SocketProxy, client: ControlClient
) -> None:
    client.set({}, holder="me")
    link.behave(Behaviour.DOWN)
    link.behave(Behaviour.NORMAL)
    assert client.set({}, holder="me")["changed"] is False
