"""Clients that send a trace to a running server in real time, and the server: shared by benchmarks.

It measures what a client sees, and judges nothing. Prompts are words of the emulated tokenizer that
follow from the trace's prefix ids, so that the server's prefix cache meets the same content.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from trimtab.engine_bridge.trace import NO_SESSION, Trace

START_S, DRAIN_S, STOP_S = 600.0, 300.0, 60.0
WARM_UP: Final = "warm-up"
WARM_UP_TOKENS: Final = (40, 40, 40, 500, 2000, 8000, 16_000, 24_000, 31_000, 500, 8000, 24_000)
SYLLABLES: Final = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")
GIVEN_UP: Final = 503
"""Code of the error of a request that the engine gave up (rule 15)."""


class GivenUpError(Exception):
    """The server has given a request up."""


@dataclass
class Seen:
    """What a client saw of one request, seconds on its own clock."""

    sent_s: float
    first_s: float = float("nan")
    last_s: float = float("nan")
    prompt_tokens: int = 0
    tokens: int = 0
    answer: str = ""
    given_up: bool = False
    """The server refused it, late."""


class Prompts:
    """The words of each row's prompt; every word is one token."""

    def __init__(self, trace: Trace) -> None:
        """Words for this trace."""
        self._trace = trace
        self._blocks: dict[tuple[int, int], list[str]] = {}

    def of(self, row: int, earlier: Sequence[str], shared_tokens: int) -> list[str]:
        """The prompt of a row.

        Args:
            row: Row of the trace.
            earlier: Words of the session so far: the last prompt and its answer.
            shared_tokens: How many of them this prompt repeats.
        """
        trace = self._trace
        start, end = trace.prefix_offsets[row], trace.prefix_offsets[row + 1]
        size = int(trace.prefix_block_tokens[row])
        words = [w for n in trace.prefix_ids[start:end] for w in self._block(int(n), size)]
        count = int(trace.prompt_tokens[row])
        words = words[:count]
        words += draw((1, row), count - len(words))
        shared = min(shared_tokens, len(earlier), count)
        words[:shared] = earlier[:shared]
        return words

    def _block(self, number: int, size: int) -> list[str]:
        if (number, size) not in self._blocks:
            self._blocks[number, size] = draw((0, number), size)
        return self._blocks[number, size]

    def shared_tokens(self, row: int, earlier_row: int) -> int:
        """Tokens at the beginning that two rows have in common by their prefix ids."""
        trace = self._trace
        ids = [
            trace.prefix_ids[trace.prefix_offsets[n] : trace.prefix_offsets[n + 1]]
            for n in (row, earlier_row)
        ]
        length = min(map(len, ids))
        differ = np.flatnonzero(ids[0][:length] != ids[1][:length])
        blocks = int(differ[0]) if len(differ) else length
        return blocks * int(trace.prefix_block_tokens[row])


def draw(key: tuple[int, int], count: int) -> list[str]:
    """Words that follow from a key."""
    pairs = np.random.default_rng(key).integers(0, len(SYLLABLES), (max(count, 0), 2))
    return [SYLLABLES[first] + SYLLABLES[second] for first, second in pairs]


class Clients:
    """Sends a trace to a server in real time."""

    def __init__(self, url: str, model: str, trace: Trace) -> None:
        """Clients for this trace."""
        self._model, self._trace = model, trace
        self._prompts = Prompts(trace)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=DRAIN_S, limits=limits)
        self.seen: dict[int, Seen] = {}
        self.failed: list[str] = []

    async def run(self, begins: Callable[[], None] = lambda: None) -> None:
        """All requests, to their ends.

        Args:
            begins: Called after the warm-up, before the first request.
        """
        async with self._http:
            for number, tokens in enumerate(WARM_UP_TOKENS):
                await self._ask(draw((2, number), tokens), 20, WARM_UP, "T0")
            begins()
            start_s = time.perf_counter()
            await asyncio.gather(*(self._session(rows, start_s) for rows in sessions(self._trace)))

    async def _session(self, rows: list[int], start_s: float) -> None:
        trace, words = self._trace, list[str]()
        await asyncio.sleep(start_s + float(trace.arrival_s[rows[0]]) - time.perf_counter())
        for place, row in enumerate(rows):
            shared = 0
            if place:
                await asyncio.sleep(float(trace.think_s[row]))
                shared = self._prompts.shared_tokens(row, rows[place - 1])
            prompt = self._prompts.of(row, words, shared)
            try:
                seen = await self._ask(
                    prompt,
                    int(trace.output_tokens[row]),
                    trace.tenant_names[trace.tenant[row]],
                    trace.tier_names[trace.tier[row]],
                )
            except GivenUpError:
                self.seen[row], words = Seen(time.perf_counter(), given_up=True), prompt
                continue
            except (httpx.HTTPError, ValueError) as error:
                self.failed.append(f"row {row}: {error!r}")
                return
            if seen.prompt_tokens != len(prompt):
                self.failed.append(f"row {row}: {seen.prompt_tokens} prompt tokens")
            self.seen[row] = seen
            words = prompt + seen.answer.split()

    async def _ask(self, words: list[str], tokens: int, tenant: str, tier: str) -> Seen:
        body = {
            "model": self._model,
            "prompt": "".join(f" {word}" for word in words),
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"X-Trimtab-Tenant": tenant, "X-Trimtab-Tier": tier}
        seen = Seen(time.perf_counter())
        async with self._http.stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(json.loads(line[6:]), seen)
        if seen.tokens != tokens:
            raise ValueError(f"{seen.tokens} tokens of {tokens}")
        return seen


def _take(event: dict[str, Any], seen: Seen) -> None:
    if event.get("error", {}).get("code") == GIVEN_UP:
        raise GivenUpError
    if event.get("choices"):
        seen.last_s = time.perf_counter()
        if np.isnan(seen.first_s):
            seen.first_s = seen.last_s
        seen.answer += event["choices"][0]["text"]
    if event.get("usage"):
        seen.tokens = int(event["usage"]["completion_tokens"])
        seen.prompt_tokens = int(event["usage"]["prompt_tokens"])


@contextmanager
def server(
    folder: Path, engine: str, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The emulated server in real time; gives its address.

    Args:
        folder: For its logs; the traffic log goes to `traffic`.
        engine: Whom to emulate.
        flags: Further flags of `trimtab serve`, and vLLM's.
        env: Additions to its environment.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trimtab.controller.cli.app", "serve", "--emulate", engine]
    command += ["--trust-labels", "--traffic-log", str(folder / "traffic"), "--time-scale", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log", *flags]
    url = f"http://127.0.0.1:{port}"
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env=os.environ | dict(env or {}),
        )
        try:
            _wait(process, url, folder / "server.log")
            yield url
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise SystemExit(f"the server ended:\n{log.read_text(errors='replace')[-3000:]}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise SystemExit(f"the server did not start within {START_S:g} s, see {log}")


def sessions(trace: Trace) -> list[list[int]]:
    """The rows of each session in the order of its turns; a row without one is a session."""
    rows: dict[tuple[str, int], list[int]] = {}
    for row, session in enumerate(trace.session.tolist()):
        key = ("row", row) if session == NO_SESSION else ("session", session)
        rows.setdefault(key, []).append(row)
    return [sorted(found, key=lambda row: trace.turn[row]) for found in rows.values()]
