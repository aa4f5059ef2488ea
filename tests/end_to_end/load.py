"""Clients for the end-to-end tests: many requests at once, and one that sends a socket nonsense."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

from tests.vllm_server import Server

GARBAGE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00\xff" * 200 + b"\n",
    b'{"trimtab": 1, "op": "set", "values": {"weights": {"T0": NaN}}, "holder": "g"}\n',
    b'{"trimtab": 1, "op": "no such"}\n{"trimtab": 99}\n[1, 2]\n{"half": ',
    b"{" * 5000 + b"\n",
)
SHED = -1


class Wish(NamedTuple):
    """One request."""

    tenant: str
    prompt: str
    tokens: int
    leaves_after: int | None = None
    """Events after which its client hangs up; None: it stays."""


async def ask(client: httpx.AsyncClient, server: Server, wish: Wish) -> int | None:
    """Tokens that came, the server says; `SHED` if it was given up, None if its client left."""
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": wish.prompt,
        "max_tokens": wish.tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = server.bearer(wish.tenant)
    came, usage = 0, None
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            came += 1
            if wish.leaves_after is not None and came > wish.leaves_after:
                return None
            event = httpx.Response(200, text=line.removeprefix("data: ")).json()
            if "error" in event:
                assert event["error"]["code"] == 503, event
                return SHED
            usage = event.get("usage") or usage
    assert usage is not None
    return int(usage["completion_tokens"])


async def ask_all(server: Server, wishes: list[Wish], at_once: int) -> list[int | None]:
    """All of them, so many at once; the answers in their order."""
    gate = asyncio.Semaphore(at_once)
    # A kept connection may be closed by the server just when it is used again.
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=0)

    async def one(client: httpx.AsyncClient, wish: Wish) -> int | None:
        async with gate:
            return await ask(client, server, wish)

    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        return await asyncio.gather(*(one(client, wish) for wish in wishes))


class InBackground(threading.Thread):
    """Requests that run while the test does something else."""

    def __init__(self, server: Server, wishes: list[Wish], at_once: int = 64) -> None:
        super().__init__(daemon=True)
        self._server, self._wishes, self._at_once = server, wishes, at_once
        self._answers: list[int | None] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._answers = asyncio.run(ask_all(self._server, self._wishes, self._at_once))
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.join(300)

    def answers(self) -> list[int | None]:
        """Wait for all; what went wrong is raised here."""
        self.join(300)
        if self._error is not None:
            raise self._error
        return self._answers


@contextmanager
def garbage(path: Path, every_s: float = 0.05) -> Iterator[None]:
    """A client of the control socket that never makes sense, at work as long as the block runs."""
    stop = threading.Event()

    def work() -> None:
        turn = 0
        while not stop.wait(every_s):
            turn += 1
            try:
                with socket.socket(socket.AF_UNIX) as link:
                    link.settimeout(1)
                    link.connect(str(path))
                    link.sendall(GARBAGE[turn % len(GARBAGE)])
                    if turn % 2:
                        link.recv(4096)
            except OSError:
                continue

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)
