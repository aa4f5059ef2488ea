"""Judges a request: admitted with a ticket, or refused with the reason and the time to come again.

It does no I/O of its own: quotas are the limiter's, tokens the counter's, and what time it is it is
told. It knows no web framework. One `Admission` serves one event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

from trimtab.engine_bridge.admission import refusal
from trimtab.engine_bridge.admission.asked import Asked, BadBodyError, answers_of
from trimtab.engine_bridge.admission.bill import LEASE_S, WORDS, Bill, make_bill, spent
from trimtab.engine_bridge.admission.bounds import (
    BUDGET,
    BURST,
    OUTPUT,
    PROMPT,
    REQUESTS,
    BoundsBook,
)
from trimtab.engine_bridge.admission.breaker import Breakers
from trimtab.engine_bridge.admission.counting import NoTokenCounter, TokenCounter
from trimtab.engine_bridge.admission.history import History
from trimtab.engine_bridge.admission.lengths import Lengths
from trimtab.engine_bridge.admission.limiter import PLACES, Limiter, Short, Taken
from trimtab.engine_bridge.admission.media import media_cost
from trimtab.engine_bridge.admission.outcome import Outcome, Used
from trimtab.engine_bridge.admission.refusal import Refusal
from trimtab.engine_bridge.admission.settings import AdmissionSettings
from trimtab.engine_bridge.admission.steady_clock import SteadyClock
from trimtab.engine_bridge.admission.ticket import Ticket
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan

__all__ = ["Admission", "EngineLoad", "Load", "Observer", "Outcome", "Refusal", "Ticket"]

_PLACE_WAIT_S: Final = 1.0
"""When to come again for a place: nobody knows when a request ends."""
_FAILED: Final = {Outcome.FINISHED: False, Outcome.FAILED: True, Outcome.TIMED_OUT: True}
"""Outcomes that say something about the tenant's requests, and whether it is that they fail."""
_CODES: Final = {
    REQUESTS: "requests_quota",
    BURST: "requests_quota",
    PROMPT: "prompt_tokens_quota",
    OUTPUT: "output_tokens_quota",
    BUDGET: "budget_spent",
    PLACES: "concurrency",
}
_WORDS: Final = {**WORDS, PLACES: "requests at once"}


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """How full the engines of a model are."""

    queue_length: int
    """Requests that wait, of all tiers."""
    kv_use_fraction: float
    """Part of the KV blocks that running requests hold."""
    age_s: float
    """Time since this was true, seconds."""


Load = Callable[[str], EngineLoad | None]
"""Load of the engines of a model by its name; None where nobody knows."""


class Observer(Protocol):
    """Somebody who counts what was decided, for instance `metrics.AdmissionMetrics`."""

    def decided(self, tier: str, code: str) -> None:
        """A request was refused with this code, or `admitted`."""
        ...

    def ended(self, tier: str, used: Used) -> None:
        """An admitted request ended."""
        ...


class Admission:
    """Quotas, length limits, saturation and the tenants' breakers, in front of any engine.

    A door makes one, calls `admit` for each request, ends each ticket, and calls `renew` every
    `renew_every_s`.
    """

    renew_every_s: Final = LEASE_S / 3

    def __init__(
        self,
        settings: AdmissionSettings,
        plan: Plan,
        *,
        limiter: Limiter,
        monotonic_s: Callable[[], float],
        counter: TokenCounter | None = None,
        load: Load | None = None,
        engine: EngineSpec | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Say what holds.

        Args:
            settings: The admission file.
            plan: Tiers, targets, prices.
            limiter: Where quotas are counted, `redis_ledger.open_limiter` of the settings' storage.
            monotonic_s: A clock, seconds.
            counter: The models' tokenizers; None: lengths are estimated.
            load: How full engines are; None: nobody knows, so none is full.
            engine: Whose step times judge the prefill of long prompts; None: nobody's.
            observer: Who is told of decisions.
        """
        self._limiter = limiter
        self._now_s = SteadyClock(monotonic_s).now_s
        self._load = load
        self._observer = observer
        self._breakers = Breakers()
        self._history = History(plan.prediction.initial_output_tokens)
        self._lengths = Lengths(counter or NoTokenCounter(), self._history)
        # Other processes' tickets lie in the same storage.
        self._name = secrets.token_hex(6)
        self._numbers = count(1)
        self._renewed_s = self._now_s()
        self._open: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._writing: set[asyncio.Task[None]] = set()
        self.reconfigure(settings, plan, engine)

    def reconfigure(
        self, settings: AdmissionSettings, plan: Plan, engine: EngineSpec | None = None
    ) -> None:
        """Take other settings. What was counted stays, so no quota opens; the storage stays too."""
        self._book = BoundsBook(settings, plan, engine)
        self._settings = settings
        low = [name for name, tier in plan.tiers.items() if tier.low]
        saturation = settings.saturation
        self._giving_way = frozenset((saturation and saturation.tiers) or low)

    @property
    def slowed_tenants(self) -> int:
        """Tenants whose breaker is open."""
        return self._breakers.open_count

    @property
    def storage_failures(self) -> int:
        """How often a shared storage has not answered."""
        return self._limiter.failures

    @property
    def open_tickets(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._open)

    async def admit(self, asked: Asked) -> Ticket | Refusal:
        """Judge one request. It never raises, whatever the body holds, and a refusal costs nothing.

        An unknown key is the door's to refuse, with `refusal.unknown_key`.
        """
        judged = await self._judge(asked)
        if self._observer is not None:
            code = judged.code if isinstance(judged, Refusal) else "admitted"
            self._observer.decided(asked.identity.tier, code)
        return judged

    async def renew(self) -> None:
        """Keep the places of the requests that still run."""
        self._renewed_s = self._now_s()
        oldest_s = self._renewed_s - self._settings.longest_request_s
        running = [one.taken for one in self._open if one.started_s > oldest_s]
        await self._limiter.renew([taken for taken in running if taken.places is not None])

    async def close(self) -> None:
        """Wait for what is still being written and close the storage."""
        while self._writing:
            await asyncio.wait(self._writing)
        await self._limiter.close()

    async def _judge(self, asked: Asked) -> Ticket | Refusal:
        settings, who = self._settings, asked.identity
        bounds = self._book.of(who.tenant, who.tier)
        if bounds.limits.suspended:
            return refusal.suspended()
        try:
            answers = answers_of(asked)
        except BadBodyError as error:
            return refusal.bad_value(str(error))
        media = media_cost(asked.body, settings.media)
        bounds = self._book.with_media(bounds, media)
        prompt_tokens = await self._lengths.prompt_tokens(
            asked, bounds, media, template_tokens=settings.template_tokens
        )
        if isinstance(prompt_tokens, Refusal):
            return prompt_tokens
        bill = make_bill(
            asked,
            bounds,
            answers,
            prompt_tokens=prompt_tokens,
            expected_tokens=self._history.output_tokens(who.tenant),
        )
        if isinstance(bill, Refusal):
            return bill
        held_back = await self._hold_back(asked, bill)
        return held_back or await self._take(asked, bill, 0 if media.tokens else asked.body_bytes)

    async def _hold_back(self, asked: Asked, bill: Bill) -> Refusal | None:
        """A refusal of a tenant that is slowed, or of a tier that gives way to a full engine."""
        who = asked.identity
        slow_s = self._slow_s(who.tenant)
        full_s = self._full_s(asked) if who.tier in self._giving_way else 0.0
        if not slow_s and not full_s:
            return None
        quota_s = await self._limiter.wait_s(who.tenant, bill.charges)
        wait_s = max(slow_s, full_s, quota_s)
        return refusal.slowed(wait_s) if slow_s else refusal.saturated(wait_s)

    def _slow_s(self, tenant: str) -> float:
        """How long the tenant's breaker holds its next request back, seconds."""
        settings = self._settings.tenant_breaker
        if settings is None:
            return 0.0
        now_s = self._now_s()
        return max(0.0, self._breakers.of(tenant).free_at_s(now_s, settings) - now_s)

    def _full_s(self, asked: Asked) -> float:
        """When a tier that gives way may come again, seconds; 0 where the engine has room."""
        settings = self._settings.saturation
        load = self._load(asked.model) if settings is not None and self._load is not None else None
        if settings is None or load is None:
            return 0.0
        queue, kv_use = settings.queue_length, settings.kv_use_fraction
        full = load.age_s > settings.stale_after_s
        full |= queue is not None and load.queue_length >= queue
        full |= kv_use is not None and load.kv_use_fraction >= kv_use
        return settings.retry_after_s if full else 0.0

    async def _take(self, asked: Asked, bill: Bill, text_bytes: int) -> Ticket | Refusal:
        who = asked.identity
        name = f"{self._name}-{next(self._numbers)}"
        if self._now_s() - self._renewed_s >= self.renew_every_s:
            # After a standstill the places of who still runs must not be given to others.
            await self.renew()
        taken: Taken | Short = Taken(who.tenant, name, (), (), None, "")
        if bill.charges or bill.places is not None:
            taken = await self._limiter.take(who.tenant, name, bill.charges, bill.places)
        if isinstance(taken, Short):
            at_least_s = _PLACE_WAIT_S if taken.name == PLACES else 0.0
            wait_s = max(at_least_s, taken.wait_s)
            return refusal.over_quota(_CODES[taken.name], _WORDS[taken.name], wait_s)
        slow_s = self._slow_s(who.tenant)
        if slow_s:
            # Another request of the tenant has gone while this one waited for the storage.
            await self._settle_taken(taken, dict.fromkeys(_CODES, 0))
            return refusal.slowed(slow_s)
        breaker = self._settings.tenant_breaker
        if breaker is not None:
            self._breakers.of(who.tenant).enter(name, self._now_s(), breaker)
        ticket = Ticket(
            identity=who,
            bill=bill,
            taken=taken,
            text_bytes=text_bytes,
            started_s=self._now_s(),
            settle=self._settle,
        )
        self._open.add(ticket)
        return ticket

    async def _settle(self, ticket: Ticket, used: Used) -> None:
        tenant, bill = ticket.identity.tenant, ticket.bill
        self._open.discard(ticket)
        breaker = self._settings.tenant_breaker
        if breaker is not None:
            failed = _FAILED.get(used.outcome)
            one = self._breakers.of(tenant)
            one.ended(ticket.taken.ticket, failed, self._now_s(), breaker)
        if used.outcome is Outcome.FINISHED:
            if used.prompt_tokens is not None:
                self._history.learn_prompt(tenant, ticket.text_bytes, used.prompt_tokens)
            if used.output_tokens is not None:
                self._history.learn_output(tenant, used.output_tokens // bill.answers)
        if self._observer is not None:
            self._observer.ended(ticket.identity.tier, used)
        await self._settle_taken(ticket.taken, spent(bill, used))

    async def _settle_taken(self, taken: Taken, used: Mapping[str, int]) -> None:
        if not taken.charges and taken.places is None:
            return
        if self._limiter.is_instant:
            await self._limiter.settle(taken, used)
            return
        # A client that leaves cancels its door, and what was taken must come back all the same.
        writing = asyncio.create_task(self._limiter.settle(taken, used))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        await asyncio.shield(writing)
