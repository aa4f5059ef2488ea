"""Clients that go on asking while something else fails: every request must end whole."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Final

import httpx

from tests.end_to_end.load import Wish, ask
from tests.vllm_server import Server

TENANTS: Final = ("acme", "crowd", "bolt", "crowd")
END_S: Final = 60.0


class SteadyLoad(threading.Thread):
    """One request after the other at equal distances, whatever becomes of those before."""

    def __init__(self, server: Server, *, every_s: float = 0.25) -> None:
        """Prepare; `start` begins."""
        super().__init__(daemon=True)
        self._server, self._every_s = server, every_s
        self._ended = threading.Event()
        self.sent = 0
        self.wrong: list[str] = []
        """What did not end with all its tokens."""
        self._open: set[int] = set()

    def run(self) -> None:
        """Send until `close`."""
        asyncio.run(self._send())

    def close(self) -> None:
        """Send no more, and wait for what is under way."""
        self._ended.set()
        self.join(END_S)
        assert not self.is_alive(), f"{len(self._open)} requests did not end"

    def check(self) -> int:
        """All that was sent until now has ended, whole; the number of it."""
        sent, end_s = self.sent, time.monotonic() + END_S
        while any(number < sent for number in list(self._open)):
            assert time.monotonic() < end_s, f"requests that do not end: {sorted(self._open)[:5]}"
            time.sleep(0.02)
        assert not self.wrong, self.wrong[:5]
        return sent

    async def _send(self) -> None:
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self._server.url, timeout=END_S, limits=limits
        ) as client:
            tasks: set[asyncio.Task[None]] = set()
            while not self._ended.is_set():
                self._open.add(self.sent)
                task = asyncio.create_task(self._one(client, self.sent))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                self.sent += 1
                await asyncio.sleep(self._every_s)
            await asyncio.gather(*tasks)

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        wish = Wish(TENANTS[number % len(TENANTS)], f"bako {number} " * 30, 40 + number % 60)
        try:
            came = await ask(client, self._server, wish)
            if came != wish.tokens:
                self.wrong.append(f"request {number}: {came} of {wish.tokens} tokens")
        except (httpx.HTTPError, AssertionError) as error:
            self.wrong.append(f"request {number}: {error!r}")
        self._open.discard(number)
