"""The engines as the gateway has them now: facts, health, load, connections; who goes where.

It sends nothing. A new fleet takes over the engines of the one before that are still the same, so
that a reload forgets neither their state nor their connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from trimtab.engine_bridge.admission.core import EngineLoad
from trimtab.engine_bridge.admission.counting import AT_ONCE
from trimtab.engine_bridge.gateway.health import Health, HealthRules
from trimtab.engine_bridge.gateway.prompt_tokens import ReadPrefixes
from trimtab.engine_bridge.gateway.routing import Affinity, EngineFacts, Pool, Routes, choose
from trimtab.engine_bridge.gateway.settings import EngineSettings, GatewaySettings
from trimtab.engine_bridge.gateway.upstream import Client
from trimtab.engine_bridge.plan import Plan

_STALE_LOOKS = 5


class Engine:
    """One engine in use."""

    def __init__(
        self, name: str, settings: EngineSettings, health: HealthRules, client: Client
    ) -> None:
        """Begin with an engine that nobody has looked at."""
        self.name = name
        self.settings = settings
        self.health = Health(health)
        self.client = client
        self.tokenizing = asyncio.Semaphore(AT_ONCE)
        """Bounds the prompts that its tokenizer is asked for at once."""
        self.prefixes = ReadPrefixes()
        """Of long prompts, what it has read in slices."""
        self.in_flight = 0
        """Requests on it now."""
        self.waiting = 0
        """Length of its own queue, by its metrics."""
        self.kv_use_fraction = 0.0
        """By its metrics."""
        self.figures_at_s: float | None = None
        """When its metrics were read; None: never."""


class Fleet:
    """All engines of one version of the settings."""

    def __init__(
        self,
        settings: GatewaySettings,
        plan: Plan,
        *,
        before: Fleet | None = None,
        monotonic_s: Callable[[], float],
    ) -> None:
        """Make the engines; call it inside the event loop.

        Args:
            settings: The settings.
            plan: The plan, for its tier of the highest weight.
            before: The fleet that this one replaces.
            monotonic_s: Seconds that only grow.
        """
        self._monotonic_s = monotonic_s
        self._probes = settings.probes
        self._affinity = Affinity(
            most_over_mean=settings.affinity.most_over_mean,
            slack_requests=settings.affinity.slack_requests,
        )
        rules = HealthRules(
            fail_after=settings.probes.fail_after,
            eject_after=settings.probes.eject_after,
            eject_s=settings.probes.eject_s,
            longest_eject_s=settings.probes.longest_eject_s,
            back_after=settings.probes.back_after,
        )
        times = settings.time_outs
        known = {} if before is None else {one.settings.url: one for one in before.engines.values()}
        self.engines: dict[str, Engine] = {}
        for name, own in settings.engines.items():
            engine = known.get(own.url)
            if engine is None:
                client = Client(
                    own.url,
                    connect_s=times.connect_s,
                    first_byte_s=times.first_byte_s,
                    idle_s=times.idle_s,
                )
                engine = Engine(name, own, rules, client)
            self.engines[name] = engine
        self._settings, self._rules = settings, rules
        self.routes = Routes(
            (_facts(name, own) for name, own in settings.engines.items()),
            drafts=settings.drafts,
            reserve_tiers=settings.reserve_tiers or (_top(plan),),
        )

    def take_over(self) -> None:
        """Tell the engines that the fleet before had, too, what holds from now on.

        Until then a fleet that is not used after all has changed nothing.
        """
        times = self._settings.time_outs
        for name, engine in self.engines.items():
            engine.name, engine.settings = name, self._settings.engines[name]
            engine.health.rules = self._rules
            engine.client.connect_s = times.connect_s
            engine.client.first_byte_s, engine.client.idle_s = times.first_byte_s, times.idle_s

    @property
    def ready(self) -> bool:
        """Whether any engine can be used."""
        return any(self._usable(name) for name in self.engines)

    def pick(self, pool: Pool, key: bytes, tried: Collection[str] = ()) -> Engine | None:
        """The engine for a request; None: there is none to be used now."""
        name = choose(
            pool,
            key,
            usable=self._usable,
            in_flight=self._in_flight,
            affinity=self._affinity,
            tried=tried,
        )
        return None if name is None else self.engines[name]

    def load(self, model: str) -> EngineLoad | None:
        """How full the engines of a model are: the least full one's figures count."""
        now_s = self._monotonic_s()
        found = [
            EngineLoad(
                queue_length=engine.waiting,
                kv_use_fraction=engine.kv_use_fraction,
                age_s=now_s - engine.figures_at_s,
            )
            for engine in self.engines.values()
            if model in engine.settings.models
            and not engine.settings.reserve
            and engine.figures_at_s is not None
            and engine.health.usable
            and now_s - engine.figures_at_s < _STALE_LOOKS * self._probes.every_s
        ]
        return min(found, key=lambda one: (one.queue_length, one.kv_use_fraction), default=None)

    def close_but(self, after: Fleet | None) -> None:
        """End idle connections of engines that the fleet after this one does not have."""
        kept = set() if after is None else {id(one) for one in after.engines.values()}
        for engine in self.engines.values():
            if id(engine) not in kept:
                engine.client.close()

    def _usable(self, name: str) -> bool:
        return self.engines[name].health.usable

    def _in_flight(self, name: str) -> int:
        return self.engines[name].in_flight


def _facts(name: str, own: EngineSettings) -> EngineFacts:
    return EngineFacts(
        name=name,
        models=frozenset(own.models),
        tiers=None if own.tiers is None else frozenset(own.tiers),
        tenants=None if own.tenants is None else frozenset(own.tenants),
        draft=own.draft,
        reserve=own.reserve,
        capacity=own.capacity,
    )


def _top(plan: Plan) -> str:
    return max(plan.tiers, key=lambda name: plan.tiers[name].weight)
