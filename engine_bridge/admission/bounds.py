"""A tenant's limits made ready for use: quotas, budget in tokens, longest prompt.

Made once for a tenant, not for each request. It counts nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from trimtab.engine_bridge.admission.limiter import Quota
from trimtab.engine_bridge.admission.media import MediaCost
from trimtab.engine_bridge.admission.prefill import tokens_within
from trimtab.engine_bridge.admission.settings import AdmissionSettings, Limits
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.pricing import OUTPUT_PRICE, REPEATED_PROMPT_PRICE

REQUESTS: Final = "requests"
BURST: Final = "requests_burst"
PROMPT: Final = "prompt_tokens"
OUTPUT: Final = "output_tokens"
BUDGET: Final = "budget"

FRESH_PRICE: Final = round(1 / REPEATED_PROMPT_PRICE)
"""Price of a fresh prompt token in tenths of a priced token, so that every price is whole."""
CACHED_PRICE: Final = 1
"""Price of a cached prompt token, likewise."""
TOKEN_PRICE: Final = round(OUTPUT_PRICE / REPEATED_PROMPT_PRICE)
"""Price of an output token, likewise."""
_SECOND_S: Final = 1
_MINUTE_S: Final = 60
_DAY_S: Final = 86_400
_ENCODE_STEPS: Final = 256
"""Encode times are rounded up to this part of the limit, so that few lengths are worked out."""
_LARGEST: Final = 2.0**52
"""Whole numbers up to here are exact in every ledger."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a tenant may ask for, in the ledgers' terms."""

    limits: Limits
    requests: Quota | None
    burst: Quota | None
    """Requests in a second."""
    prompt: Quota | None
    output: Quota | None
    budget: Quota | None
    """In tenths of priced tokens."""
    longest_prompt: int | None
    """Tokens; the lower one of the tier's two limits."""
    by_prefill: bool
    """Whether that is the limit of the prefill's time."""
    prefill_ms: float | None
    """That limit, milliseconds; None: it has none, or no engine to judge it by."""
    budget_text: str
    """The budget for people."""


class BoundsBook:
    """The bounds of every tenant, made when they are first asked for."""

    def __init__(self, settings: AdmissionSettings, plan: Plan, engine: EngineSpec | None) -> None:
        """Say what holds.

        Args:
            settings: The admission file.
            plan: For targets and prices.
            engine: For the time of a prefill; None: prefills are not judged.
        """
        self._settings = settings
        self._plan = plan
        self._engine = engine
        self._ready: dict[tuple[str, str], Bounds] = {}
        self._within: dict[float, int | None] = {}
        for tier in plan.tiers:
            self.of("", tier)

    def of(self, tenant: str, tier: str) -> Bounds:
        """The bounds of a tenant in a tier; tenants without limits of their own share one."""
        key = (tenant if tenant in self._settings.tenants else "", tier)
        found = self._ready.get(key)
        if found is None:
            found = self._ready[key] = self._bounds(key[0], tier)
        return found

    def with_media(self, bounds: Bounds, media: MediaCost) -> Bounds:
        """The bounds of a request with media: encoding them takes from the time of its prefill."""
        limit_ms, engine = bounds.prefill_ms, self._engine
        if limit_ms is None or engine is None or engine.encoder is None or not media.encoded:
            return bounds
        step_ms = limit_ms / _ENCODE_STEPS
        steps = math.ceil(media.encode_ms(engine.encoder) / step_ms)
        left_ms = max(0, _ENCODE_STEPS - steps) * step_ms
        longest, by_prefill = _longest(bounds.limits, self._tokens_within(left_ms))
        return replace(bounds, longest_prompt=longest, by_prefill=by_prefill)

    def _bounds(self, tenant: str, tier: str) -> Bounds:
        limits = self._settings.limits_of(tenant, tier)
        prefill_ms = self._prefill_ms(limits, tier)
        within = None if prefill_ms is None else self._tokens_within(prefill_ms)
        longest, by_prefill = _longest(limits, within)
        budget, text = self._budget(limits, tier)
        return Bounds(
            limits=limits,
            requests=_quota(REQUESTS, limits.requests_per_minute),
            burst=_quota(BURST, limits.requests_per_second, _SECOND_S),
            prompt=_quota(PROMPT, limits.prompt_tokens_per_minute),
            output=_quota(OUTPUT, limits.output_tokens_per_minute),
            budget=budget,
            longest_prompt=longest,
            by_prefill=by_prefill,
            prefill_ms=prefill_ms,
            budget_text=text,
        )

    def _prefill_ms(self, limits: Limits, tier: str) -> float | None:
        targets = self._plan.tiers[tier].targets
        limit_ms = limits.max_prefill_ms
        if "max_prefill_ms" not in limits.model_fields_set and targets.ttft_ms is None:
            # A prompt that takes this long to read alone cannot be answered in time.
            limit_ms = targets.e2e_ms
        return None if self._engine is None else limit_ms

    def _tokens_within(self, limit_ms: float) -> int | None:
        if limit_ms not in self._within and self._engine is not None:
            self._within[limit_ms] = tokens_within(self._engine, limit_ms)
        return self._within[limit_ms]

    def _budget(self, limits: Limits, tier: str) -> tuple[Quota | None, str]:
        given = limits.budget_per_day
        price = self._plan.tiers[tier].price_per_1m_tokens
        if given is None or price == 0:
            return None, ""
        if price is None:
            tenths, text = given * FRESH_PRICE, f"{given:g} priced tokens"
        else:
            tenths, text = given * 1e6 / price * TOKEN_PRICE, f"{given:g} USD"
        return Quota(BUDGET, max(1, int(min(tenths, _LARGEST))), _DAY_S), text


def _longest(limits: Limits, within: int | None) -> tuple[int | None, bool]:
    """The longest prompt by both limits, and whether the prefill's time is the one that tells."""
    both = [one for one in (limits.max_prompt_tokens, within) if one is not None]
    longest = min(both, default=None)
    return longest, longest is not None and longest != limits.max_prompt_tokens


def _quota(name: str, limit: int | None, window_s: int = _MINUTE_S) -> Quota | None:
    return None if limit is None else Quota(name, limit, window_s)
