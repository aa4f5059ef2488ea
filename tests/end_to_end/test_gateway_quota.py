"""Quotas over two gateways that share a Redis: under a crowd, a killed gateway, a killed Redis."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.end_to_end.gateway_process import (
    EngineProcess,
    GatewayProcess,
    engine_process,
    gateway_process,
)
from tests.redis_server import RedisProcess, redis_server
from trimtab.engine_bridge.admission.limiter import BUCKETS

MODEL = "m"
CLIENTS = 64
CROWD_S = 50.0  # the quota's minute must not pass
PIECE_US = 60_000_000 // BUCKETS
LEASE_S = 60
LIMITS: dict[str, dict[str, int]] = {
    "requests": {"requests_per_minute": 150},
    "tokens": {"prompt_tokens_per_minute": 3000},
    "places": {"concurrent_requests": 7, "requests_per_minute": 150},
    "all": {"requests_per_minute": 40, "concurrent_requests": 6},
}
"""Each tenant's own, so that no test takes from another."""


class House:
    """Two gateways, one engine, one Redis."""

    def __init__(
        self, redis: RedisProcess, engine: EngineProcess, gateways: list[GatewayProcess]
    ) -> None:
        self.redis, self.engine, self.gateways = redis, engine, gateways

    @asynccontextmanager
    async def clients(self, tenant: str, count: int = 2) -> AsyncIterator[list[httpx.AsyncClient]]:
        """Clients of a tenant, by turns at one gateway and the other."""
        headers = {"authorization": f"Bearer sk-{tenant}"}
        opened = [
            httpx.AsyncClient(
                base_url=self.gateways[n % 2].url, headers=headers, timeout=30, verify=False
            )
            for n in range(count)
        ]
        try:
            yield opened
        finally:
            for one in opened:
                await one.aclose()


def run(test: Coroutine[Any, Any, None]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(CROWD_S):
            await test

    asyncio.run(in_time())


async def ask(client: httpx.AsyncClient, prompt: str = "tokens=1") -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 5}
    return await client.post("/v1/completions", json=body)


def code(answer: httpx.Response) -> str:
    """`ok`, or the code of the refusal; nothing else may come."""
    if answer.status_code == 200:
        return "ok"
    assert answer.status_code == 429, answer.text
    assert float(answer.headers["retry-after"]) > 0
    found: str = answer.json()["error"]["code"]
    return found


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisProcess, EngineProcess]]:
    with ExitStack() as stack:
        yield (
            stack.enter_context(redis_server(tmp_path_factory.mktemp("redis"))),
            stack.enter_context(engine_process("a", token_s=0.0)),
        )


@pytest.fixture(scope="module")
def house(
    tmp_path_factory: pytest.TempPathFactory, parts: tuple[RedisProcess, EngineProcess]
) -> Iterator[House]:
    redis, engine = parts
    keys = {
        tenant: {"tier": "T0", "keys_sha256": [hashlib.sha256(f"sk-{tenant}".encode()).hexdigest()]}
        for tenant in LIMITS
    }
    with ExitStack() as stack:
        gateways = []
        for name in ("one", "two"):
            folder: Path = tmp_path_factory.mktemp(name)
            (folder / "keys.yaml").write_text(yaml.safe_dump(keys))
            (folder / "admission.yaml").write_text(
                yaml.safe_dump({"tenants": LIMITS, "storage": redis.url})
            )
            settings: dict[str, Any] = {
                "keys": "keys.yaml",
                "admission": "admission.yaml",
                "engines": {"a": {"url": engine.url, "models": [MODEL]}},
            }
            gateways.append(stack.enter_context(gateway_process(folder, settings)))
        yield House(redis, engine, gateways)


async def crowd(
    house: House, tenant: str, prompt: str, *, patience: int = 1
) -> tuple[Counter[str], int]:
    """64 clients that ask until they were refused so often; what came, and its prompts' tokens."""
    came: Counter[str] = Counter()
    prompt_tokens = 0

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal prompt_tokens
        left = patience
        while left:
            answer = await ask(client, prompt)
            found = code(answer)
            came[found] += 1
            if found == "ok":
                prompt_tokens += answer.json()["usage"]["prompt_tokens"]
            elif found == "concurrency":
                await asyncio.sleep(0.005)
            else:
                left -= 1
                await asyncio.sleep(0.05)

    async with house.clients(tenant, CLIENTS) as clients:
        await asyncio.gather(*(one(client) for client in clients))
    return came, prompt_tokens


def test_requests_a_minute_are_let_through_to_the_last_and_no_further(house: House) -> None:
    async def test() -> None:
        before = house.engine.counts()["begun"]
        came, _ = await crowd(house, "requests", "tokens=1")
        assert came == {"ok": 150, "requests_quota": CLIENTS}
        assert house.engine.counts()["begun"] - before == 150

    run(test())


def test_the_servers_clock_set_back_does_not_reopen_it(house: House) -> None:
    """Redis' clock cannot be set: what its books say of the time is moved on by an hour."""

    async def test() -> None:
        async with house.clients("requests") as clients:
            assert [code(await ask(one)) for one in clients] == ["requests_quota"] * 2
            for books in range(2):
                assert await shift(house.redis, 3600.0) > 0
                for one in clients * 2:
                    assert code(await ask(one)) == "requests_quota", books

    run(test())


async def shift(redis: RedisProcess, by_s: float) -> int:
    """Have all that is booked lie later: as if the server's clock had been set back since."""
    from redis.asyncio import Redis

    client: Any = Redis(unix_socket_path=str(redis.socket), decode_responses=True)
    moved = 0
    try:
        async for key in client.scan_iter("*:book"):
            fields = await client.hgetall(key)
            later: dict[str, str] = {}
            for name, value in fields.items():
                quota, _, piece = name.partition(":")
                if piece.isdigit():
                    later[f"{quota}:{int(piece) + round(by_s * 1e6) // PIECE_US}"] = value
                    moved += 1
                elif piece == "oldest":
                    later[name] = str(int(value) + round(by_s * 1e6) // PIECE_US)
                elif name == "latest":
                    later[name] = str(int(value) + round(by_s * 1e6))
                else:
                    later[name] = value
            left_s = await client.ttl(key)
            await client.delete(key)
            await client.hset(key, mapping=later)
            await client.expire(key, left_s)
    finally:
        await client.aclose()
    return moved


def test_prompt_tokens_a_minute_are_never_exceeded(house: House) -> None:
    prompt = "tokens=1 " + "word " * 39

    async def test() -> None:
        came, tokens = await crowd(house, "tokens", prompt, patience=4)
        each = tokens // came["ok"]
        limit = LIMITS["tokens"]["prompt_tokens_per_minute"]
        assert set(came) == {"ok", "prompt_tokens_quota"}
        # Its length is reserved by bytes first, so a little of it may be left.
        assert limit - 12 * each < tokens <= limit

    run(test())


def test_requests_at_once_are_never_more(house: House) -> None:
    async def test() -> None:
        house.engine.forget_most()
        before = house.engine.counts()["begun"]
        came, _ = await crowd(house, "places", "tokens=1 wait=0.005")
        after = house.engine.counts()
        assert came["ok"] == after["begun"] - before == 150
        assert came["concurrency"] > 0
        assert after["most_running"] == 7

    run(test())


def test_while_redis_is_away_each_gateway_counts_by_itself(house: House) -> None:
    """And nobody fails of it. A Redis that comes back empty has forgotten the minute."""

    async def asks(clients: list[httpx.AsyncClient], count: int) -> Counter[str]:
        answers = await asyncio.gather(*(ask(clients[n % 2]) for n in range(count)))
        return Counter(code(answer) for answer in answers)

    async def test() -> None:
        async with house.clients("all") as clients:
            for _ in range(10):
                assert [code(await ask(one)) for one in clients] == ["ok"] * 2
            house.redis.kill()
            alone: Counter[str] = Counter()
            for _ in range(50):
                alone += Counter([code(await ask(one)) for one in clients])
            assert alone == {"ok": 80, "requests_quota": 20}
            house.redis.start()
            # Left alone for 5 s, it is asked again after that.
            while [code(await ask(one)) for one in clients] != ["ok"] * 2:
                await asyncio.sleep(0.2)
            house.redis.empty()
            together: Counter[str] = Counter()
            for _ in range(30):
                together += Counter([code(await ask(one)) for one in clients])
            assert together == {"ok": 40, "requests_quota": 20}

    run(test())
    for gateway in house.gateways:
        assert gateway.metric("trimtab_admission_storage_failures") >= 1
        assert gateway.metric("trimtab_gateway_refusals_total", code="internal_error") == 0


def test_a_killed_gateways_places_come_back_and_its_requests_stay_counted(house: House) -> None:
    """The last test: one gateway is gone after it."""

    async def stream(client: httpx.AsyncClient) -> None:
        body = {"model": MODEL, "prompt": "slow tokens=300", "stream": True, "max_tokens": 300}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_bytes():
                pass

    async def at_once(client: httpx.AsyncClient, count: int) -> Counter[str]:
        answers = [ask(client, "wait=0.5 tokens=1") for _ in range(count)]
        return Counter(code(answer) for answer in await asyncio.gather(*answers))

    async def test() -> None:
        house.redis.empty()
        async with house.clients("all") as (first, second):
            running = [asyncio.create_task(stream(one)) for one in (first, second) * 3]
            while house.engine.counts()["running"] < 6:
                await asyncio.sleep(0.02)
            house.gateways[0].process.kill()
            for number, one in enumerate(running):
                if number % 2:
                    one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            while house.engine.counts()["running"]:
                await asyncio.sleep(0.02)
            # Three places are the dead one's, and of 40 requests six have been.
            while (came := await at_once(second, 6)) == {"concurrency": 6}:
                await asyncio.sleep(0.05)
            assert came == {"ok": 3, "concurrency": 3}
            left = 40 - 6 - 3
            rest = Counter([code(await ask(second)) for _ in range(left + 3)])
            assert rest == {"ok": left, "requests_quota": 3}
            await pass_by(house.redis, LEASE_S + 2)
            assert await at_once(second, 8) == {"ok": 6, "concurrency": 2}

    run(test())


async def pass_by(redis: RedisProcess, seconds: float) -> None:
    """Let time pass for what is booked, at once."""
    from redis.asyncio import Redis

    client: Any = Redis(unix_socket_path=str(redis.socket))
    try:
        async for key in client.scan_iter("*:book"):
            await client.hincrby(key, "ahead", round(seconds * 1e6))
    finally:
        await client.aclose()
