"""The tenants with the most service, by name: the only metric that knows tenants.

How many names it may ever use is bounded, because a metric's label values are for ever in vLLM's
/metrics: prometheus_client cannot remove a child that several processes' files hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.vllm.metric_families import Families

NAMES_A_PLACE: Final = 10
"""So many names may come and go for each place at the top, until the engine starts again."""
UNNAMED: Final = ""
"""Label of all the others together."""

Key = tuple[int, str]


class TopTenants:
    """Each tier's and tenant's share of the last interval's service, for the heaviest few."""

    def __init__(self, families: Families, plan: Plan, engine: str, most: int) -> None:
        """Register the metric.

        Args:
            families: Where.
            plan: Names of the tiers.
            engine: Label of the engine.
            most: Tenants shown at once, at least 1.
        """
        self._family = families.gauge(
            "top_tenant_service_ratio",
            'Share of the last interval\'s engine time of the heaviest tenants; "": of the rest.',
            ("tier", "tenant"),
        )
        self._tiers, self._engine, self._most = plan.tier_names, engine, most
        self._puts: dict[Key, Callable[[float], None]] = {}
        self._shown: set[Key] = set()

    def observe(self, service_ms: Mapping[Key, float]) -> None:
        """Show the heaviest of an interval; who is not among them any more shows as 0."""
        total = sum(service_ms.values()) or 1.0
        heaviest = sorted(service_ms, key=lambda key: (-service_ms[key], key))[: self._most]
        named = [key for key in heaviest if service_ms[key] > 0 and self._has_name(key)]
        for key in self._shown.difference(named):
            self._puts[key](0.0)
        for key in named:
            self._puts[key](service_ms[key] / total)
        self._shown = set(named)
        for number in range(len(self._tiers)):
            rest = sum(
                ms for key, ms in service_ms.items() if key[0] == number and key not in self._shown
            )
            self._child((number, UNNAMED))(rest / total)

    def _has_name(self, key: Key) -> bool:
        names = sum(1 for _, tenant in self._puts if tenant != UNNAMED)
        if key not in self._puts and names >= NAMES_A_PLACE * self._most:
            return False
        self._child(key)
        return key[1] != UNNAMED

    def _child(self, key: Key) -> Callable[[float], None]:
        if key not in self._puts:
            tier, tenant = key
            child = self._family.labels(self._engine, self._tiers[tier], tenant)
            self._puts[key] = child.set
        return self._puts[key]
