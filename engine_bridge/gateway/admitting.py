"""Admission as the gateway has it: the same quotas over all reloads, tokens counted by engines.

What is admitted is decided by `trimtab.engine_bridge.admission`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from trimtab.engine_bridge.admission.asked import Asked
from trimtab.engine_bridge.admission.core import Admission, Observer
from trimtab.engine_bridge.admission.counting import EngineTokenCounter, Post
from trimtab.engine_bridge.admission.redis_ledger import open_limiter
from trimtab.engine_bridge.admission.settings import AdmissionSettings
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.gateway.fleet import Fleet
from trimtab.engine_bridge.gateway.settings import GatewaySettings
from trimtab.engine_bridge.gateway.upstream import Client
from trimtab.engine_bridge.gateway.wire import request_head
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.vllm.identity import Identity

_COUNT_S: Final = 10.0
_MOST_ANSWER_BYTES: Final = 64 << 20


class FleetTokenCounter:
    """Has a prompt counted by an engine that would serve it, at its `/tokenize`."""

    def __init__(self, fleet: Callable[[], Fleet], *, engine_key: str | None) -> None:
        """Say where the engines are, and with which key they are asked."""
        self._fleet, self._key = fleet, engine_key

    async def count(self, asked: Asked) -> int | None:
        """Tokens of the prompt; None if no engine says in time."""
        fleet, who = self._fleet(), asked.identity
        pool = fleet.routes.pool(asked.model, who.tenant, who.tier)
        engine = fleet.pick(pool, b"")
        if engine is None:
            return None
        counter = EngineTokenCounter(self._post(engine.client, who), engine.tokenizing)
        async with asyncio.timeout(_COUNT_S):
            return await counter.count(asked)

    def _post(self, client: Client, who: Identity) -> Post:
        """Asks in the tenant's name: an engine with admission of its own counts it as theirs."""
        key = self._key

        async def post(path: str, body: bytes) -> tuple[int, bytes]:
            head = request_head(
                client, b"POST", path.encode(), (),
                key=key, tenant=who.tenant, tier=who.tier, length=len(body),
            )  # fmt: skip
            answer = await client.send(head, body)
            try:
                return answer.status, await answer.read_all(_MOST_ANSWER_BYTES)
            finally:
                answer.close()

        return post


def open_admission(
    settings: AdmissionSettings,
    plan: Plan,
    spec: EngineSpec | None,
    *,
    fleet: Callable[[], Fleet],
    engine_key: str | None,
    monotonic_s: Callable[[], float],
    observer: Observer | None,
) -> Admission:
    """Admission with its storage opened.

    Args:
        settings: The admission file.
        plan: The plan.
        spec: Whose step times judge long prompts; None: nobody's.
        fleet: The engines as they are now.
        engine_key: API key that they ask for.
        monotonic_s: A clock, seconds.
        observer: Who is told of decisions.

    Raises:
        AdmissionSettingsError: the storage cannot be opened.
    """
    limiter = open_limiter(
        settings.storage_url, time_out_s=settings.storage_time_out_s, monotonic_s=monotonic_s
    )
    return Admission(
        settings,
        plan,
        limiter=limiter,
        monotonic_s=monotonic_s,
        counter=FleetTokenCounter(fleet, engine_key=engine_key),
        load=lambda model: fleet().load(model),
        engine=spec,
        observer=observer,
    )


def judging_spec(settings: GatewaySettings, specs: Mapping[str, EngineSpec]) -> EngineSpec | None:
    """Whose step times judge long prompts: the first engine's that has some and is no reserve."""
    for name, engine in settings.engines.items():
        if name in specs and not engine.reserve:
            return specs[name]
    return None
