"""The gateway in front of a real vLLM with the fair scheduler, on an emulated engine."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end import hostile
from tests.end_to_end.gateway_process import (
    EngineProcess,
    GatewayProcess,
    engine_process,
    gateway_process,
)
from tests.end_to_end.test_gateway_api import schemathesis
from tests.otlp_receiver import Receiver, Span, otlp_receiver
from tests.vllm_server import KEYS, Server, running, write_plan
from tests.waiting import poll

openai = pytest.importorskip("openai", reason="needs OpenAI's client")

pytestmark = pytest.mark.slow

LONGEST_PROMPT = 2000
# vLLM sends its spans every five seconds, and by gRPC, unless it is told otherwise.
TRACES_OF_VLLM = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "200",
}
SLICE_TOKENS = 8192
_TELLS = "--enable-prompt-tokens-details"


class Fleet:
    """A vLLM, a small engine in reserve, the gateway, and a collector of all their spans."""

    def __init__(
        self, gateway: GatewayProcess, vllm: Server, spare: EngineProcess, collector: Receiver
    ) -> None:
        self.gateway, self.vllm, self.spare, self.collector = gateway, vllm, spare, collector
        self._opened: list[Any] = []

    def client(self, tenant: str) -> Any:
        client = openai.AsyncOpenAI(
            base_url=f"{self.gateway.url}/v1", api_key=KEYS[tenant][0], max_retries=0, timeout=120
        )
        self._opened.append(client)
        return client

    def run(self, test: Coroutine[Any, Any, None], *, deadline_s: float = 180) -> None:
        """Run a test's coroutine and close its clients."""

        async def with_clients() -> None:
            async with asyncio.timeout(deadline_s):
                await test
            while self._opened:
                await self._opened.pop().close()

        asyncio.run(with_clients())


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("gateway")
    with ExitStack() as stack:
        collector = stack.enter_context(otlp_receiver())
        vllm = stack.enter_context(
            running(
                tmp_path_factory.mktemp("vllm"),
                _TELLS,
                *("--otlp-traces-endpoint", f"{collector.url}/v1/traces"),
                env=TRACES_OF_VLLM,
                trust_labels=True,
                odd_requests=True,
            )
        )
        spare = stack.enter_context(engine_process("spare", token_s=0.002))
        (folder / "keys.yaml").write_text(yaml.safe_dump({
            tenant: {"tier": tier, "keys_sha256": [hashlib.sha256(key.encode()).hexdigest()]}
            for tenant, (key, tier) in KEYS.items()
        }))  # fmt: skip
        (folder / "admission.yaml").write_text(
            yaml.safe_dump(
                {
                    "tiers": {"T3": {"max_prompt_tokens": LONGEST_PROMPT}},
                    "tenants": {"odd": {"longest_output_tokens": 4, "concurrent_requests": 4}},
                }
            )
        )
        plan = yaml.safe_load(write_plan(folder).read_text())
        plan["tiers"]["T0"]["slice_tokens"] = SLICE_TOKENS
        (folder / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
        settings: dict[str, Any] = {
            "plan": "plan.yaml",
            "keys": "keys.yaml",
            "admission": "admission.yaml",
            "usage_dir": "usage",
            "engines": {
                "vllm": {
                    "url": vllm.url,
                    "models": [vllm.model],
                    "step_times": "h100:llama-3.1-70b-tp8",
                },
                "spare": {"url": spare.url, "models": [vllm.model], "reserve": True},
            },
            "reserve_tiers": ["T0", "T3"],
            "probes": {"every_s": 0.5},
            "traces": {"endpoint": collector.url, "sampled_fraction": 1.0},
        }
        gateway = stack.enter_context(gateway_process(folder, settings))
        yield Fleet(gateway, vllm, spare, collector)


def test_answers_come_whole_streamed_and_not(fleet: Fleet) -> None:
    async def test() -> None:
        client, model = fleet.client("acme"), fleet.vllm.model
        messages = [{"role": "user", "content": "Tell me something."}]
        whole = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=20, extra_body={"ignore_eos": True}
        )
        assert whole.usage.completion_tokens == 20
        stream = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=20, stream=True
        )
        events = [event async for event in stream]
        assert all(event.choices and event.usage is None for event in events)
        said = "".join(event.choices[0].delta.content or "" for event in events)
        assert said == whole.choices[0].message.content
        completion = await client.completions.create(model=model, prompt="Once", max_tokens=7)
        assert completion.usage.completion_tokens == 7
        assert [card.id async for card in await client.models.list()] == [model]

    fleet.run(test())


def test_labels_reach_the_scheduler_and_claims_do_not(fleet: Fleet) -> None:
    name = "trimtab_requests_total"

    def finished(tier: str) -> float:
        import httpx

        page = httpx.get(f"{fleet.vllm.url}/metrics", timeout=10).text
        lines = [line for line in page.splitlines() if line.startswith(f"{name}{{")]
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if f'tier="{tier}"' in line and 'outcome="finished"' in line
        )

    async def test() -> None:
        client = fleet.client("crowd")
        lies = {"priority": -9, "vllm_xargs": {"trimtab_tier": "T0", "trimtab_tenant": "acme"}}
        for _ in range(3):
            answer = await client.completions.create(
                model=fleet.vllm.model, prompt="x", max_tokens=3, extra_body=lies,
                extra_headers={"X-Trimtab-Tier": "T0"},
            )  # fmt: skip
            assert answer.usage.completion_tokens == 3

    before = finished("T0"), finished("T3")
    fleet.run(test())
    poll(lambda: finished("T3") == before[1] + 3, what="three requests of T3")
    assert finished("T0") == before[0]


def test_a_prompt_over_the_tiers_length_is_refused_before_the_scheduler(fleet: Fleet) -> None:
    async def test() -> None:
        client, model = fleet.client("crowd"), fleet.vllm.model
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model=model, prompt="word " * 4000, max_tokens=3)
        assert caught.value.status_code == 413
        assert caught.value.body["code"] == "prompt_too_long"
        other = await fleet.client("acme").completions.create(
            model=model, prompt="word " * 4000, max_tokens=3
        )
        assert other.usage.completion_tokens == 3

    fleet.run(test())


def test_a_long_prompt_finds_its_slices_cached_and_costs_as_one_request(fleet: Fleet) -> None:
    def cached() -> float:
        import httpx

        page = httpx.get(f"{fleet.vllm.url}/metrics", timeout=10).text
        lines = [line for line in page.splitlines() if line.startswith("vllm:prefix_cache_hits")]
        return sum(float(line.rpartition(" ")[2]) for line in lines if "_created" not in line)

    def slices() -> float:
        return fleet.gateway.metric("trimtab_gateway_slices_total", tier="T0", result="read")

    async def test() -> None:
        client, model = fleet.client("acme"), fleet.vllm.model
        text = " ".join(f"{number} bako mire" for number in range(6000))
        messages = [{"role": "user", "content": text}]
        before, read = cached(), slices()
        stream = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=9, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        usage = [event.usage async for event in stream][-1]
        assert usage.completion_tokens == 9
        number = usage.prompt_tokens // SLICE_TOKENS
        assert number >= 2
        assert slices() - read == number
        assert fleet.gateway.metric("trimtab_gateway_slices_total", result="failed") == 0
        # Every slice but the first, and the request, found all of the one before.
        found = SLICE_TOKENS * number * (number + 1) // 2
        assert cached() - before == found
        # The client is told of its own: nothing of it was cached before.
        assert usage.prompt_tokens_details.cached_tokens == 0
        messages += [
            {"role": "assistant", "content": "bako"}, {"role": "user", "content": "and now?"},
        ]  # fmt: skip
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=5)
        assert answer.usage.prompt_tokens_details.cached_tokens > SLICE_TOKENS * number
        assert slices() - read == number

    fleet.run(test())


def test_a_client_that_leaves_ends_its_request_in_the_engine(fleet: Fleet) -> None:
    def running_now() -> float:
        import httpx

        page = httpx.get(f"{fleet.vllm.url}/metrics", timeout=10).text
        lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def test() -> None:
        stream = await fleet.client("acme").chat.completions.create(
            model=fleet.vllm.model, messages=[{"role": "user", "content": "x"}],
            max_tokens=60_000, stream=True, extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for _ in stream:
            break
        await asyncio.to_thread(poll, lambda: running_now() == 1, what="it runs")
        await stream.close()

    fleet.run(test())
    poll(lambda: running_now() == 0, what="it has ended", deadline_s=20)


def test_the_engines_own_span_hangs_below_the_gateways(fleet: Fleet) -> None:
    # The client's own words on its trace are linked and no more.
    theirs = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
    linked = [tuple(theirs.split("-")[1:3])]

    async def test() -> None:
        client, model = fleet.client("acme"), fleet.vllm.model
        for stream in (False, True):
            answer = await client.completions.create(
                model=model, prompt="secret", max_tokens=7, stream=stream,
                extra_headers={"traceparent": theirs},
            )  # fmt: skip
            if stream:
                async for _ in answer:
                    pass

    def traced() -> list[tuple[Span, list[Span], list[Span]]]:
        servers = [one for one in fleet.collector.spans if one.links == linked]
        attempts = [fleet.collector.below(server)[-1:] for server in servers]
        return [
            (server, attempt, fleet.collector.below(attempt[0]))
            for server, attempt in zip(servers, attempts, strict=True)
            if attempt
        ]

    fleet.run(test())
    poll(
        lambda: len(traced()) == 2 and all(engines for _, _, engines in traced()),
        what="two traces with a span of the engine",
    )
    for server, (attempt,), (engine,) in traced():
        assert (server.name, server.kind) == ("POST /v1/completions", "SERVER")
        assert [one.name for one in fleet.collector.below(server)] == [
            "admission", f"text_completion {fleet.vllm.model}",
        ]  # fmt: skip
        assert (engine.name, engine.kind) == ("llm_request", "SERVER")
        assert engine.attributes["gen_ai.usage.completion_tokens"] == 7
        assert server.attributes["gen_ai.usage.output_tokens"] == 7
        assert attempt.attributes["trimtab.engine"] == "vllm"
        assert attempt.began_ns <= engine.began_ns <= attempt.ended_ns
    assert "secret" not in str(fleet.collector.spans)


def arrivals(fleet: Fleet) -> dict[str, float]:
    """Requests that the engine has had, by tier."""
    import httpx

    page = httpx.get(f"{fleet.vllm.url}/metrics", timeout=10).text
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith("trimtab_arrivals_total{"):
            tier = line.partition('tier="')[2].partition('"')[0]
            found[tier] = found.get(tier, 0.0) + float(line.rpartition(" ")[2])
    return found


def test_odd_requests_reach_the_engine_labelled_or_not_at_all(fleet: Fleet, tmp_path: Path) -> None:
    """Each claims to be T1's; who asks is T2's."""
    import httpx

    key, model = KEYS["odd"][0], fleet.vllm.model
    before = arrivals(fleet)
    engines_own = []
    with httpx.Client(base_url=fleet.gateway.url, timeout=60) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
            for body, headers in hostile.fixed_bodies(model, large=False):
                sent = {"Authorization": f"Bearer {key}", **headers}
                encoded = {name: value.encode("latin-1") for name, value in sent.items()}
                answer = client.post(path, content=body, headers=encoded)
                if hostile.harmless(answer.status_code, answer.content):
                    engines_own.append((path, body[:200], answer.text))
    schemathesis(
        tmp_path, fleet.gateway, model, "--max-examples", "4", key=key,
        without="not_a_server_error,status_code_conformance,response_schema_conformance",
    )  # fmt: skip
    poll(lambda: arrivals(fleet)["T2"] > before.get("T2", 0.0) + 20, what="they arrive as T2's")
    after = arrivals(fleet)
    assert {tier: after[tier] for tier in ("T0", "T1", "T3")} == {
        tier: before.get(tier, 0.0) for tier in ("T0", "T1", "T3")
    }
    assert fleet.gateway.metric("trimtab_gateway_refusals_total", code="internal_error") == 0
    assert not engines_own, engines_own


def test_a_killed_vllm_loses_no_request_without_a_token(fleet: Fleet) -> None:
    """The last test: the vLLM is gone after it."""
    broken: list[str] = []
    whole: list[str] = []
    tokens = 400

    async def ask(client: Any, number: int) -> None:
        messages = [{"role": "user", "content": f"{number} tokens={tokens}"}]
        if number % 3 == 0:
            answer = await client.chat.completions.create(
                model=fleet.vllm.model, messages=messages, max_tokens=tokens,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            assert answer.usage.completion_tokens == tokens
            whole.append(answer.choices[0].message.content)
            return
        stream = await client.chat.completions.create(
            model=fleet.vllm.model, messages=messages, max_tokens=tokens, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        said = ""
        try:
            async for event in stream:
                said += event.choices[0].delta.content or ""
        except openai.APIError:
            assert said, "nothing may be lost before its first token"
            broken.append(said)
            return
        assert len(said.split()) == tokens
        whole.append(said)

    async def load() -> None:
        clients = [fleet.client("acme"), fleet.client("crowd")]
        asked = [asyncio.create_task(ask(clients[n % 2], n)) for n in range(60)]
        while fleet.gateway.metric("trimtab_gateway_in_flight", engine="vllm") < 30:
            await asyncio.sleep(0.01)
        os.killpg(fleet.vllm.process.pid, signal.SIGKILL)
        await asyncio.gather(*asked)

    fleet.run(load())
    assert len(whole) + len(broken) == 60
    assert any("spare" in said for said in whole)
    assert fleet.gateway.metric("trimtab_gateway_retries_total", engine="vllm") > 0
    poll(lambda: any(map(_was_saved, fleet.collector.spans)), what="the span of a saved request")
    saved = next(filter(_was_saved, fleet.collector.spans))
    attempts = [one for one in fleet.collector.below(saved) if one.kind == "CLIENT"]
    assert attempts[0].attributes["trimtab.engine"] == "vllm"
    assert attempts[0].failed
    assert attempts[-1].attributes["trimtab.engine"] == "spare"
    assert not attempts[-1].failed


def _was_saved(span: Span) -> bool:
    """Whether it is of a request that another engine has taken over."""
    return bool(span.attributes.get("trimtab.retries")) and not span.failed
