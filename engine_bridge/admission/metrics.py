"""Admission's decisions as Prometheus metrics. Label sets are closed; no tenant is named.

It needs prometheus_client, which vLLM and the gateway have. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from trimtab.engine_bridge.admission.outcome import Outcome, Used
from trimtab.engine_bridge.admission.refusal import CODES

ADMITTED: Final = "admitted"
_TOKENS: Final = ("prompt", "cached", "output")


class AdmissionMetrics:
    """An `Observer` of admission that counts; every child is made at the start."""

    def __init__(self, tiers: Iterable[str], registry: Any = None) -> None:
        """Register the metrics.

        Args:
            tiers: Names of the plan's tiers.
            registry: A `prometheus_client.CollectorRegistry`; None: the process's own.
        """
        import prometheus_client

        where: Any = registry or prometheus_client.REGISTRY
        names = tuple(tiers)
        decided = prometheus_client.Counter(
            "trimtab_admission_requests",
            "Requests by decision: admitted, or the code of their refusal.",
            ("tier", "code"),
            registry=where,
        )
        ended = prometheus_client.Counter(
            "trimtab_admission_ended",
            "Admitted requests that ended, by outcome.",
            ("tier", "outcome"),
            registry=where,
        )
        tokens = prometheus_client.Counter(
            "trimtab_admission_tokens",
            "Tokens of admitted requests as engines counted them: prompt, its cached part, output.",
            ("tier", "kind"),
            registry=where,
        )
        self._decided = _children(decided, names, (ADMITTED, *CODES))
        self._ended = _children(ended, names, tuple(Outcome))
        self._tokens = _children(tokens, names, _TOKENS)
        # In vLLM several processes may admit; the page shows their sum.
        gauge = {"registry": where, "multiprocess_mode": "livesum"}
        self._slowed = prometheus_client.Gauge(
            "trimtab_admission_slowed_tenants", "Tenants whose breaker is open.", **gauge
        )
        self._open = prometheus_client.Gauge(
            "trimtab_admission_open_requests", "Admitted requests that have not ended.", **gauge
        )
        self._away = prometheus_client.Gauge(
            "trimtab_admission_storage_failures",
            "Times that the shared storage did not answer since the start.",
            **gauge,
        )

    def decided(self, tier: str, code: str) -> None:
        """A request was refused with this code, or admitted."""
        self._decided[tier, code]()

    def ended(self, tier: str, used: Used) -> None:
        """An admitted request ended."""
        self._ended[tier, used.outcome]()
        counts = (used.prompt_tokens, used.cached_tokens, used.output_tokens)
        for kind, count in zip(_TOKENS, counts, strict=True):
            if count:
                self._tokens[tier, kind](count)

    def show(self, *, open_requests: int, slowed_tenants: int, storage_failures: int) -> None:
        """Levels, to be told now and then."""
        self._open.set(open_requests)
        self._slowed.set(slowed_tenants)
        self._away.set(storage_failures)


def _children(
    counter: Any, tiers: tuple[str, ...], kinds: tuple[str, ...]
) -> dict[tuple[str, str], Callable[..., None]]:
    return {(tier, kind): counter.labels(tier, str(kind)).inc for tier in tiers for kind in kinds}
