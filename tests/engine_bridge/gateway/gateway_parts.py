"""A gateway and its engines on real sockets in one event loop, for tests that look inside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import yaml

from tests.engine_bridge.gateway.engine_app import Engine
from trimtab.engine_bridge.gateway.server import Gateway
from trimtab.engine_bridge.gateway.setup import read_files

MODEL = "m"
FAST = {
    "probes": {"every_s": 0.1, "time_out_s": 0.5, "eject_s": 0.2, "fail_after": 2},
    "time_outs": {"connect_s": 0.5, "wait_s": 3.0},
}


def run(test: Coroutine[Any, Any, None], *, deadline_s: float = 60.0) -> None:
    """Run a test's coroutine; one that hangs fails."""

    async def in_time() -> None:
        async with asyncio.timeout(deadline_s):
            await test

    asyncio.run(in_time())


@dataclass
class RunningEngine:
    """An engine that listens."""

    engine: Engine
    server: uvicorn.Server
    task: asyncio.Task[None]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def kill(self) -> None:
        """Close its socket and break all connections, as the end of its process would."""
        for listening in self.server.servers:
            listening.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()
        self.server.should_exit = self.server.force_exit = True
        await self.task


async def start_engine(
    name: str, *, token_s: float = 0.0, port: int = 0, kind: type[Engine] = Engine
) -> RunningEngine:
    engine = kind(name, token_s)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    config = uvicorn.Config(engine.app(), log_level="critical", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve([listening]))
    while not server.started:
        await asyncio.sleep(0.005)
    return RunningEngine(engine, server, task, listening.getsockname()[1])


@dataclass
class RunningGateway:
    """A gateway that serves."""

    gateway: Gateway
    config: Path
    task: asyncio.Task[None]
    client: httpx.AsyncClient
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return self.gateway.port

    def states(self) -> dict[str, str]:
        """State of each engine."""
        engines = self.gateway._setup.fleet.engines
        return {name: engine.health.state.value for name, engine in engines.items()}

    def in_flight(self) -> int:
        return sum(one.in_flight for one in self.gateway._setup.fleet.engines.values())

    async def ask(self, prompt: str | list[int] = "hello", **more: Any) -> httpx.Response:
        """One answer, not streamed."""
        headers = more.pop("headers", {})
        body = {"model": MODEL, "prompt": prompt, **more}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def stream(self, prompt: str = "hello", **more: Any) -> list[dict[str, Any]]:
        """The events of a streamed chat."""
        messages = [{"role": "user", "content": prompt}]
        body = {"model": MODEL, "messages": messages, "stream": True, **more}
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            return events(await answer.aread())

    async def reload(self, **changes: Any) -> None:
        self.settings |= changes
        self.config.write_text(yaml.safe_dump(self.settings))
        await self.gateway.reload()


def events(stream: bytes) -> list[dict[str, Any]]:
    """The JSON events of a stream that ends as it should, or with an error."""
    found = [part.removeprefix(b"data: ") for part in stream.split(b"\n\n") if part]
    return [json.loads(part) for part in found if part != b"[DONE]"]


def texts(found: list[dict[str, Any]]) -> str:
    """What the events of a chat say."""
    return "".join(
        choice["delta"].get("content", "") for one in found for choice in one.get("choices", [])
    )


@contextlib.asynccontextmanager
async def running_gateway(
    folder: Path, engines: dict[str, Any], **settings: Any
) -> AsyncIterator[RunningGateway]:
    """A gateway in front of engines: name to its settings, or to its URL."""
    merged: dict[str, Any] = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
    merged["engines"] = {
        name: {"models": [MODEL], **({"url": one} if isinstance(one, str) else one)}
        for name, one in engines.items()
    }
    for key, values in FAST.items():
        merged[key] = {**values, **settings.pop(key, {})}
    merged |= settings
    config = folder / "gateway.yaml"
    config.write_text(yaml.safe_dump(merged))
    gateway = Gateway(config, read_files(config))
    task = asyncio.create_task(gateway.run())
    while not (gateway.port and gateway.started):
        if task.done():
            await task
        await asyncio.sleep(0.005)
    base = f"http://127.0.0.1:{gateway.port}"
    async with httpx.AsyncClient(base_url=base, timeout=30) as client:
        try:
            yield RunningGateway(gateway, config, task, client, merged)
        finally:
            gateway.stop()
            await client.aclose()
            await asyncio.wait_for(task, 20)


@contextlib.asynccontextmanager
async def raw_engine(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """An engine that is healthy and otherwise does what a test likes with its sockets.

    `answer` is called for each request that is no probe, once its head is read.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                await answer(reader, writer)
                break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def until(found: Callable[[], bool], *, what: str, deadline_s: float = 10.0) -> None:
    """Wait until something is so."""
    try:
        async with asyncio.timeout(deadline_s):
            while not found():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {deadline_s:g} s") from None
