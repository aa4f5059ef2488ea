"""Looks at the engines now and then: whether they are there, and how full they are.

What a look means is `health`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from typing import Final

from trimtab.engine_bridge.gateway.fleet import Engine
from trimtab.engine_bridge.gateway.health import HealthState
from trimtab.engine_bridge.gateway.upstream import Client, UpstreamError
from trimtab.engine_bridge.gateway.wire import request_head

_LOG: Final = logging.getLogger("trimtab.gateway")
_MOST_PAGE_BYTES: Final = 16 << 20
_FIGURE: Final = re.compile(
    rb"^(trimtab_queue_length|trimtab_kv_use_ratio)\{[^}\n]*\} +([^ \n]+)", re.MULTILINE
)


class Prober:
    """Looks at one engine after the other's turn, each in a task of its own."""

    def __init__(
        self,
        *,
        monotonic_s: Callable[[], float],
        on_good_look: Callable[[], None],
        engine_key: str | None = None,
    ) -> None:
        """Prepare.

        Args:
            monotonic_s: Seconds that only grow.
            on_good_look: Called when an engine was looked at and can be used.
            engine_key: API key that the engines ask for.
        """
        self._monotonic_s, self._on_good_look = monotonic_s, on_good_look
        self._key = engine_key

    async def watch(self, engine: Engine, every_s: float, time_out_s: float) -> None:
        """Look at an engine for ever."""
        while True:
            await self.look(engine, time_out_s)
            await asyncio.sleep(every_s)

    async def look(self, engine: Engine, time_out_s: float) -> None:
        """Look once: health, then figures."""
        health = engine.health
        before = health.state
        try:
            async with asyncio.timeout(time_out_s):
                good = await self._is_healthy(engine)
        except (TimeoutError, UpstreamError):
            good = False
        health.looked(good, self._monotonic_s())
        if health.state is not before:
            level = logging.WARNING if health.state is HealthState.OUT else logging.INFO
            _LOG.log(level, "engine %s is %s, was %s", engine.name, health.state, before)
        if health.usable:
            self._on_good_look()
        if good:
            # A slow page says nothing about the engine's health.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(time_out_s):
                    await self._read_figures(engine)

    async def _is_healthy(self, engine: Engine) -> bool:
        client = engine.client
        answer = await client.send(request_head(client, b"GET", b"/health", [], key=self._key))
        try:
            await answer.read_all(_MOST_PAGE_BYTES)
            return 200 <= answer.status < 300
        finally:
            answer.close()

    async def _read_figures(self, engine: Engine) -> None:
        """Queue and KV use; an engine without such figures has none, and is no worse for it."""
        url = engine.settings.metrics
        if url is None:
            client, path, own = engine.client, b"/metrics", None
        else:
            own = Client(url, connect_s=1.0, first_byte_s=1.0, idle_s=1.0)
            client, path = own, b""
        try:
            answer = await client.send(request_head(client, b"GET", path, [], key=self._key))
            try:
                page = await answer.read_all(_MOST_PAGE_BYTES)
                page = page if answer.status == 200 else b""
            finally:
                answer.close()
        except UpstreamError:
            return
        finally:
            if own is not None:
                own.close()
        waiting, kv_use = figures(page)
        if waiting is not None:
            engine.waiting, engine.kv_use_fraction = waiting, kv_use
            engine.figures_at_s = self._monotonic_s()


def figures(page: bytes) -> tuple[int | None, float]:
    """Waiting requests of all tiers and ranks (None: not said), and the fullest rank's KV use."""
    waiting: float | None = None
    kv_use = 0.0
    for name, text in _FIGURE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if not 0 <= value < 1e9:  # NaN: no data
            continue
        if name == b"trimtab_queue_length":
            waiting = (waiting or 0.0) + value
        else:
            kv_use = max(kv_use, value)
    return None if waiting is None else int(waiting), kv_use
