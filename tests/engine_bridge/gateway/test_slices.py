"""Long prompts in slices: what the engine gets, what the client sees, what becomes of failures."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.engine_bridge.gateway.gateway_parts import (
    MODEL,
    RunningEngine,
    RunningGateway,
    events,
    raw_engine,
    run,
    running_gateway,
    start_engine,
    until,
)
from tests.engine_bridge.gateway.token_engine import TokenEngine
from trimtab.engine_bridge import plan as plan_package
from trimtab.engine_bridge.gateway import slices
from trimtab.engine_bridge.gateway.exchange import Exchange
from trimtab.engine_bridge.gateway.health import HealthState
from trimtab.engine_bridge.gateway.prompt_tokens import PromptTokens, ReadPrefixes, question
from trimtab.engine_bridge.gateway.sliced import OnEngine, take_own
from trimtab.engine_bridge.gateway.sse import Usage
from trimtab.engine_bridge.slicing import cuts

SLICE = 1024


def write_plan(folder: Path) -> str:
    text = (Path(plan_package.__file__).parent / "default.yaml").read_text()
    content = yaml.safe_load(text)
    content["tiers"]["T1"]["slice_tokens"] = SLICE
    (folder / "plan.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return str(folder / "plan.yaml")


def write_keys(folder: Path) -> str:
    tenants = {"acme": "T1", "bolt": "T1", "paid": "T0"}
    content = {
        tenant: {"tier": tier, "keys_sha256": [hashlib.sha256(f"sk-{tenant}".encode()).hexdigest()]}
        for tenant, tier in tenants.items()
    }
    (folder / "keys.yaml").write_text(yaml.safe_dump(content))
    return str(folder / "keys.yaml")


@contextlib.asynccontextmanager
async def sliced(
    folder: Path, *engines: RunningEngine, **settings: Any
) -> AsyncIterator[RunningGateway]:
    named = {one.engine.name: {"url": one.url} for one in engines}
    named[engines[0].engine.name]["draft"] = "first"  # the first one is asked first
    settings |= {"plan": write_plan(folder), "keys": write_keys(folder), "drafts": {"T1": "first"}}
    async with running_gateway(folder, named, **settings) as gateway:
        yield gateway
    for one in engines:
        await one.kill()


def words(count: int, start: int = 0) -> str:
    return " ".join(f"w{number}" for number in range(start, start + count))


async def ask(
    gateway: RunningGateway, prompt: str | list[int], *, key: str = "acme", **more: Any
) -> Any:
    answer = await gateway.ask(prompt, headers={"Authorization": f"Bearer sk-{key}"}, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def metric(gateway: RunningGateway, result: str) -> float:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{gateway.gateway.admin_port}/metrics")).text
    name = f'trimtab_gateway_slices_total{{result="{result}",tier="T1"}}'
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)
    )


def test_prefixes_grow_under_the_tenants_labels_and_the_client_sees_one_answer(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        async with sliced(tmp_path, one, usage_dir=str(tmp_path / "usage")) as gateway:
            answer = await ask(gateway, words(2500))
            assert answer["choices"][0]["text"] == "a"
            assert answer["usage"]["prompt_tokens"] == 2500
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert await metric(gateway, "read") == 2
            assert await metric(gateway, "failed") == 0
        seen = one.engine.seen
        assert one.engine.prompts == [SLICE, 2 * SLICE, 2500]
        assert {item["headers"]["x-trimtab-tenant"] for item in seen} == {"acme"}
        assert {item["headers"]["x-trimtab-tier"] for item in seen} == {"T1"}
        assert [item["body"].get("max_tokens") for item in seen] == [1, 1, None]
        assert [item["headers"].get("x-trimtab-slice") for item in seen] == ["1", "1", None]
        assert seen[2]["body"] == {"model": MODEL, "prompt": words(2500)}
        (row,) = pq.read_table(next((tmp_path / "usage").glob("*.parquet"))).to_pylist()
        assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (2500, 0, 1)

    run(test())


def test_a_stream_tells_what_was_cached_before_its_own_slices(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        async with sliced(tmp_path, one) as gateway:
            messages = [{"role": "user", "content": words(1500)}]
            await ask_chat(gateway, messages)
            messages += [
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": words(1500, 9000)},
            ]
            found = await ask_chat(gateway, messages)
            assert found[-1]["usage"]["prompt_tokens"] == 3004
            cached = found[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == 1501 // 16 * 16
        # The second turn finds its first prefix read.
        assert one.engine.prompts == [SLICE, 1501, 2 * SLICE, 3004]

    run(test())


async def ask_chat(gateway: RunningGateway, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    body = {
        "model": MODEL, "messages": messages, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"Authorization": "Bearer sk-acme"}
    answer = await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return events(answer.content)


def test_what_is_short_or_of_another_tier_or_holds_an_image_goes_as_it_is(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        async with sliced(tmp_path, one) as gateway:
            await ask(gateway, words(SLICE // 4))
            await ask(gateway, words(4000), key="paid")
            assert one.engine.tokenized == 0
            await ask(gateway, words(SLICE))
            assert one.engine.prompts == [SLICE // 4, 4000, SLICE]
            image = {"type": "image_url", "image_url": {"url": "data:,x"}}
            text = {"type": "text", "text": words(3000)}
            body = {"model": MODEL, "messages": [{"role": "user", "content": [text, image]}]}
            headers = {"Authorization": "Bearer sk-acme"}
            await gateway.client.post("/v1/chat/completions", json=body, headers=headers)
            several = {"model": MODEL, "prompt": [words(3000)] * 2}
            await gateway.client.post("/v1/completions", json=several, headers=headers)
            assert len(one.engine.prompts) == 5
            assert one.engine.tokenized == 1
            assert await metric(gateway, "failed") == 0, "it is no failure"

    run(test())


def test_tenants_do_not_count_on_each_others_prefixes(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        async with sliced(tmp_path, one) as gateway:
            for key in ("acme", "bolt", "acme"):
                await ask(gateway, words(2000), key=key)
        assert one.engine.prompts == [SLICE, 2000, SLICE, 2000, 2000]

    run(test())


def test_ids_given_by_the_client_are_cut_without_asking(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        async with sliced(tmp_path, one) as gateway:
            ids = list(range(1000, 3500))
            body = {"model": MODEL, "prompt": ids}
            headers = {"Authorization": "Bearer sk-acme"}
            answer = await gateway.client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
        assert one.engine.tokenized == 0
        assert [len(item["body"]["prompt"]) for item in one.engine.seen] == [1024, 2048, 2500]
        assert all(item["body"]["prompt"] == ids[: len(item["body"]["prompt"])]
                   for item in one.engine.seen)  # fmt: skip

    run(test())


def test_what_the_engine_has_not_kept_is_read_in_slices_again(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        async with sliced(tmp_path, one) as gateway:
            await ask(gateway, words(2500))
            one.engine.cache.clear()
            answer = await ask(gateway, words(2500))
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            one.engine.cache.clear()
            await ask(gateway, words(2500))
        assert one.engine.prompts == [1024, 2048, 2500, 2500, 1024, 2048, 2500]

    run(test())


def test_an_engine_that_says_nothing_of_its_cache_is_believed_to_keep_all(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        one.engine.mute = True
        async with sliced(tmp_path, one) as gateway:
            for _ in range(3):
                answer = await ask(gateway, words(2500))
                assert answer["usage"]["prompt_tokens_details"] is None
        assert one.engine.prompts == [1024, 2048, 2500, 2500, 2500]

    run(test())


def test_a_block_less_than_was_read_is_no_sign_that_it_was_evicted(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        one.engine.drop_last = True
        async with sliced(tmp_path, one) as gateway:
            for _ in range(3):
                await ask(gateway, words(2500))
            assert await metric(gateway, "missed") == 0
        assert one.engine.prompts == [1024, 2048, 2500, 2500, 2500]

    run(test())


def test_with_drafts_as_much_counts_as_cached_as_without_slices(tmp_path: Path) -> None:
    """Each slice finds a block less than the one before has read: nobody else's loss."""

    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        one.engine.drop_last = True
        async with sliced(tmp_path, one) as gateway:
            await ask(gateway, words(1500))
            answer = await ask(gateway, words(4500))
        assert one.engine.prompts == [1024, 1500, 2048, 3072, 4096, 4500]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1488 - 16

    run(test())


def test_what_was_cached_without_the_gateways_knowing_counts_as_cached(tmp_path: Path) -> None:
    """As after a restart of the gateway: slices that find all but their last block."""

    async def test() -> None:
        one, other = [await start_engine(name, kind=TokenEngine) for name in "ab"]
        async with sliced(tmp_path, other) as gateway:
            await ask(gateway, words(2500))
        one.engine.cache |= other.engine.cache
        async with sliced(tmp_path, one) as gateway:
            answer = await ask(gateway, words(2500))
        assert one.engine.prompts == [1024, 2048, 2500]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2496

    run(test())


def test_admission_cuts_an_answer_before_it_is_asked_whether_all_fits(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        one.engine.longest = 2600
        limits = {"tiers": {"T1": {"longest_output_tokens": 100}}}
        (tmp_path / "admission.yaml").write_text(yaml.safe_dump(limits))
        admission = str(tmp_path / "admission.yaml")
        async with sliced(tmp_path, one, admission=admission) as gateway:
            await ask(gateway, words(2500), max_tokens=4000)
        assert one.engine.prompts == [1024, 2048, 2500]
        assert one.engine.seen[-1]["body"]["max_tokens"] == 100

    run(test())


def test_an_engine_where_slices_are_not_found_gets_none_for_a_while(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        one.engine.keeps_none = True
        async with sliced(tmp_path, one) as gateway:
            await ask(gateway, words(2500))
            await ask(gateway, words(2500, 9000))
            assert await metric(gateway, "missed") == 1
            assert await metric(gateway, "failed") == 0
        assert one.engine.prompts == [1024, 2048, 2500, 2500]

    run(test())


def test_a_pause_ends() -> None:
    prefixes = ReadPrefixes()
    assert not prefixes.is_paused(0.0)
    prefixes.pause(10.0)
    assert prefixes.is_paused(309.0)
    assert not prefixes.is_paused(310.0)


@pytest.mark.parametrize(("status", "charged"), [(400, 2048), (429, None), (503, None)])
def test_slices_of_what_is_refused_cost_only_whose_mistake_it_is(
    tmp_path: Path, status: int, charged: int | None
) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        one.engine.whole_status = status
        async with sliced(tmp_path, one, usage_dir=str(tmp_path / "usage")) as gateway:
            answer = await gateway.ask(words(2500), headers={"Authorization": "Bearer sk-acme"})
            assert answer.status_code == status
            one.engine.whole_status = 200
            await ask(gateway, words(2500))
            assert await metric(gateway, "missed") == 0, "it says nothing of the cache"
        assert one.engine.prompts == [1024, 2048, 2500, 2500], "what was read stays known"
        table = pq.read_table(next((tmp_path / "usage").glob("*.parquet")))
        refused, _ = table.to_pylist()
        assert refused["prompt_tokens"] == charged

    run(test())


def test_what_an_engine_will_refuse_is_not_read_in_slices(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        one.engine.longest = 2600
        async with sliced(tmp_path, one) as gateway:
            await ask(gateway, words(2500), max_tokens=101)
            await ask(gateway, words(2600))
            assert one.engine.prompts == [2500, 2600]
            headers = {"Authorization": "Bearer sk-acme"}
            body = {"model": MODEL, "prompt": list(range(1000, 3700))}
            await gateway.client.post("/v1/completions", json=body, headers=headers)
            assert await metric(gateway, "failed") == 0
            await ask(gateway, words(2500), max_tokens=100)
        assert [len(item["body"]["prompt"]) for item in one.engine.seen[2:3]] == [2700]
        assert one.engine.prompts == [2500, 2600, 2700, 1024, 2048, 2500]

    run(test())


def test_who_leaves_after_the_slices_pays_as_without_them(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        async with sliced(tmp_path, one, usage_dir=str(tmp_path / "usage")) as gateway:
            await ask(gateway, words(1500))
            one.engine.hangs = True
            slow = asyncio.create_task(ask(gateway, [1, *range(2000, 3500)]))
            await until(lambda: one.engine.prompts[-1] == 1024, what="the first slice")
            one.engine.hangs, one.engine.waits = False, True
            await until(lambda: one.engine.prompts[-1] == 1501, what="the request itself")
            slow.cancel()
            await until(lambda: one.engine.cut == 1, what="its end in the engine")
            await until(lambda: gateway.in_flight() == 0, what="nothing on the engine")
        table = pq.read_table(next((tmp_path / "usage").glob("*.parquet")))
        _, left = table.to_pylist()
        assert (left["prompt_tokens"], left["outcome"]) == (None, "cancelled")

    run(test())


def test_a_huge_body_goes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_MOST_BYTES", 12_000)

    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        async with sliced(tmp_path, one) as gateway:
            await ask(gateway, words(2500))
            await ask(gateway, words(1500))
        assert one.engine.prompts == [2500, 1024, 1500]

    run(test())


def test_a_slices_answer_brings_an_engine_on_trial_back(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        one.engine.waits = True
        async with sliced(tmp_path, one, probes={"back_after": 1000}) as gateway:
            gateway.gateway._setup.fleet.engines["a"].health.state = HealthState.TRIAL
            asked = asyncio.create_task(ask(gateway, list(range(1000, 2501))))
            await until(lambda: one.engine.prompts == [1024, 1501], what="the request itself")
            assert gateway.states() == {"a": "up"}
            asked.cancel()

    run(test())


def test_what_was_read_on_another_engine_is_not_taken_out() -> None:
    async def send(_: Any) -> None:
        raise AssertionError

    exchange = Exchange({"path": "/v1/completions"}, send, now_s=0.0)
    exchange.sliced.engines |= {"a": OnEngine(cached_before=0), "b": OnEngine(cached_before=1024)}
    exchange.engine, exchange.usage = "a", Usage(2500, 2048, 1)
    take_own(exchange)
    assert exchange.usage.cached_tokens == 0
    exchange.engine, exchange.usage = "c", Usage(2500, 2048, 1)
    take_own(exchange)
    assert exchange.usage.cached_tokens == 2048


@pytest.mark.parametrize("fault", ["no tokenizer", "refused"])
def test_without_slices_the_request_goes_on_as_it_is(tmp_path: Path, fault: str) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        one.engine.refuses, one.engine.counts_only = fault == "refused", fault != "refused"
        async with sliced(tmp_path, one) as gateway:
            answer = await ask(gateway, words(2500))
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert await metric(gateway, "failed") == 1
            assert await metric(gateway, "read") == 0
        assert one.engine.prompts[-1] == 2500
        assert len(one.engine.prompts) == (2 if fault == "refused" else 1)

    run(test())


def test_slices_that_take_too_long_end_and_the_request_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        one.engine.hangs = True
        async with sliced(tmp_path, one, time_outs={"first_byte_s": 0.5}) as gateway:
            answer = await ask(gateway, words(2500))
            assert answer["choices"][0]["text"] == "a"
            await until(lambda: one.engine.cut == 1, what="the slice was given up")
        assert one.engine.prompts == [1024, 2500]

    run(test())


def test_a_client_that_leaves_ends_the_slice_and_sends_no_more(tmp_path: Path) -> None:
    async def test() -> None:
        one = await start_engine("a", kind=TokenEngine)
        one.engine.hangs = True
        async with sliced(tmp_path, one) as gateway:
            asked = asyncio.create_task(ask(gateway, words(2500)))
            await until(lambda: one.engine.prompts == [1024], what="the first slice")
            assert gateway.in_flight() == 1
            asked.cancel()
            await until(lambda: one.engine.cut == 1, what="the slice's end in the engine")
            await until(lambda: gateway.in_flight() == 0, what="nothing on the engine")
        assert one.engine.prompts == [1024]

    run(test())


def test_an_engine_lost_in_a_slice_is_replaced_and_the_other_one_gets_slices(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        bad = await start_engine("bad", kind=TokenEngine)
        good = await start_engine("good", kind=TokenEngine)
        bad.engine.hangs = True
        async with sliced(tmp_path, bad, good) as gateway:
            asked = asyncio.create_task(ask(gateway, words(2500)))
            await until(lambda: bad.engine.prompts == [1024], what="the first slice")
            await bad.kill()
            answer = await asked
            assert answer["choices"][0]["text"] == "good"
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert good.engine.prompts == [1024, 2048, 2500]
            assert good.engine.tokenized == 0, "the ids are known"
            assert bad.engine.prompts == [1024], "the request itself was not sent there"

    run(test())


def test_a_prompt_whose_slices_kill_engines_is_not_sent_to_a_third(tmp_path: Path) -> None:
    asked: list[tuple[int, bool]] = []

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            urls = []
            for number in range(3):

                async def die(
                    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int = number
                ) -> None:
                    asked.append((number, b'"max_tokens":1' in await reader.read(64)))

                urls.append(await stack.enter_async_context(raw_engine(die)))
            settings = {"plan": write_plan(tmp_path), "keys": write_keys(tmp_path)}
            engines = {f"e{number}": url for number, url in enumerate(urls)}
            gateway = await stack.enter_async_context(
                running_gateway(tmp_path, engines, **settings)
            )
            body = {"model": MODEL, "prompt": list(range(1000, 3500))}
            headers = {"Authorization": "Bearer sk-acme"}
            answer = await gateway.client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "engine_failed"
        assert len({number for number, _ in asked}) == 2
        assert all(is_slice for _, is_slice in asked), "no engine got more than its first slice"

    run(test())


def test_prefixes_beyond_the_last_known_one_are_unread() -> None:
    prefixes, prompt = ReadPrefixes(), PromptTokens.of(list(range(5000)))
    marks = prompt.marks("a", cuts(5000, SLICE))
    assert len(set(marks)) == 4
    assert prefixes.known(marks) == 0
    for mark in (marks[0], marks[1], marks[3]):
        prefixes.add(mark)
    assert prefixes.known(marks) == 2
    assert prefixes.known(PromptTokens.of(list(range(2100))).marks("a", cuts(2100, SLICE))) == 2
    assert prefixes.known(prompt.marks("b", cuts(5000, SLICE))) == 0
    prefixes.forget(marks[:1])
    assert prefixes.known(marks) == 0


@given(st.lists(st.integers(0, 200_000), min_size=2, max_size=300), st.data())
def test_a_head_holds_the_first_ids(ids: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(ids) - 1))
    answer = json.dumps({"count": len(ids), "tokens": ids, "token_strs": None}).encode()
    for prompt in (PromptTokens.of(ids), PromptTokens.in_answer(answer)):
        assert prompt is not None
        assert len(prompt) == len(ids)
        assert json.loads(b"[" + prompt.head(count) + b"]") == ids[:count]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": [1, True]},
        {"prompt": {"a": 1}},
        {"prompt": "x", "echo": True},
        {"prompt": "x", "prompt_logprobs": 0},
        {"prompt": "x", "truncate_prompt_tokens": 5},
        {"prompt": "x", "prompt_embeds": "x"},
        {},
    ],
)
def test_prompts_whose_ids_nobody_can_say_are_not_asked_for(body: dict[str, Any]) -> None:
    assert question("/v1/completions", {"model": MODEL, **body}) is None
    assert question("/v1/responses", {"model": MODEL, "input": "x"}) is None


def test_a_chat_is_asked_for_with_all_that_makes_its_prompt() -> None:
    made = {
        "model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True,
    }  # fmt: skip
    other = {"max_tokens": 5, "stream": True, "tool_choice": "auto"}
    assert question("/v1/chat/completions", made | other) == made
    assert question("/v1/chat/completions", made | {"tool_choice": "none"}) is None
