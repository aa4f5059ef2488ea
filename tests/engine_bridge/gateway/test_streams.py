"""Streams: slow readers, clients that leave, the gateway's stop and reload."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine_bridge.gateway.gateway_parts import (
    MODEL,
    RunningGateway,
    events,
    raw_engine,
    run,
    running_gateway,
    start_engine,
    texts,
    until,
)

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


async def open_stream(
    gateway: RunningGateway, prompt: str, *, limit: int = 2**16, path: str = "/v1/chat/completions"
) -> tuple[Reader, Writer]:
    """A client's raw connection with a streaming request sent on it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=limit)
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": MODEL, "messages": messages, "stream": True}).encode()
    writer.write(
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
        % (path.encode(), len(body), body)
    )
    await writer.drain()
    return reader, writer


def test_tokens_come_one_by_one(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            loop = asyncio.get_running_loop()
            reader, writer = await open_stream(gateway, "slow tokens=4")
            came = []
            while (line := await reader.readline()) and b"[DONE]" not in line:
                if line.startswith(b"data:") and b"a" in line:
                    came.append(loop.time())
            assert came[-1] - came[0] > 0.25
            writer.close()
        await engine.kill()

    run(test())


def test_a_slow_client_slows_the_engine_and_does_not_grow_memory(tmp_path: Path) -> None:
    sent = 0
    piece = b"data: " + b"x" * 65_000 + b"\n\n"
    token = b'data: {"choices":[{"index":0,"delta":{"content":"t"}}]}\n\n'

    async def flood(reader: Reader, writer: Writer) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + token)
        for _ in range(4000):  # 260 MB
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    async def test() -> None:
        async with raw_engine(flood) as url, running_gateway(tmp_path, {"a": url}) as gateway:
            reader, writer = await open_stream(gateway, "x")
            await reader.readuntil(b"content")
            before = -1
            while before != sent:  # until nothing moves any more
                before = sent
                await asyncio.sleep(0.3)
            # Sockets' buffers and ours; the rest stays with the engine.
            assert sent < 20_000_000
            (link,) = gateway.gateway._setup.fleet.engines["a"].client.active
            assert sum(map(len, link._pieces)) < 2_000_000
            writer.transport.abort()
            await until(lambda: gateway.in_flight() == 0, what="the engine is let go")

    run(test())


def test_a_client_that_leaves_ends_its_request_at_the_engine_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            _, writer = await open_stream(gateway, "slow tokens=500")
            await until(lambda: engine.engine.begun == 1, what="it has begun")
            await asyncio.sleep(0.2)
            writer.transport.abort()
            await until(lambda: engine.engine.cut == 1, what="it is cut", deadline_s=2)
            assert gateway.in_flight() == 0
            # The same before the first token, and where nothing is streamed.
            _, writer = await open_stream(gateway, "wait=60")
            await until(lambda: engine.engine.begun == 2, what="it has begun")
            writer.transport.abort()
            await until(lambda: gateway.in_flight() == 0, what="let go", deadline_s=2)
            asked = asyncio.create_task(gateway.ask("wait=60"))
            await until(lambda: engine.engine.begun == 3, what="it has begun")
            asked.cancel()
            await until(lambda: gateway.in_flight() == 0, what="let go", deadline_s=2)
            assert not gateway.gateway._proxy.open
            assert gateway.gateway._proxy.bodies.held_bytes == 0
            assert gateway.states() == {"a": "up"}
        await engine.kill()

    run(test())


def test_a_client_that_leaves_while_it_waits_leaves_no_trace(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_gateway(tmp_path, {"a": "http://127.0.0.1:9"}) as gateway:
            asked = asyncio.create_task(gateway.ask())
            waiting = gateway.gateway._waiting
            await until(lambda: sum(waiting.lengths.values()) == 1, what="it waits")
            asked.cancel()
            await until(lambda: sum(waiting.lengths.values()) == 0, what="it is gone")

    run(test())


def test_a_client_that_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        times = {"stalled_client_s": 0.5}
        async with running_gateway(tmp_path, {"a": engine.url}, time_outs=times) as gateway:
            _, writer = await open_stream(gateway, "huge tokens=4000", limit=1024)
            await until(lambda: gateway.in_flight() == 1, what="it runs")
            await until(lambda: gateway.in_flight() == 0, what="it is cut off")
            assert engine.engine.finished == 0
            writer.close()
        await engine.kill()

    run(test())


def test_a_stop_lets_open_streams_end_and_takes_no_new_ones(tmp_path: Path) -> None:
    import httpx

    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            stream = asyncio.create_task(gateway.stream("slow tokens=8"))
            await until(lambda: engine.engine.begun == 1, what="it has begun")
            admin = f"http://127.0.0.1:{gateway.gateway.admin_port}"
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{admin}/readyz")).status_code == 200
                gateway.gateway.stop()
                assert (await client.get(f"{admin}/readyz")).status_code == 503
                assert (await client.get(f"{admin}/healthz")).status_code == 200
                main = gateway.gateway._main
                assert main is not None
                listening = [one for one in main.servers if one.is_serving()]
                await until(
                    lambda: not any(one.is_serving() for one in listening),
                    what="it listens no more",
                )
                with pytest.raises(httpx.ConnectError):
                    await client.get(f"http://127.0.0.1:{gateway.port}/v1/models")
            assert texts(await stream) == "".join(f"a{n} " for n in range(8))
            await asyncio.wait_for(asyncio.shield(gateway.task), 5)
        await engine.kill()

    run(test())


def test_a_stream_that_outlives_the_drain_is_cut(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        times = {"drain_s": 1}
        async with running_gateway(tmp_path, {"a": engine.url}, time_outs=times) as gateway:
            _, writer = await open_stream(gateway, "slow tokens=500")
            await until(lambda: engine.engine.begun == 1, what="it has begun")
            gateway.gateway.stop()
            await asyncio.wait_for(asyncio.shield(gateway.task), 5)
            await until(lambda: engine.engine.cut == 1, what="it is cut")
            writer.close()
        await engine.kill()

    run(test())


def test_a_reload_changes_engines_and_drops_no_stream(tmp_path: Path) -> None:
    async def test() -> None:
        a, b = await start_engine("a"), await start_engine("b")
        async with running_gateway(tmp_path, {"a": a.url}) as gateway:
            stream = asyncio.create_task(gateway.stream("slow tokens=10"))
            await until(lambda: a.engine.begun == 1, what="it has begun")
            await gateway.reload(engines={"b": {"url": b.url, "models": [MODEL]}})
            assert gateway.states() == {"b": "up"}
            for _ in range(5):
                answer = await gateway.ask("tokens=1")
                assert answer.json()["choices"][0]["text"] == "b0"
            assert texts(await stream) == "".join(f"a{n} " for n in range(10))
        await a.kill()
        await b.kill()

    run(test())


def test_a_reload_keeps_what_is_known_of_engines_that_stay(tmp_path: Path) -> None:
    async def test() -> None:
        a, b = await start_engine("a"), await start_engine("b")
        async with running_gateway(tmp_path, {"a": a.url}) as gateway:
            before = gateway.gateway._setup.fleet.engines["a"]
            new: dict[str, Any] = {
                "renamed": {"url": a.url, "models": [MODEL]},
                "b": {"url": b.url, "models": [MODEL]},
            }
            await gateway.reload(engines=new)
            assert gateway.gateway._setup.fleet.engines["renamed"] is before
            assert gateway.states() == {"renamed": "up", "b": "up"}
        await a.kill()
        await b.kill()

    run(test())


def test_a_reload_of_nonsense_changes_nothing(tmp_path: Path, caplog: Any) -> None:
    async def test() -> None:
        a = await start_engine("a")
        async with running_gateway(tmp_path, {"a": a.url}) as gateway:
            await gateway.reload(engines={"a": {"url": "ftp://x", "models": [MODEL]}})
            assert "engines.a.url" in caplog.text
            assert (await gateway.ask("tokens=1")).status_code == 200
        await a.kill()

    run(test())


def test_who_waits_finds_the_engine_that_a_reload_brings(tmp_path: Path) -> None:
    async def test() -> None:
        a = await start_engine("a")
        async with running_gateway(tmp_path, {"gone": "http://127.0.0.1:9"}) as gateway:
            asked = asyncio.create_task(gateway.ask("tokens=1"))
            waiting = gateway.gateway._waiting
            await until(lambda: sum(waiting.lengths.values()) == 1, what="it waits")
            await gateway.reload(engines={"a": {"url": a.url, "models": [MODEL]}})
            assert (await asked).json()["choices"][0]["text"] == "a0"
        await a.kill()

    run(test())


def test_many_streams_at_once_mix_nothing_up(tmp_path: Path) -> None:
    async def test() -> None:
        engines = [await start_engine(name) for name in "abc"]
        named = {one.engine.name: one.url for one in engines}
        async with running_gateway(tmp_path, named) as gateway:

            async def one(number: int) -> None:
                reader, writer = await open_stream(gateway, f"{number} tokens={number}")
                head = await reader.readuntil(b"\r\n\r\n")
                raw = await reader.readuntil(b"data: [DONE]\n\n")
                writer.close()
                if b"chunked" in head.lower():
                    lines = raw.split(b"\r\n")
                    raw = b"".join(line for line in lines if line.startswith(b"data"))
                said = texts(events(raw)).split()
                assert len(said) == number
                assert [word[1:] for word in said] == [str(n) for n in range(number)]
                assert len({word[0] for word in said}) <= 1

            await asyncio.gather(*(one(number % 40) for number in range(200)))
            assert gateway.in_flight() == 0
        for engine in engines:
            await engine.kill()

    run(test())
