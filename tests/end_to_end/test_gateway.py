"""A fleet behind the gateway, used by OpenAI's own client, while an engine is killed."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.gateway_process import (
    EngineProcess,
    GatewayProcess,
    engine_process,
    gateway_process,
)

openai = pytest.importorskip("openai", reason="needs OpenAI's client")

MODEL = "m"
AT_ONCE = 48


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[GatewayProcess, list[EngineProcess]]]:
    """Three engines and a gateway in front."""
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_process(name)) for name in "abc"]
        settings: dict[str, Any] = {
            "engines": {one.name: {"url": one.url, "models": [MODEL]} for one in engines},
            "probes": {"every_s": 0.2},
            "usage_dir": "usage",
        }
        gateway = stack.enter_context(gateway_process(tmp_path, settings))
        yield gateway, engines


class Asker:
    """Asks for many answers at once; notes what became of each."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.client = openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60
        )
        self.gate = asyncio.Semaphore(AT_ONCE)
        self.broken_after_token = 0
        self.streamed: dict[int, str] = {}
        self.whole: dict[int, str] = {}

    async def ask(self, number: int) -> None:
        """A stream for even numbers, a whole answer for odd ones; the engine's name is in each."""
        tokens = 5 + number % 20
        messages = [{"role": "user", "content": f"question {number} tokens={tokens}"}]
        async with self.gate:
            if number % 2:
                answer = await self.client.chat.completions.create(model=MODEL, messages=messages)
                self.whole[number] = answer.choices[0].message.content
                assert answer.usage.completion_tokens == tokens
                check(self.whole[number], tokens)
                return
            stream = await self.client.chat.completions.create(
                model=MODEL, messages=messages, stream=True
            )
            said = ""
            try:
                async for event in stream:
                    for choice in event.choices:
                        said += choice.delta.content or ""
            except openai.APIError:
                # Only who had already read a token may learn of an engine's end.
                assert said
                self.broken_after_token += 1
                return
            self.streamed[number] = said
            check(said, tokens)


def check(said: str, tokens: int) -> None:
    """The whole answer of one engine, once."""
    words = said.split()
    assert [word[1:] for word in words] == [str(n) for n in range(tokens)]
    assert len({word[0] for word in words}) == 1


def test_no_request_is_lost_that_had_no_token_yet_and_none_comes_twice(
    fleet: tuple[GatewayProcess, list[EngineProcess]],
) -> None:
    gateway, engines = fleet
    requests = 400

    async def load() -> Asker:
        asker = Asker(gateway)
        asked = [asyncio.create_task(asker.ask(number)) for number in range(requests)]
        while len(asker.streamed) + len(asker.whole) < requests // 4:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(engines[0].kill)
        await asyncio.gather(*asked)
        return asker

    asker = asyncio.run(asyncio.wait_for(load(), 120))
    done = len(asker.streamed) + len(asker.whole)
    assert len(asker.whole) == requests // 2, "no whole answer is lost"
    assert done + asker.broken_after_token == requests
    assert 0 < asker.broken_after_token <= AT_ONCE, "the load ran when the engine ended"
    names = Counter(said[0] for said in (*asker.streamed.values(), *asker.whole.values()))
    assert set(names) == {"a", "b", "c"}
    # Every answer was made once: what the living engines finished is what their clients read.
    for engine in engines[1:]:
        counts = engine.counts()
        assert counts["finished"] == names[engine.name]
        assert counts["begun"] == counts["finished"]
    assert gateway.metric("trimtab_gateway_requests_total") == requests
    assert gateway.metric("trimtab_gateway_retries_total", engine="a") > 0
    assert gateway.metric("trimtab_gateway_engine_state", engine="a", state="out") == 1


def test_a_stop_under_load_ends_every_stream_well(
    fleet: tuple[GatewayProcess, list[EngineProcess]],
) -> None:
    gateway, _ = fleet

    async def load() -> Asker:
        asker = Asker(gateway)
        asked = [asyncio.create_task(asker.ask(number)) for number in range(AT_ONCE)]
        while gateway.metric("trimtab_gateway_open_requests") < AT_ONCE // 2:
            await asyncio.sleep(0.01)
        gateway.process.send_signal(signal.SIGTERM)
        done = await asyncio.gather(*asked, return_exceptions=True)
        # Who had no connection yet finds nobody; nobody is cut off.
        lost = [one for one in done if one is not None]
        assert all(isinstance(one, openai.APIConnectionError) for one in lost), lost
        return asker

    asker = asyncio.run(asyncio.wait_for(load(), 60))
    assert asker.broken_after_token == 0
    assert len(asker.streamed) + len(asker.whole) >= AT_ONCE // 2


def test_engines_change_under_load_and_nothing_is_lost(
    fleet: tuple[GatewayProcess, list[EngineProcess]],
) -> None:
    gateway, engines = fleet

    async def load() -> Asker:
        asker = Asker(gateway)
        asked = [asyncio.create_task(asker.ask(number)) for number in range(200)]
        for kept in (engines[:1], engines[1:], engines):
            await asyncio.sleep(0.1)
            settings = {
                "listen": gateway.url.removeprefix("http://"),
                "admin": gateway.admin.removeprefix("http://"),
                "engines": {one.name: {"url": one.url, "models": [MODEL]} for one in kept},
                "usage_dir": "usage",
            }
            await asyncio.to_thread(gateway.change, settings)
        await asyncio.gather(*asked)
        return asker

    asker = asyncio.run(asyncio.wait_for(load(), 120))
    assert asker.broken_after_token == 0
    assert len(asker.streamed) + len(asker.whole) == 200
