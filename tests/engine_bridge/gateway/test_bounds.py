"""Clients that send too much, too slowly, or no HTTP at all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine_bridge.gateway.gateway_parts import (
    MODEL,
    RunningGateway,
    raw_engine,
    run,
    running_gateway,
    start_engine,
    until,
)

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


async def say(gateway: RunningGateway, *pieces: bytes, every_s: float = 0.0) -> bytes:
    """What comes back on a raw connection until the gateway ends it, or for two seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    came = b""
    try:
        async with asyncio.timeout(4):
            try:
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    if every_s:
                        await asyncio.sleep(every_s)
            except ConnectionError:
                pass
            while piece := await reader.read(65_536):
                came += piece
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    return came


def refused(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert json.loads(body)["error"]["code"] == code
    assert b"Traceback" not in answer


def test_heads_have_a_longest_length(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}, caps={"head_kib": 8}) as gateway:
            bombs = [
                (POST + b"x: " + b"y" * 20_000,),
                (POST + b"x: " + b"y" * 9_000 + b"\r\n\r\n",),
                (POST, *(b"x%d: y\r\n" % n for n in range(3000))),
                (b"GET /" + b"a" * 100_000,),
                (POST + b"".join(b"a: b\r\n" for _ in range(300)) + b"\r\n",),
                (POST, *(b"y" * 500 for _ in range(100))),
            ]
            for bomb in bombs:
                refused(await say(gateway, *bomb), 431, "head_too_large")
            assert (await gateway.ask("tokens=1")).status_code == 200
        await engine.kill()

    run(test())


def test_a_head_with_two_faults_is_refused_once(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        faults: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, said: faults.append(said))
        async with running_gateway(tmp_path, {"a": engine.url}, caps={"head_kib": 8}) as gateway:
            answer = await say(gateway, b"GET / HTTP/1.1\r\n\0" + b"\0" * 20_000)
            assert answer.count(b"HTTP/1.1 ") == 1
        assert not faults
        await engine.kill()

    run(test())


def test_heads_have_a_longest_time(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        times = {"head_s": 0.4}
        async with running_gateway(tmp_path, {"a": engine.url}, time_outs=times) as gateway:
            loris = [b"x%d: y\r\n" % n for n in range(15)]
            answers = await asyncio.gather(
                *(say(gateway, POST, *loris, every_s=0.1) for _ in range(20))
            )
            for answer in answers:
                refused(answer, 408, "head_too_slow")
            assert await say(gateway) == b""
            # A kept connection may be idle for longer than a head may take.
            assert (await gateway.ask("tokens=1")).status_code == 200
            await asyncio.sleep(0.6)
            assert (await gateway.ask("tokens=1")).status_code == 200
            # And an answer may take longer.
            assert (await gateway.ask("wait=0.8")).status_code == 200
        await engine.kill()

    run(test())


def test_bodies_have_a_longest_length(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}, caps={"body_mib": 1}) as gateway:
            long = b"x" * (3 << 20)
            declared = await gateway.client.post("/v1/completions", content=long)
            assert declared.status_code == 413
            assert declared.json()["error"]["code"] == "body_too_large"

            async def pieces() -> Any:
                for _ in range(48):
                    yield b"x" * 65_536

            chunked = await gateway.client.post("/v1/completions", content=pieces())
            assert chunked.status_code == 413
            whole = b'{"model": "q"' + b" " * ((1 << 20) - 14) + b"}"
            assert len(whole) == 1 << 20
            fits = await gateway.client.post("/v1/completions", content=whole)
            assert fits.status_code == 404
            assert gateway.gateway._proxy.bodies.held_bytes == 0
        assert engine.engine.begun == 0
        await engine.kill()

    run(test())


def test_bodies_have_a_longest_time(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        times = {"body_s": 0.4}
        async with running_gateway(tmp_path, {"a": engine.url}, time_outs=times) as gateway:
            head = POST + b"content-length: 100\r\n\r\n"
            refused(await say(gateway, head, b'{"model":'), 408, "body_too_slow")
            drip = [b"x"] * 25
            refused(await say(gateway, head, *drip, every_s=0.05), 408, "body_too_slow")
            assert gateway.gateway._proxy.bodies.held_bytes == 0
        await engine.kill()

    run(test())


def test_all_bodies_together_have_a_largest_size(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        caps = {"bodies_mib": 1, "body_mib": 1}
        async with running_gateway(tmp_path, {"a": engine.url}, caps=caps) as gateway:
            prompt = "wait=2 " + "x" * 400_000
            answers = await asyncio.gather(*(gateway.ask(prompt) for _ in range(4)))
            statuses = sorted(answer.status_code for answer in answers)
            assert statuses == [200, 200, 503, 503]
            full = next(answer for answer in answers if answer.status_code == 503)
            assert full.json()["error"]["code"] == "gateway_full"
            assert full.headers["retry-after"]
            assert (await gateway.ask("tokens=1")).status_code == 200
        await engine.kill()

    run(test())


def test_connections_have_a_greatest_number(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        caps = {"connections": 5}
        async with running_gateway(tmp_path, {"a": engine.url}, caps=caps) as gateway:
            opened = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(5)]
            main = gateway.gateway._main
            assert main is not None
            known = main.server_state.connections
            await until(lambda: len(known) == 5, what="they are known")
            refused(await say(gateway), 503, "gateway_full")
            for _, writer in opened:
                writer.close()
            await until(lambda: not known, what="they are gone")
            assert (await gateway.ask("tokens=1")).status_code == 200
        await engine.kill()

    run(test())


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        POST + b"bad header\r\n\r\n",
        POST + b"x: a\r\n b\x00c\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: x\r\nsec-websocket-version: 13\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_and_harms_nobody(tmp_path: Path, said: bytes) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(said)
            try:
                answer = await asyncio.wait_for(reader.read(65_536), 3)
            except (TimeoutError, ConnectionError):
                answer = b""
            writer.close()
            assert b" 500 " not in answer
            assert b"Traceback" not in answer
            if answer and b" 200 " not in answer:
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
            assert (await gateway.ask("tokens=1")).status_code == 200
            await until(lambda: not gateway.gateway._proxy.open, what="nothing is left open")
        await engine.kill()

    run(test())


def test_requests_behind_each_other_on_one_connection_are_answered_in_order(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            requests = b""
            for number in (3, 1, 2):
                body = json.dumps({"model": MODEL, "prompt": f"tokens={number}"}).encode()
                requests += POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
            came = await say(gateway, requests[:100], requests[100:], every_s=0.05)
            at = [came.find(b'"text":"%b"' % text) for text in (b"a0 a1 a2", b"a0", b"a0 a1")]
            assert -1 < at[0] < at[1]
            assert came.count(b"HTTP/1.1 200") == 3
        await engine.kill()

    run(test())


@pytest.mark.parametrize("framing", [b"content-length: 60\r\n", b"transfer-encoding: chunked\r\n"])
def test_a_body_behind_an_upgrade_is_never_taken_for_a_request(
    tmp_path: Path, framing: bytes
) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            head = POST + b"connection: upgrade\r\nupgrade: h2c\r\n" + framing + b"\r\n"
            smuggled = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            answer = await say(gateway, head, smuggled, every_s=0.1)
            refused(answer, 400, "invalid_http")
            assert answer.count(b"content-length: ") == 1
            alone = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\n"
            assert b" 200 " in (await say(gateway, alone + b"upgrade: h2c\r\n\r\n"))[:20]
        await engine.kill()

    run(test())


def test_a_body_that_nobody_reads_ends_the_connection(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"\r\nconnection: close\r\n" in answer
            writer.close()
        await engine.kill()

    run(test())


def test_who_asks_before_it_sends_is_refused_without_sending(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            head = POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n"
            refused(await say(gateway, head % (1 << 30)), 413, "body_too_large")
            assert (await say(gateway, head % 5)).startswith(b"HTTP/1.1 100 ")
        await engine.kill()

    run(test())


def test_a_pipelining_client_that_reads_nothing_is_given_up(tmp_path: Path) -> None:
    body = b"x" * 8_000_000
    asked = 0

    async def large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    async def test() -> None:
        times = {"stalled_client_s": 0.2}
        async with (
            raw_engine(large) as url,
            running_gateway(tmp_path, {"a": url}, time_outs=times) as gateway,
        ):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            content = json.dumps({"model": MODEL, "prompt": "x"}).encode()
            one = POST + b"content-length: %d\r\n\r\n" % len(content) + content
            writer.write(one * 2)
            await until(lambda: asked == 2, what="the second one is asked")
            await until(lambda: not gateway.gateway._proxy.open, what="it is given up")
            assert gateway.in_flight() == 0
            writer.close()

    run(test())


@pytest.mark.parametrize("behind", [1, 3, 5000])
def test_a_pipelining_client_that_leaves_ends_its_request(tmp_path: Path, behind: int) -> None:
    """Nothing is read of it while its requests wait in line."""

    async def test() -> None:
        engine = await start_engine("a")
        async with running_gateway(tmp_path, {"a": engine.url}) as gateway:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            content = json.dumps({"model": MODEL, "prompt": "wait=30"}).encode()
            one = POST + b"content-length: %d\r\n\r\n" % len(content) + content
            writer.write(one * (1 + behind))
            await until(lambda: engine.engine.begun == 1, what="the first one is asked")
            writer.close()
            await until(lambda: not gateway.gateway._proxy.open, what="it is gone", deadline_s=5)
            assert gateway.in_flight() == 0
            assert engine.engine.begun == 1, "those behind it were asked for all that"
        await engine.kill()

    run(test())
