"""Admission at the gateway's door: what is charged, given back, and asked of engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import yaml

from tests.engine_bridge.gateway.gateway_parts import (
    run,
    running_gateway,
    start_engine,
    texts,
    until,
)


def admission_file(folder: Path, **limits: Any) -> str:
    path = folder / "admission.yaml"
    path.write_text(yaml.safe_dump({"tiers": {"T3": limits}}))  # the tier of who has no key
    return str(path)


def test_a_quota_of_requests_holds_however_many_come_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        limits = admission_file(tmp_path, requests_per_minute=10)
        async with running_gateway(tmp_path, {"a": engine.url}, admission=limits) as gateway:
            answers = await asyncio.gather(*(gateway.ask("tokens=1") for _ in range(64)))
            statuses = [answer.status_code for answer in answers]
            assert statuses.count(200) == 10
            assert statuses.count(429) == 54
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert refused.json()["error"]["code"] == "requests_quota"
            assert 0 < float(refused.headers["retry-after"]) <= 61
        assert engine.engine.begun == 10
        await engine.kill()

    run(test())


def test_output_that_did_not_come_is_given_back(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        limits = admission_file(tmp_path, output_tokens_per_minute=100)
        async with running_gateway(tmp_path, {"a": engine.url}, admission=limits) as gateway:
            # Each reserves 90 and takes 10: streamed and not.
            for _ in range(2):
                assert (await gateway.ask("tokens=10", max_tokens=90)).status_code == 200
            assert len(texts(await gateway.stream("tokens=10", max_tokens=70)).split()) == 10
            assert (await gateway.ask("tokens=10", max_tokens=80)).status_code == 429
            assert (await gateway.ask("tokens=10", max_tokens=60)).status_code == 200
        await engine.kill()

    run(test())


def test_a_client_that_leaves_pays_for_what_it_was_sent_and_gives_its_place_back(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        limits = admission_file(tmp_path, concurrent_requests=1, output_tokens_per_minute=1000)
        async with running_gateway(tmp_path, {"a": engine.url}, admission=limits) as gateway:
            asked = asyncio.create_task(gateway.stream("slow tokens=500", max_tokens=900))
            await until(lambda: engine.engine.begun == 1, what="it runs")
            assert (await gateway.ask()).json()["error"]["code"] == "concurrency"
            await asyncio.sleep(0.3)
            asked.cancel()
            await until(lambda: engine.engine.cut == 1, what="it is cut")
            await until(lambda: gateway.in_flight() == 0, what="it is gone")
            assert (await gateway.ask("tokens=1", max_tokens=900)).status_code == 200
        await engine.kill()

    run(test())


def test_what_no_engine_took_costs_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        limits = admission_file(tmp_path, requests_per_minute=2)
        settings: dict[str, Any] = {"time_outs": {"wait_s": 0.1}, "admission": limits}
        async with running_gateway(tmp_path, {"a": "http://127.0.0.1:9"}, **settings) as gateway:
            for _ in range(5):
                assert (await gateway.ask()).json()["error"]["code"] == "no_engine"

    run(test())


def test_who_leaves_before_an_engine_was_asked_pays_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        limits = admission_file(tmp_path, requests_per_minute=1)
        async with running_gateway(
            tmp_path, {"a": "http://127.0.0.1:9"}, admission=limits, time_outs={"wait_s": 30}
        ) as gateway:
            waiting = gateway.gateway._waiting
            for _ in range(3):
                asked = asyncio.create_task(gateway.ask())
                await until(lambda: bool(waiting.lengths.get("T3")), what="it waits")
                asked.cancel()
                await until(lambda: not gateway.gateway._proxy.open, what="it is gone")

    run(test())


def test_a_low_tier_is_sent_away_while_the_engine_is_full(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")  # its metrics tell of 7 that wait
        path = tmp_path / "admission.yaml"
        for queue, status in ((7, 503), (8, 200)):
            path.write_text(yaml.safe_dump({"saturation": {"queue_length": queue}}))
            settings: dict[str, Any] = {"admission": str(path)}
            async with running_gateway(tmp_path, {"a": engine.url}, **settings) as gateway:
                answer = await gateway.ask("tokens=1")
                assert answer.status_code == status
                if status == 503:
                    assert answer.json()["error"]["code"] == "engine_saturated"
                    assert answer.headers["retry-after"]
        await engine.kill()

    run(test())


def test_limits_on_answers_reach_the_engine(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        limits = admission_file(tmp_path, longest_output_tokens=50)
        async with running_gateway(tmp_path, {"a": engine.url}, admission=limits) as gateway:
            await gateway.ask(max_tokens=4000)
            await gateway.stream()
        sent = [one["body"] for one in engine.engine.seen]
        assert sent[0]["max_tokens"] == 50
        assert 50 in (sent[1].get("max_tokens"), sent[1].get("max_completion_tokens"))
        await engine.kill()

    run(test())


def test_a_reload_changes_limits_and_forgets_no_use(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        limits = admission_file(tmp_path, requests_per_minute=3)
        async with running_gateway(tmp_path, {"a": engine.url}, admission=limits) as gateway:
            for _ in range(3):
                assert (await gateway.ask("tokens=1")).status_code == 200
            await gateway.reload()
            assert (await gateway.ask("tokens=1")).status_code == 429
            admission_file(tmp_path, requests_per_minute=5)
            await gateway.reload()
            statuses = [(await gateway.ask("tokens=1")).status_code for _ in range(3)]
            assert statuses == [200, 200, 429]
        await engine.kill()

    run(test())
