"""What a client towards engines costs the gateway: its own beside aiohttp and httpx.

    python benchmarks/gateway_clients.py [--seconds 3] [--json F]

Each client asks the same small engine for whole answers and for streams of 64 tokens, 8 at a time,
in one event loop of this process; the clients take turns, twice. Figures are CPU time of this
process: microseconds a whole answer, and a streamed token. A client that is not installed is null.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from peers.engine import TOKENS
from peers.proxies import body, free_port, head

from trimtab.engine_bridge.gateway.upstream import Client

AT_ONCE = 8
ROUNDS = 2
START_S = 10.0
BODIES = {False: body(stream=False), True: body(stream=True)}
HEADERS = {"content-type": "application/json", "authorization": "Bearer x"}
Ask = Callable[[bool], Awaitable[None]]


@contextlib.asynccontextmanager
async def own(port: int) -> AsyncIterator[Ask]:
    """The gateway's own client."""
    client = Client(f"http://127.0.0.1:{port}", connect_s=5, first_byte_s=60, idle_s=60)

    async def ask(stream: bool) -> None:
        answer = await client.send(head(len(BODIES[stream])), BODIES[stream])
        while await answer.read():
            pass
        answer.close()

    yield ask
    client.close()


@contextlib.asynccontextmanager
async def of_aiohttp(port: int) -> AsyncIterator[Ask]:
    """A session of aiohttp."""
    import aiohttp

    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def ask(stream: bool) -> None:
            async with session.post(url, data=BODIES[stream], headers=HEADERS) as answer:
                async for _ in answer.content.iter_any():
                    pass

        yield ask


@contextlib.asynccontextmanager
async def of_httpx(port: int) -> AsyncIterator[Ask]:
    """A client of httpx."""
    import httpx

    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=60) as client:

        async def ask(stream: bool) -> None:
            asked = client.stream("POST", url, content=BODIES[stream], headers=HEADERS)
            async with asked as answer:
                async for _ in answer.aiter_raw():
                    pass

        yield ask


CLIENTS = {"own": own, "aiohttp": of_aiohttp, "httpx": of_httpx}


async def cpu_us(ask: Ask, *, stream: bool, for_s: float) -> float:
    """CPU time of this process an answer, microseconds."""
    asked, until_s, began_s = 0, time.perf_counter() + for_s, time.process_time()

    async def work() -> None:
        nonlocal asked
        while time.perf_counter() < until_s:
            await ask(stream)
            asked += 1

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return (time.process_time() - began_s) / asked * 1e6


async def measure(port: int, seconds: float) -> dict[str, dict[str, float] | None]:
    """The least of the rounds of every client that is installed."""
    found: dict[str, dict[str, float] | None] = dict.fromkeys(CLIENTS)
    for _ in range(ROUNDS):
        for name, make in CLIENTS.items():
            try:
                async with make(port) as ask:
                    await cpu_us(ask, stream=True, for_s=seconds / 3)
                    whole = await cpu_us(ask, stream=False, for_s=seconds)
                    token = await cpu_us(ask, stream=True, for_s=seconds) / TOKENS
            except ModuleNotFoundError:
                continue
            before = found[name] or {"whole_us": whole, "token_us": token}
            found[name] = {
                "whole_us": min(whole, before["whole_us"]),
                "token_us": min(token, before["token_us"]),
            }
    return found


async def answers(port: int) -> None:
    """Wait until the engine listens."""
    until_s = time.perf_counter() + START_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if time.perf_counter() > until_s:
                raise SystemExit("gateway_clients: the engine did not start") from None
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


async def run(seconds: float) -> dict[str, Any]:
    """Start the engine and measure."""
    port = free_port()
    engine = Path(__file__).parent / "peers" / "engine.py"
    process = subprocess.Popen([sys.executable, str(engine), str(port)])
    try:
        await answers(port)
        return {"schema": 1, "clients": await measure(port, seconds)}
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="each client and kind")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    import uvloop

    report = uvloop.run(run(flags.seconds))
    for name, figures in report["clients"].items():
        if figures is None:
            print(f"{name:8} not installed")
        else:
            print(f"{name:8} {figures['whole_us']:6.0f} us an answer, "
                  f"{figures['token_us']:6.1f} us a streamed token")  # fmt: skip
    if flags.json is not None:
        flags.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
