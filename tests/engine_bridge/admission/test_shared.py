"""Quotas under many requests at once: in one process, and in two that share a Redis."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_bridge.admission.rig import PLAN, Clock, asked, settings
from tests.redis_server import RedisProcess, redis_server
from trimtab.engine_bridge.admission.core import Admission
from trimtab.engine_bridge.admission.limiter import Charge, Limiter, Places, Quota, Short, Taken
from trimtab.engine_bridge.admission.memory_ledger import MemoryLedger
from trimtab.engine_bridge.admission.outcome import Outcome
from trimtab.engine_bridge.admission.redis_ledger import LEFT_ALONE_S, RedisLedger, open_limiter
from trimtab.engine_bridge.admission.refusal import Refusal
from trimtab.engine_bridge.admission.settings import AdmissionSettings, AdmissionSettingsError
from trimtab.engine_bridge.admission.ticket import Ticket

AT_ONCE = 64
PATIENCE_S = 10.0
CROWD_S = 50.0  # the quota's minute must not pass
MINUTE = Quota("requests", 100, 60)


@pytest.fixture(scope="module")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A Redis of the test's own."""
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def url(redis_process: RedisProcess) -> str:
    """Its URL, with nothing in it."""
    redis_process.empty()
    return redis_process.url


def redis(url: str) -> RedisLedger:
    return RedisLedger(url, time_out_s=PATIENCE_S, monotonic_s=time.monotonic)


def admission(rules: AdmissionSettings, limiter: Limiter) -> Admission:
    return Admission(rules, PLAN, limiter=limiter, monotonic_s=time.monotonic)


async def crowd(doors: list[Admission], running: dict[str, int]) -> int:
    """64 clients that ask on until the quota is used up: how many requests were admitted."""
    admitted = 0

    async def client(number: int) -> None:
        nonlocal admitted
        while True:
            number += 1
            judged = await doors[number % len(doors)].admit(asked(max_tokens=10))
            if isinstance(judged, Refusal):
                assert judged.status == 429
                if judged.code != "concurrency":
                    return
                await asyncio.sleep(0.001)
                continue
            admitted += 1
            running["now"] += 1
            running["most"] = max(running["most"], running["now"])
            await asyncio.sleep(0.001)
            running["now"] -= 1
            used = {"prompt_tokens": 2, "output_tokens": 10}
            await judged.finished(outcome=Outcome.FINISHED, **used)

    async with asyncio.timeout(CROWD_S):
        await asyncio.gather(*(client(number) for number in range(AT_ONCE)))
    return admitted


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"requests_per_minute": 250}, 250),
        ({"output_tokens_per_minute": 2000}, 200),
        ({"budget_per_day": 3200}, 100),
    ],
)
def test_64_tasks_in_one_process(limits: dict[str, int], most: int) -> None:
    async def run() -> tuple[int, dict[str, int]]:
        rules = settings(T0={**limits, "concurrent_requests": 7})
        door = admission(rules, MemoryLedger(time.monotonic))
        running = {"now": 0, "most": 0}
        return await crowd([door], running), running

    admitted, running = asyncio.run(run())
    assert (admitted, running["most"]) == (most, 7)


@pytest.mark.parametrize(
    ("limits", "most"),
    [({"requests_per_minute": 250}, 250), ({"output_tokens_per_minute": 2000}, 200)],
)
def test_64_tasks_over_two_doors_that_share_a_redis(
    url: str, limits: dict[str, int], most: int
) -> None:
    async def run() -> tuple[int, dict[str, int]]:
        rules = settings(T0={**limits, "concurrent_requests": 7})
        doors = [admission(rules, redis(url)) for _ in range(2)]
        running = {"now": 0, "most": 0}
        admitted = await crowd(doors, running)
        for door in doors:
            assert door.storage_failures == 0
            await door.close()
        return admitted, running

    admitted, running = asyncio.run(run())
    assert (admitted, running["most"]) == (most, 7)


class Twin:
    """The same calls to a ledger in memory and to one in Redis."""

    def __init__(self, url: str) -> None:
        self.redis, self.memory = redis(url), MemoryLedger(time.monotonic)
        self.number = 0

    async def take(
        self, charges: list[Charge], places: Places | None = None
    ) -> tuple[Taken, Taken] | Short:
        self.number += 1
        ticket = f"t{self.number}"
        one = await self.redis.take("acme", ticket, charges, places)
        other = await self.memory.take("acme", ticket, charges, places)
        if isinstance(one, Taken) and isinstance(other, Taken):
            return one, other
        assert isinstance(one, Short)
        assert isinstance(other, Short)
        assert one.name == other.name
        assert one.wait_s == pytest.approx(other.wait_s, abs=2.0)
        return one

    async def settle(self, both: tuple[Taken, Taken], spent: dict[str, int]) -> None:
        await self.redis.settle(both[0], spent)
        await self.memory.settle(both[1], spent)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_redis_and_memory_count_alike(url: str) -> None:
    async def steps() -> None:
        twin = Twin(url)
        tokens = Quota("output_tokens", 1000, 60)
        day = Quota("budget", 10**12, 86_400)
        places = Places(3, 2, 60.0)
        first = await twin.take([Charge(MINUTE, 40), Charge(tokens, 900), Charge(day, 10**11)])
        assert not isinstance(first, Short)
        short = await twin.take([Charge(MINUTE, 61), Charge(tokens, 1)])
        assert isinstance(short, Short)
        assert short.name == "requests"
        assert 58 < short.wait_s <= 61
        short = await twin.take([Charge(MINUTE, 1), Charge(tokens, 101), Charge(day, 1)])
        assert isinstance(short, Short)
        assert short.name == "output_tokens"
        await twin.settle(first, {"output_tokens": 100, "requests": 40, "budget": 2 * 10**11})
        second = await twin.take([Charge(MINUTE, 60), Charge(tokens, 900)], places)
        assert not isinstance(second, Short)
        assert isinstance(await twin.take([Charge(MINUTE, 1)]), Short)
        assert isinstance(await twin.take([], places), Short)
        assert not isinstance(await twin.take([], Places(3, 1, 60.0)), Short)
        await twin.settle(second, {"requests": 0, "output_tokens": 0})
        assert not isinstance(await twin.take([Charge(MINUTE, 60)], places), Short)
        assert await twin.redis.wait_s("acme", [Charge(day, 8 * 10**11)]) == 0.0
        late = await twin.redis.wait_s("acme", [Charge(day, 8 * 10**11 + 1)])
        assert 86_000 < late <= 86_400 * 61 / 60
        await twin.redis.close()

    run(steps())


def test_the_wait_that_redis_tells_is_true(url: str) -> None:
    async def steps() -> None:
        ledger = redis(url)
        short_window = Quota("requests", 5, 1)
        for number in range(5):
            assert isinstance(
                await ledger.take("a", f"{number}", [Charge(short_window, 1)], None), Taken
            )
            await asyncio.sleep(0.02)
        refused = await ledger.take("a", "x", [Charge(short_window, 2)], None)
        assert isinstance(refused, Short)
        await asyncio.sleep(max(0.0, refused.wait_s - 0.015))
        early = await ledger.take("a", "y", [Charge(short_window, 2)], None)
        if isinstance(early, Short):  # a busy machine may have slept for longer
            await asyncio.sleep(early.wait_s)
            assert isinstance(await ledger.take("a", "z", [Charge(short_window, 2)], None), Taken)
        await ledger.close()

    run(steps())


@pytest.mark.parametrize("seed", range(4))
def test_a_window_slides_in_redis_as_it_should(url: str, seed: int) -> None:
    """What its book says of the clock can be moved on: minutes pass at once."""

    async def steps() -> None:
        draw = random.Random(seed)
        ledger = redis(url)
        client: Any = ledger._client
        quota = Quota("output_tokens", 1000, 60)
        passed: list[tuple[float, int]] = []
        ahead_s, started_s = 0.0, time.monotonic()
        assert isinstance(await ledger.take("a", "first", [Charge(quota, 1)], None), Taken)
        (book,) = await client.keys("*book")

        async def wait(seconds: float) -> None:
            nonlocal ahead_s
            ahead_s += seconds
            await client.hincrby(book, "ahead", round(seconds * 1e6))

        for number in range(150):
            charge = Charge(quota, draw.randint(1, 400))
            taken = await ledger.take("a", f"{number}", [charge], None)
            now_s = ahead_s + time.monotonic() - started_s
            if isinstance(taken, Short):
                await wait(max(0.0, taken.wait_s - 0.5))
                assert isinstance(await ledger.take("a", "early", [charge], None), Short)
                await wait(0.5)
                now_s = ahead_s + time.monotonic() - started_s
                taken = await ledger.take("a", f"{number} again", [charge], None)
            assert isinstance(taken, Taken)
            amount = charge.amount
            if draw.random() < 0.5:
                amount = draw.randint(0, amount)
                await wait(draw.uniform(0, 3))
                await ledger.settle(taken, {"output_tokens": amount})
            passed.append((now_s, amount))
            assert sum(a for at_s, a in passed if at_s > now_s - 59.9) <= 1000
            if draw.random() < 0.3:
                await wait(draw.choice([0.3, 5.0, 30.0, 61.0, 500.0]))
        await ledger.close()

    run(steps())


def test_places_of_a_process_that_died_come_back(url: str) -> None:
    async def steps() -> None:
        dead, alive = redis(url), redis(url)
        places = Places(1, 1, 0.3)
        held = await dead.take("acme", "t", [], places)
        assert isinstance(held, Taken)
        for _ in range(4):
            await asyncio.sleep(0.1)
            await dead.renew([held])
            assert isinstance(await alive.take("acme", "u", [], places), Short)
        await asyncio.sleep(0.4)
        assert isinstance(await alive.take("acme", "u", [], places), Taken)
        await dead.close()
        await alive.close()

    run(steps())


def test_a_server_clock_that_is_set_back_reopens_nothing(url: str) -> None:
    """Redis' clock cannot be set here; the book says that it was an hour ahead a moment ago."""

    async def steps() -> None:
        ledger = redis(url)
        ahead = (time.time() + 3600) * 1e6
        client: Any = ledger._client
        taken = await ledger.take("acme", "t", [Charge(MINUTE, 1)], None)
        assert isinstance(taken, Taken)
        (book,) = await client.keys("*book")
        piece = int(ahead // 1e6)
        await client.delete(book)
        fields = {"latest": f"{ahead:.0f}", "requests:total": 100, "requests:oldest": piece}
        await client.hset(book, mapping={**fields, f"requests:{piece}": 100})
        for _ in range(3):
            short = await ledger.take("acme", "u", [Charge(MINUTE, 1)], None)
            assert isinstance(short, Short)
            assert 0 < short.wait_s <= 61
        assert int(await client.hget(book, "ahead")) > 3500 * 1e6
        await ledger.close()

    run(steps())


def test_names_of_tenants_are_not_in_the_storage(url: str) -> None:
    async def steps() -> None:
        ledger = redis(url)
        await ledger.take("a secret customer", "t", [Charge(MINUTE, 1)], Places(5, 1, 60.0))
        client: Any = ledger._client
        keys = await client.keys("*")
        assert len(keys) == 2
        assert all(b"customer" not in key for key in keys)
        assert all([await client.ttl(key) > 0 for key in keys])
        await ledger.close()

    run(steps())


def test_without_its_storage_each_process_counts_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def steps() -> None:
        clock = Clock()
        ledger = RedisLedger(
            f"redis+unix://{tmp_path}/nobody.sock", time_out_s=0.2, monotonic_s=clock
        )
        rules = settings(T0={"requests_per_minute": 3, "concurrent_requests": 2})
        door = Admission(rules, PLAN, limiter=ledger, monotonic_s=clock)
        for _ in range(3):
            judged = await door.admit(asked())
            assert isinstance(judged, Ticket)
            await judged.finished(outcome=Outcome.FINISHED)
        assert isinstance(await door.admit(asked()), Refusal)
        await door.renew()
        assert door.storage_failures == 1
        clock.s += LEFT_ALONE_S
        assert isinstance(await door.admit(asked()), Refusal)
        assert door.storage_failures == 2
        await door.close()

    run(steps())
    assert "counting in this process" in caplog.text
    assert str(tmp_path) not in caplog.text


def test_a_client_that_leaves_does_not_keep_what_it_took(url: str) -> None:
    async def steps() -> None:
        door = admission(settings(T0={"concurrent_requests": 1}), redis(url))
        for _ in range(20):
            judged = await door.admit(asked())
            assert isinstance(judged, Ticket)
            ending = asyncio.create_task(judged.finished(outcome=Outcome.CANCELLED))
            await asyncio.sleep(0)
            ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await ending
            await door._limiter.wait_s("acme", [])  # behind it on the same connection or another
            while door._writing:
                await asyncio.wait(set(door._writing))
        await door.close()

    run(steps())


def test_who_is_cancelled_while_the_storage_gives_has_taken_nothing(url: str) -> None:
    async def steps() -> None:
        ledger = redis(url)
        places = Places(1, 1, 60.0)
        for turns in range(12):
            taking = asyncio.create_task(
                ledger.take("acme", f"t{turns}", [Charge(MINUTE, 100)], places)
            )
            for _ in range(turns):
                await asyncio.sleep(0.0002)
            taking.cancel()
            given = (await asyncio.gather(taking, return_exceptions=True))[0]
            while ledger._undoing:
                await asyncio.wait(set(ledger._undoing))
            if isinstance(given, Taken):  # it was faster
                await ledger.settle(given, {"requests": 0})
        # All of the quota and the only place are there again.
        free = await ledger.take("acme", "u", [Charge(MINUTE, 100)], places)
        assert isinstance(free, Taken)
        await ledger.close()

    run(steps())


@pytest.mark.parametrize("url", ["redis://host:port", "redis+sentinel://host"])
def test_a_storage_that_is_none_is_said_at_once(url: str) -> None:
    with pytest.raises(AdmissionSettingsError, match="storage"):
        open_limiter(url, time_out_s=0.1, monotonic_s=time.monotonic)
