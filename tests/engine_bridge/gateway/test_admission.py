"""Admission at the gateway's door: what is charged, given back, and asked of engines."""

from __future__ import annotations

import asyncio
import base64
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine_bridge.admission.test_media import jpeg, png, sound, url
from tests.engine_bridge.gateway.gateway_parts import (
    run,
    running_gateway,
    start_engine,
    texts,
    until,
)
from trimtab.engine_bridge.errors import InputError


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


def test_who_leaves_a_stream_before_its_first_token_pays_for_no_output(tmp_path: Path) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        limits = admission_file(tmp_path, output_tokens_per_minute=1000)
        async with running_gateway(tmp_path, {"a": engine.url}, admission=limits) as gateway:
            asked = asyncio.create_task(gateway.stream("wait=20", max_tokens=900))
            await until(lambda: engine.engine.begun == 1, what="it runs")
            asked.cancel()
            await until(lambda: not gateway.gateway._proxy.open, what="it is gone")
            assert (await gateway.ask("tokens=1", max_tokens=1000)).status_code == 200
        await engine.kill()

    run(test())


def test_a_reload_that_fails_half_way_changes_neither_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        engine = await start_engine("a")
        limits = admission_file(tmp_path, requests_per_minute=2)
        async with running_gateway(tmp_path, {"a": engine.url}, admission=limits) as gateway:
            before = gateway.gateway._setup.fleet.engines["a"]
            admission_file(tmp_path, requests_per_minute=50)

            def no_engines(*args: Any, **more: Any) -> None:
                raise InputError("engines", bound="possible")

            def no_limits(*args: Any, **more: Any) -> None:
                raise InputError("admission", bound="possible")

            engines = {"other": {"url": engine.url, "models": ["other"]}}
            for name, broken in (
                ("setup.make_fleet", no_engines),
                ("server.judging_spec", no_limits),
                ("server.Admission.reconfigure", no_limits),
            ):
                with monkeypatch.context() as patched:
                    patched.setattr(f"trimtab.engine_bridge.gateway.{name}", broken)
                    await gateway.reload(engines=engines, time_outs={"first_byte_s": 1.0})
            assert gateway.states() == {"a": "up"}
            assert (before.name, before.client.first_byte_s) == ("a", 600.0)
            statuses = [(await gateway.ask("tokens=1")).status_code for _ in range(3)]
            assert statuses == [200, 200, 429]
        await engine.kill()

    run(test())


def test_engines_that_left_are_not_kept_to_count_tokens_with(tmp_path: Path) -> None:
    async def test() -> None:
        engines = [await start_engine(name) for name in "ab"]
        limits = admission_file(tmp_path, max_prompt_tokens=100)
        url = {name: one.url for name, one in zip("ab", engines, strict=True)}
        async with running_gateway(tmp_path, {"a": url["a"]}, admission=limits) as gateway:
            seen: list[weakref.ref[Any]] = []
            for name in "ababab":
                await gateway.reload(engines={name: {"url": url[name], "models": ["m"]}})
                assert (await gateway.ask("x" * 600)).status_code in (200, 413)
                seen.append(weakref.ref(gateway.gateway._setup.fleet.engines[name]))
                gc.collect()
                assert {one().name for one in seen if one() is not None} == {name}
        for one in engines:
            assert {label["x-trimtab-tenant"] for label in one.engine.tokenized} == {"anonymous"}
        for one in engines:
            await one.kill()

    run(test())


@pytest.mark.parametrize("word", ["true", 1, "YES"])
def test_a_stream_by_any_word_for_true_is_charged_what_it_has_taken(
    tmp_path: Path, word: object
) -> None:
    """Its reservation is a guess where it names no bound: a long answer must not hide behind it."""

    async def test() -> None:
        engine = await start_engine("a")
        limits = admission_file(tmp_path, output_tokens_per_minute=1000)
        async with running_gateway(tmp_path, {"a": engine.url}, admission=limits) as gateway:
            chat = {"model": "m", "messages": [{"role": "user", "content": "tokens=990"}]}
            answer = await gateway.client.post(
                "/v1/chat/completions", json={**chat, "stream": word}
            )
            assert answer.status_code == 200
            assert answer.content.count(b"data: ") > 990
            assert b'"usage"' not in answer.content
            assert (await gateway.ask("tokens=1", max_tokens=11)).status_code == 429
            assert (await gateway.ask("tokens=1", max_tokens=10)).status_code == 200
        await engine.kill()

    run(test())


def test_what_is_shown_counts_in_the_prompt(tmp_path: Path) -> None:
    """A picture of 12 tiles, a second of sound, and a video behind an address."""
    parts = {
        "small": {"type": "image_url", "image_url": {"url": url(png(512, 512))}},
        "large": {"type": "image_url", "image_url": {"url": url(jpeg(1920, 1080), "image/jpeg")}},
        "sound": {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(sound(1.0)).decode(), "format": "wav"},
        },
        "video": {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}},
    }

    async def test() -> None:
        engine = await start_engine("a")
        limits = admission_file(tmp_path, max_prompt_tokens=1000)
        async with running_gateway(tmp_path, {"a": engine.url}, admission=limits) as gateway:

            async def status(name: str) -> tuple[int, str]:
                content = [{"type": "text", "text": "tokens=1"}, parts[name]]
                body = {"model": "m", "messages": [{"role": "user", "content": content}]}
                answer = await gateway.client.post("/v1/chat/completions", json=body)
                return answer.status_code, answer.json().get("error", {}).get("code", "")

            assert await status("large") == (413, "prompt_too_long")
            assert await status("video") == (413, "prompt_too_long")
            assert (await status("small"))[0] == 200
            assert (await status("sound"))[0] == 200
        await engine.kill()

    run(test())
