"""What admission promises, under any interleaving of requests, ends, leaks and clock jumps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.engine_bridge.admission.rig import CHAT, Clock, Rig, now, settings
from trimtab.engine_bridge.admission.outcome import Outcome
from trimtab.engine_bridge.admission.refusal import Refusal
from trimtab.engine_bridge.admission.ticket import Ticket

LIMITS = {
    "requests_per_minute": 12,
    "prompt_tokens_per_minute": 2000,
    "output_tokens_per_minute": 3000,
    "concurrent_requests": 5,
    "budget_per_day": 60_000,
}
BREAKER = {"of_last": 4, "failure_fraction": 0.5, "slow_to_per_minute": 12, "probe_after_s": 20}
RULES = settings(T0=LIMITS, tenant_breaker=BREAKER)
LONGEST_S = RULES.longest_request_s
MOMENT_S = 0.001
MANY = hypothesis_settings(max_examples=300)

ask = st.tuples(
    st.just("ask"),
    st.sampled_from(["acme", "bolt"]),
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(0, 1500),
            "n": st.integers(1, 3),
            "prompt": st.integers(0, 900).map("x".__mul__),
        }
    ),
)
end = st.tuples(
    st.just("end"),
    st.integers(0, 5),
    st.fixed_dictionaries(
        {
            "outcome": st.sampled_from(list(Outcome)),
            "part": st.floats(0, 1),
            "cached": st.floats(0, 1),
            "known": st.booleans(),
        }
    ),
)
lose = st.tuples(st.just("lose"), st.integers(0, 5), st.none())
wait = st.tuples(st.just("wait"), st.floats(0, 90), st.none())
jump_on = st.tuples(st.just("wait"), st.floats(0, 1e7), st.none())
jump_back = st.tuples(st.just("back"), st.floats(0, 10_000), st.none())
renew = st.tuples(st.just("renew"), st.none(), st.none())
some_acts = st.one_of(ask, ask, ask, end, end, lose, wait, wait, jump_on, jump_back, renew)
acts = st.lists(some_acts, min_size=40, max_size=60)


@dataclass
class Jumpy(Clock):
    """A clock that can be set back; `true_s` is the time that has really passed."""

    true_s: float = 0.0

    def wait(self, seconds: float) -> None:
        self.s += seconds
        self.true_s += seconds


@dataclass
class Booked:
    """One admitted request as an onlooker keeps book of it."""

    ticket: Ticket | None
    at_s: float
    amounts: dict[str, int]
    places: int


@dataclass
class World:
    """An admission beside an onlooker's own book of what was let through."""

    rules: Any = RULES
    clock: Jumpy = field(default_factory=Jumpy)
    booked: dict[str, list[Booked]] = field(default_factory=dict)
    answers: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rig = Rig(self.rules, self.clock)

    def act(self, kind: str, what: Any, how: Any) -> Ticket | Refusal | None:
        if kind == "ask":
            return self.ask(what, how)
        if kind == "wait":
            self.clock.wait(what)
        elif kind == "back":
            # It can only be noticed by who looks before and after.
            now(self.rig.admission.renew())
            self.clock.s -= what
            now(self.rig.admission.renew())
        elif kind == "renew":
            now(self.rig.admission.renew())
        elif kind == "lose" and what < len(self.running()):
            self.running()[what].ticket = None
        elif kind == "end" and what < len(self.running()):
            self.finish(self.running()[what], **how)
        return None

    def running(self) -> list[Booked]:
        return [b for one in self.booked.values() for b in one if b.ticket is not None]

    def ask(self, tenant: str, how: dict[str, Any]) -> Ticket | Refusal:
        judged = self.rig.admit(tenant, **how)
        self.answers.append((tenant, judged.code if isinstance(judged, Refusal) else "yes"))
        if isinstance(judged, Ticket):
            amounts = {charge.quota.name: charge.amount for charge in judged.taken.charges}
            entry = Booked(judged, self.clock.true_s, amounts, how["n"])
            self.booked.setdefault(tenant, []).append(entry)
        return judged

    def finish(
        self, entry: Booked, *, outcome: Outcome, part: float, cached: float, known: bool
    ) -> None:
        ticket = entry.ticket
        assert ticket is not None
        prompt, output = ticket.prompt_tokens, round(part * ticket.output_tokens)
        used = {}
        if known:
            hits = round(cached * prompt)
            used = {"prompt_tokens": prompt, "cached_tokens": hits, "output_tokens": output}
            entry.amounts["output_tokens"] = output
            entry.amounts["budget"] = 10 * (prompt - hits) + hits + 30 * output
        elif outcome in (Outcome.INVALID, Outcome.REFUSED, Outcome.UNREACHABLE):
            entry.amounts |= {"prompt_tokens": 0, "output_tokens": 0, "budget": 0}
        if outcome is Outcome.UNREACHABLE:
            entry.amounts["requests"] = 0
        now(ticket.finished(outcome=outcome, **used))
        now(ticket.finished(outcome=Outcome.UNREACHABLE))
        entry.ticket, entry.places = None, 0

    def check(self) -> None:
        """No window that ends now holds more than its quota, no more requests run than may."""
        now_s = self.clock.true_s
        for booked in self.booked.values():
            for name, window_s, limit in (
                ("requests", 60, 12),
                ("prompt_tokens", 60, 2000),
                ("output_tokens", 60, 3000),
                ("budget", 86_400, 600_000),
            ):
                within = [b.amounts[name] for b in booked if b.at_s > now_s - window_s]
                assert sum(within) <= limit, name
            alive = [b.places for b in booked if b.ticket and b.at_s > now_s - LONGEST_S]
            assert sum(alive) <= 5


@given(acts)
@MANY
def test_no_quota_is_ever_exceeded(acts: list[tuple[str, Any, Any]]) -> None:
    world = World()
    for act in acts:
        world.act(*act)
        world.check()


@given(acts, ask)
@MANY
def test_the_time_to_come_again_is_true(
    acts: list[tuple[str, Any, Any]], last: tuple[str, str, dict[str, Any]]
) -> None:
    world = World()
    for act in acts:
        world.act(*act)
    # Places come back when requests end, which nobody knows.
    for one in world.running():
        world.finish(one, outcome=Outcome.CANCELLED, part=1, cached=0, known=False)
    for _ in range(30):
        refused = world.act(*last)
        if isinstance(refused, Refusal):
            break
        assert refused is not None
        now(refused.finished(outcome=Outcome.CANCELLED))
    if not isinstance(refused, Refusal) or refused.code == "concurrency":
        return
    if refused.retry_after_s is None:
        assert refused.code == "over_quota_for_good"
        return
    world.clock.wait(max(0.0, refused.retry_after_s - MOMENT_S))
    early = world.act(*last)
    assert isinstance(early, Refusal)
    # Two waits in floats may fall a microsecond, the ledger's unit, short of their sum.
    world.clock.wait(MOMENT_S + 2e-6)
    assert isinstance(world.act(*last), Ticket), (refused, early)


@given(acts)
@MANY
def test_refusals_cost_nothing(acts: list[tuple[str, Any, Any]]) -> None:
    """Without the requests that were refused all others are answered the same."""
    world, twin = World(), World()
    for act in acts:
        answer = world.act(*act)
        if not isinstance(answer, Refusal):
            twin.act(*act)
    assert [a for a in world.answers if a[1] == "yes"] == twin.answers


@given(acts)
@MANY
def test_what_one_tenant_does_changes_nothing_for_another(
    acts: list[tuple[str, Any, Any]],
) -> None:
    """Whatever acme asks for, how often it fails, and how slow it is: bolt gets the same."""
    touchy = settings(T0=LIMITS, tenant_breaker={**BREAKER, "of_last": 1})
    both, alone = World(touchy), World(touchy)
    for kind, what, how in acts:
        if kind == "end":
            mine = [b for b in both.running() if b in both.booked.get("bolt", [])]
            others = [b for b in both.running() if b not in mine]
            for one in others[:1]:
                both.finish(one, **{**how, "outcome": Outcome.FAILED})
            if what < len(mine):
                both.finish(mine[what], **how)
                alone.finish(alone.running()[what], **how)
        elif kind != "lose":
            both.act(kind, what, how)
            if what != "acme":
                alone.act(kind, what, how)
    assert [a for a in both.answers if a[0] == "bolt"] == alone.answers


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 500)), max_size=80))
@MANY
def test_estimates_are_reserved_and_never_held_against_a_tenant_for_good(
    asks: list[tuple[float, int]],
) -> None:
    """Answers without a bound may overrun; the overrun is charged, and time always heals it."""
    rig = Rig(settings(T0={"output_tokens_per_minute": 400}))
    for pause_s, length in asks:
        rig.clock.s += pause_s
        judged = rig.admit(path=CHAT)
        if isinstance(judged, Ticket):
            now(judged.finished(outcome=Outcome.FINISHED, prompt_tokens=1, output_tokens=length))
        else:
            assert judged.retry_after_s is not None
            assert judged.retry_after_s <= 61
    rig.clock.s += 61
    rig.ticket(path=CHAT)


@pytest.mark.parametrize("jump_s", [-1e9, -3600.0, -1.0])
def test_a_clock_set_back_reopens_nothing(jump_s: float) -> None:
    rig = Rig(settings(T0={"requests_per_minute": 2}))
    rig.ticket()
    rig.ticket()
    rig.clock.s += jump_s
    refused = rig.refusal()
    assert refused.retry_after_s is not None
    assert refused.retry_after_s <= 61
    rig.clock.s += refused.retry_after_s
    rig.ticket()
