"""Engines that die, hang and talk nonsense: who notices, who is asked next, what is sent twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.engine_bridge.gateway.engine_app import Engine
from tests.engine_bridge.gateway.gateway_parts import (
    MODEL,
    events,
    raw_engine,
    run,
    running_gateway,
    start_engine,
    texts,
    until,
)
from trimtab.engine_bridge.gateway.exchange import Exchange
from trimtab.engine_bridge.gateway.upstream import Client, Fault, UpstreamError
from trimtab.engine_bridge.vllm.identity import Identity

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"half"}}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def one_bad_then_good(bad: str, good: str) -> dict[str, Any]:
    """The bad engine is always asked first: it has the draft that the tier should have."""
    return {"bad": {"url": bad, "draft": "code"}, "good": good}


SETTINGS: dict[str, Any] = {"drafts": {"T3": "code"}}  # T3 is the tier of who has no key


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        HEAD,
        HEAD + chunk(ROLE),
        HEAD + chunk(ROLE) + chunk(TOKEN[:20]),
        HEAD + b"zz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{",
        b"\x00\x01\x02 garbage \xff\r\n\r\n",
        b"HTTP/1.1 999 What\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 502 Bad\r\ncontent-length: 2\r\n\r\n{}",
        HEAD + chunk(b'data: {"error":{"message":"dead","code":500}}\n\n') + b"0\r\n\r\n",
    ],
    ids=[
        "nothing", "half a head", "head", "role", "half a token", "no chunk", "half a body",
        "bytes", "no status", "upgrade", "endless header", "ssh", "502", "error event",
    ],
)  # fmt: skip
def test_an_engine_that_fails_before_the_first_token_is_replaced_unseen(
    tmp_path: Path, said: bytes
) -> None:
    asked = 0

    async def fail(reader: Reader, writer: Writer) -> None:
        nonlocal asked
        asked += 1
        writer.write(said)
        await writer.drain()

    async def test() -> None:
        good = await start_engine("good")
        async with (
            raw_engine(fail) as bad,
            running_gateway(tmp_path, one_bad_then_good(bad, good.url), **SETTINGS) as gateway,
        ):
            found = await gateway.stream("tokens=3")
            assert texts(found) == "good0 good1 good2 "
            assert 1 <= asked <= 2, "a kept connection may be closed: then once more on a new one"
            assert good.engine.begun == 1
            plain = await gateway.ask("tokens=2")
            assert plain.json()["choices"][0]["text"] == "good0 good1"
        await good.kill()

    run(test())


def test_an_engine_that_fails_after_the_first_token_is_not_replaced(tmp_path: Path) -> None:
    async def fail(reader: Reader, writer: Writer) -> None:
        writer.write(HEAD + chunk(ROLE) + chunk(TOKEN))
        await writer.drain()

    async def test() -> None:
        good = await start_engine("good")
        async with (
            raw_engine(fail) as bad,
            running_gateway(tmp_path, one_bad_then_good(bad, good.url), **SETTINGS) as gateway,
        ):
            found = await gateway.stream("tokens=3")
            assert texts(found[:-1]) == "half"
            assert found[-1]["error"]["code"] == "engine_failed"
            assert good.engine.begun == 0
        await good.kill()

    run(test())


def test_half_a_long_answer_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    import httpx

    async def fail(reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 20000000\r\n\r\n" + b"x" * 10_000_000)
        await writer.drain()

    async def test() -> None:
        async with raw_engine(fail) as bad, running_gateway(tmp_path, {"bad": bad}) as gateway:
            with pytest.raises(httpx.TransportError):
                await gateway.ask()

    run(test())


def test_a_request_that_two_engines_died_of_is_not_sent_to_a_third(tmp_path: Path) -> None:
    asked = set()

    async def fail(reader: Reader, writer: Writer) -> None:
        asked.add(writer.get_extra_info("sockname"))

    async def test() -> None:
        async with (
            raw_engine(fail) as a,
            raw_engine(fail) as b,
            raw_engine(fail) as c,
            running_gateway(tmp_path, {"a": a, "b": b, "c": c}) as gateway,
        ):
            answer = await gateway.ask()
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "engine_failed"
        assert len(asked) == 2

    run(test())


def test_what_an_engine_keeps_is_not_sent_to_two(tmp_path: Path) -> None:
    async def fail(reader: Reader, writer: Writer) -> None:
        return

    async def test() -> None:
        good = await start_engine("good")
        async with (
            raw_engine(fail) as bad,
            running_gateway(tmp_path, one_bad_then_good(bad, good.url), **SETTINGS) as gateway,
        ):
            body = {"model": MODEL, "input": "x"}
            stored = await gateway.client.post("/v1/responses", json=body)
            assert stored.status_code == 502
            assert good.engine.begun == 0
            unstored = await gateway.client.post("/v1/responses", json={**body, "store": False})
            assert unstored.status_code == 200
        await good.kill()

    run(test())


def test_a_dead_engine_is_taken_out_and_comes_back(tmp_path: Path) -> None:
    async def test() -> None:
        a, b = await start_engine("a"), await start_engine("b")
        async with running_gateway(tmp_path, {"a": a.url, "b": b.url}) as gateway:
            await a.kill()
            for number in range(20):
                assert (await gateway.ask(f"{number} tokens=1")).status_code == 200
            await until(lambda: gateway.states()["a"] == "out", what="a is out")
            port = a.port
            again = await start_engine("a", port=port)
            await until(lambda: gateway.states()["a"] == "up", what="a is back")
            said = {
                (await gateway.ask(f"{n} tokens=1")).json()["choices"][0]["text"] for n in range(30)
            }
            assert said == {"a0", "b0"}
        await again.kill()
        await b.kill()

    run(test())


def test_an_engine_that_says_it_is_sick_gets_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        a, b = await start_engine("a"), await start_engine("b")
        async with running_gateway(tmp_path, {"a": a.url, "b": b.url}) as gateway:
            a.engine.healthy = False
            await until(lambda: gateway.states()["a"] == "out", what="a is out")
            for number in range(20):
                answer = await gateway.ask(f"{number} tokens=1")
                assert answer.json()["choices"][0]["text"] == "b0"
        await a.kill()
        await b.kill()

    run(test())


def test_requests_wait_for_the_only_engine_to_come_back(tmp_path: Path) -> None:
    async def test() -> None:
        a = await start_engine("a")
        async with running_gateway(tmp_path, {"a": a.url}) as gateway:
            await a.kill()
            asked = [asyncio.create_task(gateway.ask(f"{n} tokens=1")) for n in range(20)]
            await until(lambda: gateway.states()["a"] == "out", what="a is out")
            again = await start_engine("a", port=a.port)
            answers = await asyncio.gather(*asked)
            assert [answer.status_code for answer in answers] == [200] * 20
            assert again.engine.begun == 20
        await again.kill()

    run(test())


def test_who_waits_too_long_or_in_too_large_a_crowd_is_told_when_to_come_again(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        settings: dict[str, Any] = {"caps": {"waiting": 3}, "time_outs": {"wait_s": 0.5}}
        async with running_gateway(tmp_path, {"a": "http://127.0.0.1:9"}, **settings) as gateway:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            answers = await asyncio.gather(*(gateway.ask() for _ in range(8)))
            assert [answer.status_code for answer in answers] == [503] * 8
            assert {answer.json()["error"]["code"] for answer in answers} == {"no_engine"}
            assert all(float(answer.headers["retry-after"]) > 0 for answer in answers)
            assert 0.4 < loop.time() - began_s < 3

    run(test())


def test_all_waits_of_a_request_together_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try may find that no engine can be used; the second wait has what the first has left."""

    async def test() -> None:
        engine = await start_engine("a")
        left_s: list[float] = []
        async with running_gateway(tmp_path, {"a": engine.url}, time_outs={"wait_s": 9}) as gateway:
            proxy, loop = gateway.gateway._proxy, asyncio.get_running_loop()
            found = gateway.gateway._setup.fleet.engines["a"]
            picks = [None, found, None, found]

            async def wait(tier: str, ends_s: float) -> None:
                left_s.append(ends_s - loop.time())
                await asyncio.sleep(0.05)

            with monkeypatch.context() as patched:
                patched.setattr(gateway.gateway._setup.fleet, "pick", lambda *_: picks.pop(0))
                patched.setattr(proxy._waiting, "wait", wait)
                exchange = Exchange({"path": "/", "headers": []}, noted, now_s=loop.time())
                exchange.identity, exchange.model = Identity("anonymous", "T3"), MODEL
                for _ in range(2):
                    assert await proxy._find(exchange, []) is found
        assert left_s[0] == pytest.approx(9.0, abs=0.01)
        assert left_s[1] <= left_s[0] - 0.05
        await engine.kill()

    run(test())


async def noted(message: Any) -> None:
    raise AssertionError("nothing is sent")


def test_the_top_tier_goes_to_the_reserve_and_the_others_wait(tmp_path: Path) -> None:
    from tests.engine_bridge.gateway.test_proxy import bearer, keys_file

    async def test() -> None:
        main, spare = await start_engine("main"), await start_engine("spare")
        keys = keys_file(tmp_path, acme=("sk-acme", "T0"), crowd=("sk-crowd", "T3"))
        engines = {"main": main.url, "spare": {"url": spare.url, "reserve": True}}
        async with running_gateway(tmp_path, engines, keys=keys) as gateway:
            high, low = bearer("sk-acme"), bearer("sk-crowd")
            await main.kill()
            answer = await gateway.ask("tokens=1", headers=high)
            assert answer.json()["choices"][0]["text"] == "spare0"
            waits = asyncio.create_task(gateway.ask("tokens=1", headers=low))
            await until(lambda: gateway.states()["main"] == "out", what="main is out")
            assert not waits.done()
            again = await start_engine("main", port=main.port)
            assert (await waits).json()["choices"][0]["text"] == "main0"
            await until(lambda: gateway.states()["main"] == "up", what="main is up")
            answer = await gateway.ask("tokens=1", headers=high)
            assert answer.json()["choices"][0]["text"] == "main0"
        await again.kill()
        await spare.kill()

    run(test())


def test_an_engine_that_stays_silent_is_given_up(tmp_path: Path) -> None:
    async def hang(reader: Reader, writer: Writer) -> None:
        await asyncio.sleep(30)

    async def start_then_hang(reader: Reader, writer: Writer) -> None:
        writer.write(HEAD + chunk(TOKEN))
        await asyncio.sleep(30)

    async def test() -> None:
        times = {"first_byte_s": 0.4, "idle_s": 0.4}
        async with (
            raw_engine(hang) as silent,
            running_gateway(tmp_path, {"a": silent}, time_outs=times) as gateway,
        ):
            answer = await gateway.ask()
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "engine_too_slow"
        async with (
            raw_engine(start_then_hang) as silent,
            running_gateway(tmp_path, {"a": silent}, time_outs=times) as gateway,
        ):
            found = await gateway.stream()
            assert texts(found[:-1]) == "half"
            assert "error" in found[-1]

    run(test())


def test_a_kept_connection_that_the_engine_has_closed_costs_nothing(tmp_path: Path) -> None:
    answered = 0

    async def once(reader: Reader, writer: Writer) -> None:
        # Says that it keeps the connection, and closes it all the same.
        nonlocal answered
        answered += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        await asyncio.sleep(0.02)

    async def test() -> None:
        async with raw_engine(once) as url, running_gateway(tmp_path, {"a": url}) as gateway:
            for _ in range(20):
                answer = await gateway.ask()
                assert answer.status_code == 200
                await asyncio.sleep(0.018)
            assert gateway.states()["a"] == "up"
        assert answered == 20

    run(test())


def test_answers_without_a_length_end_with_the_connection(tmp_path: Path) -> None:
    async def old(reader: Reader, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + TOKEN)
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(TOKEN)

    async def test() -> None:
        async with raw_engine(old) as url, running_gateway(tmp_path, {"a": url}) as gateway:
            assert texts(await gateway.stream()) == "halfhalf"

    run(test())


def test_events_come_whole_however_they_were_cut(tmp_path: Path) -> None:
    stream = ROLE + TOKEN * 3 + b"data: [DONE]\n\n"

    async def drip(reader: Reader, writer: Writer) -> None:
        writer.write(HEAD)
        for at in range(len(stream)):
            writer.write(chunk(stream[at : at + 1]))
            await writer.drain()
            if at % 16 == 0:
                await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    async def test() -> None:
        async with raw_engine(drip) as url, running_gateway(tmp_path, {"a": url}) as gateway:
            body = {"model": MODEL, "messages": [], "stream": True}
            answer = await gateway.client.post("/v1/chat/completions", json=body)
            assert answer.content == stream
            assert texts(events(answer.content)) == "halfhalfhalf"

    run(test())


def test_a_stream_that_broke_off_is_not_booked_as_finished(tmp_path: Path) -> None:
    async def fail(reader: Reader, writer: Writer) -> None:
        writer.write(HEAD + chunk(ROLE) + chunk(TOKEN))
        await writer.drain()

    usage = tmp_path / "usage"

    async def test() -> None:
        async with (
            raw_engine(fail) as bad,
            running_gateway(tmp_path, {"bad": bad}, usage_dir=str(usage)) as gateway,
        ):
            assert "error" in (await gateway.stream())[-1]

    run(test())
    (path,) = usage.glob("accounts-*.parquet")
    (row,) = pq.read_table(path).to_pylist()
    assert (row["outcome"], row["output_tokens"]) == ("failed", 1)


def test_a_slow_metrics_page_takes_no_engine_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    async def slow(self: Engine, request: Request) -> Response:
        nonlocal looks
        looks += 1
        await asyncio.sleep(30)
        return Response()

    monkeypatch.setattr(Engine, "metrics", slow)

    async def test() -> None:
        engine = await start_engine("a")
        probes = {"every_s": 0.05, "time_out_s": 0.3, "fail_after": 1}
        async with running_gateway(tmp_path, {"a": engine.url}, probes=probes) as gateway:
            await until(lambda: looks >= 3, what="it is looked at")
            assert gateway.states() == {"a": "up"}
            assert (await gateway.ask("tokens=1")).status_code == 200
        await engine.kill()

    run(test())


def test_an_engine_that_a_reload_took_out_is_still_given_up_when_silent() -> None:
    async def hang(reader: Reader, writer: Writer) -> None:
        await reader.read()

    async def test() -> None:
        async with raw_engine(hang) as url:
            client = Client(url, connect_s=1.0, first_byte_s=0.2, idle_s=0.2)
            client.close()
            await until(lambda: not client._sweeps, what="nobody looks any more")
            head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
            with pytest.raises(UpstreamError) as found:
                await asyncio.wait_for(client.send(head), 5)
            assert found.value.fault is Fault.SLOW

    run(test())
