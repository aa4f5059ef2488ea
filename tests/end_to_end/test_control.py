"""The control socket of a server at work: what is set holds, runs out, and survives nonsense."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("httpx", reason="it comes with vLLM")

from tests.end_to_end.load import InBackground, Wish, garbage
from tests.vllm_server import Server
from tests.waiting import poll
from trimtab.engine_bridge.vllm.control_client import ControlClient
from trimtab.engine_bridge.vllm.control_errors import ControlRefusedError

pytestmark = pytest.mark.slow
SETS = 200
CAP = 16


@pytest.fixture
def control(server: Server) -> Iterator[ControlClient]:
    with ControlClient(server.folder / "control.sock", timeout_s=10) as client:
        yield client
        client.release("test")


def work(count: int, tokens: int) -> list[Wish]:
    return [Wish(("acme", "crowd")[n % 2], f"bako {n} " * 20, tokens) for n in range(count)]


def test_a_set_is_taken_by_a_busy_engine(
    server: Server, control: ControlClient, record_property: pytest.RecordProperty
) -> None:
    asked = work(24, 6000)
    with InBackground(server, asked) as load:
        poll(lambda: control.health()["engine"]["running"] > 8, what="a busy engine")
        applied_ms = []
        for number in range(SETS):
            start_s = time.perf_counter()
            budget = 6000 + number % 2 * 100
            version = control.set({"prefill_budget_tokens": budget}, holder="test")["version"]
            while control.health()["taken_version"] < version:
                assert time.perf_counter() < start_s + 60
            applied_ms.append((time.perf_counter() - start_s) * 1e3)
        assert control.health()["engine"]["running"] > 8
    for name in (50, 99):
        figure = float(np.percentile(applied_ms, name))
        record_property(f"set_to_applied_p{name}_ms", figure)
        print(f"set to applied, busy engine: P{name} {figure:.2f} ms")
    assert load.answers() == [wish.tokens for wish in asked]


def test_a_cap_holds_and_ends_with_its_lease(server: Server, control: ControlClient) -> None:
    control.set({"max_num_seqs": CAP}, holder="test", ttl_s=3600)
    asked = work(3 * CAP, 1500)
    with InBackground(server, asked) as load:
        most = 0

        def waited() -> bool:
            nonlocal most
            engine = control.health()["engine"]
            most = max(most, engine["running"])
            return bool(engine["waiting"] >= CAP)

        poll(waited, what="a queue behind the cap", every_s=0.005)
        for _ in range(50):
            waited()
        assert most == CAP
        control.set({}, holder="test", ttl_s=0.2)
        poll(lambda: control.get()["state"] == "static", what="the lease's end")
        poll(lambda: control.health()["engine"]["running"] > CAP, what="a larger batch")
        # What the engine works with is the static plan, under a version of its own.
        assert control.health()["taken_version"] == control.get()["version"]
    assert load.answers() == [wish.tokens for wish in asked]


def test_nonsense_and_a_second_holder_change_nothing(
    server: Server, control: ControlClient
) -> None:
    set_to = control.set({"max_num_seqs": CAP}, holder="test", ttl_s=3600)
    asked = work(20, 800)
    with garbage(server.folder / "control.sock", 0.01), InBackground(server, asked) as load:
        with (
            ControlClient(server.folder / "control.sock") as other,
            pytest.raises(ControlRefusedError) as refused,
        ):
            other.set({"max_num_seqs": 1}, holder="other")
        answers = load.answers()
    assert refused.value.code == "held"
    assert answers == [wish.tokens for wish in asked]
    now = control.get()
    assert now["version"] == set_to["version"]
    assert now["allocation"]["max_num_seqs"] == CAP


def test_metrics_and_control_say_the_same_start(server: Server, control: ControlClient) -> None:
    import httpx

    page = httpx.get(f"{server.url}/metrics", timeout=30).text
    (shown,) = [line for line in page.splitlines() if line.startswith("trimtab_start_id{")]
    assert int(float(shown.rpartition(" ")[2])) == control.get()["start_id"]


def test_telemetry_tells_of_the_last_interval(server: Server, control: ControlClient) -> None:
    with InBackground(server, work(4, 50)) as load:
        load.answers()
    poll(lambda: bool(control.telemetry()), what="telemetry")
    told = control.telemetry()
    assert told is not None
    assert set(told["tiers"]) == {"T0", "T1", "T2", "T3"}
