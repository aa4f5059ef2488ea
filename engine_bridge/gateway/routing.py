"""Which engine a request goes to: a pure choice among those that it may use.

First who may serve it at all: model, strict tenants, tier, and reserve. Then who should: prompts of
one tenant with the same beginning keep to one engine (rendezvous hashing, Thaler and Ravishankar,
1998), so that its prefix cache serves them, unless that engine has clearly more to do than the
others (bounded load, after Mirrokni, Thorup and Zadimoghaddam, 2018). It knows no network and no
clock; who can be used at the moment it is told.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

_UNIT: Final = 2.0**-64


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What is known of an engine before it is asked."""

    name: str
    models: frozenset[str]
    tiers: frozenset[str] | None = None
    """Tiers that it serves; None: all."""
    tenants: frozenset[str] | None = None
    """Strict tenants that it serves alone; None: it is shared."""
    draft: str | None = None
    reserve: bool = False
    capacity: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Affinity:
    """How far a request keeps to its engine."""

    most_over_mean: float = 1.25
    slack_requests: int = 8


@dataclass(frozen=True)
class Pool:
    """Engines that may serve a request, in groups.

    A group counts when none of the groups before it has an engine that can be used.
    """

    groups: tuple[tuple[EngineFacts, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All engines, the preferred ones first."""
        return tuple(engine.name for group in self.groups for engine in group)


class Routes:
    """The pools of a fleet."""

    def __init__(
        self,
        engines: Iterable[EngineFacts],
        *,
        drafts: Mapping[str, str],
        reserve_tiers: Collection[str],
    ) -> None:
        """Take the fleet.

        Args:
            engines: All engines.
            drafts: Tier to the label of the draft model that it should have.
            reserve_tiers: Tiers that may use the reserve.
        """
        self._engines = tuple(engines)
        self._drafts, self._reserve_tiers = dict(drafts), frozenset(reserve_tiers)
        self._strict = frozenset(
            tenant for engine in self._engines for tenant in engine.tenants or ()
        )
        self._pools: dict[tuple[str, str, str], Pool] = {}
        self.models: Final = tuple(
            sorted({model for engine in self._engines for model in engine.models})
        )
        """Models that any engine serves."""

    def pool(self, model: str, tenant: str, tier: str) -> Pool:
        """Who may serve such requests; without groups: nobody, and that will not change."""
        key = (model, tenant if tenant in self._strict else "", tier)
        if model not in self.models:
            return Pool(())
        found = self._pools.get(key)
        if found is None:
            found = self._pools[key] = self._make(model, tenant, tier)
        return found

    def models_of(self, tenant: str, tier: str) -> tuple[str, ...]:
        """Models that somebody serves for such requests."""
        return tuple(model for model in self.models if self.pool(model, tenant, tier).groups)

    def _make(self, model: str, tenant: str, tier: str) -> Pool:
        strict = tenant in self._strict
        allowed = [
            engine
            for engine in self._engines
            if model in engine.models
            and (tenant in engine.tenants if engine.tenants is not None else not strict)
            and (engine.tiers is None or tier in engine.tiers)
        ]
        main = [engine for engine in allowed if not engine.reserve]
        draft = self._drafts.get(tier)
        suited = [engine for engine in main if draft is not None and engine.draft == draft]
        others = [engine for engine in main if engine not in suited]
        reserve = [engine for engine in allowed if engine.reserve]
        if tier not in self._reserve_tiers:
            reserve = []
        return Pool(tuple(tuple(group) for group in (suited, others, reserve) if group))


def choose(
    pool: Pool,
    key: bytes,
    *,
    usable: Callable[[str], bool],
    in_flight: Callable[[str], int],
    affinity: Affinity,
    tried: Collection[str] = (),
) -> str | None:
    """The engine for a request.

    Args:
        pool: Who may serve it.
        key: What it has in common with requests that should go to the same engine.
        usable: Whether an engine, by name, can be used now.
        in_flight: Requests that an engine, by name, has at the moment.
        affinity: How far the request keeps to its engine.
        tried: Engines, by name, that this request has failed on.

    Returns:
        Its name; None if there is none to be used now.
    """
    for group in pool.groups:
        candidates = [one for one in group if one.name not in tried and usable(one.name)]
        if len(candidates) > 1:
            return _lightest_of_order(candidates, key, in_flight, affinity)
        if candidates:
            return candidates[0].name
    return None


def _lightest_of_order(
    candidates: list[EngineFacts],
    key: bytes,
    in_flight: Callable[[str], int],
    affinity: Affinity,
) -> str:
    """The first by rendezvous order whose load is in bounds."""
    loads = {one.name: in_flight(one.name) for one in candidates}
    mean = sum(loads.values()) / sum(one.capacity for one in candidates)
    ordered = sorted(candidates, key=lambda one: (_distance(key, one), one.name))
    for one in ordered:
        most = affinity.most_over_mean * mean * one.capacity + affinity.slack_requests
        if loads[one.name] <= most:
            return one.name
    raise AssertionError("no engine is at or below the mean")  # pragma: no cover


def _distance(key: bytes, engine: EngineFacts) -> float:
    """How far an engine is from a key, by hash: exponential with the engine's capacity as rate.

    So the nearest of several is each one's in proportion to its capacity, and nobody's coming and
    going changes another one's distance.
    """
    digest = hashlib.blake2b(engine.name.encode(), key=key, digest_size=8).digest()
    unit = (int.from_bytes(digest, "big") + 0.5) * _UNIT
    return -math.log(unit) / engine.capacity
