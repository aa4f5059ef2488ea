"""Reads a long prompt in growing prefixes on its engine, before the request itself goes there.

Each prefix is a completion of one token from the prompt's own token ids, under the tenant's labels,
so that its blocks are where the request will look for them. It is help, never an error: whatever
goes wrong, the request goes on as it is. Only that the engine is gone is told, as of any request.
Where prompts are cut is `engine_bridge.slicing`'s business.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from trimtab.engine_bridge.admission.core import Outcome
from trimtab.engine_bridge.gateway import wire
from trimtab.engine_bridge.gateway.prompt_tokens import (
    PromptTokens,
    answer_tokens,
    max_model_len,
    question,
)
from trimtab.engine_bridge.gateway.sliced import OnEngine, cached_tokens
from trimtab.engine_bridge.gateway.sse import Usage
from trimtab.engine_bridge.gateway.upstream import Fault, UpstreamError
from trimtab.engine_bridge.slicing import ALIGN_TOKENS, cuts

if TYPE_CHECKING:
    from trimtab.engine_bridge.gateway.exchange import Exchange
    from trimtab.engine_bridge.gateway.fleet import Engine

_LEAST_BYTES: Final = 2
"""Bytes of a body a token, at least: what is shorter is not tokenized to find out."""
_MOST_BYTES: Final = 8 << 20
"""A longer body goes whole: its ids would hold up the event loop and everybody on it."""
_COMPLETIONS: Final = b"/v1/completions"
_TOKENIZE: Final = b"/tokenize"
_MOST_IDS_BYTES: Final = 16 << 20
_MOST_ANSWER_BYTES: Final = 1 << 20


async def read_ahead(
    exchange: Exchange,
    engine: Engine,
    tokens_of_tier: Mapping[str, int],
    *,
    key: str | None,
    now_s: float,
    answered: Callable[[], None],
) -> None:
    """Send the slices of a request, if its tier has any, and wait for each.

    Args:
        exchange: The request; it notes what was done. Its usage stays untouched but where its
            client leaves meanwhile.
        engine: Where it will go.
        tokens_of_tier: `slice_tokens` of the tiers that have it.
        key: API key that the engine asks for.
        now_s: The event loop's time.
        answered: Called once the engine has answered a slice: it works.

    Raises:
        UpstreamError: the engine cannot be reached, or has closed the connection.
    """
    sliced, tokens = exchange.sliced, tokens_of_tier.get(exchange.tier)
    if tokens is None or not _LEAST_BYTES * tokens < len(exchange.raw) <= _MOST_BYTES:
        return
    if exchange.engine in sliced.engines or engine.prefixes.is_paused(now_s):
        return
    asked: Mapping[str, object] | PromptTokens | None = sliced.prompt
    if asked is None:
        asked = question(exchange.path, exchange.body)
    if asked is None:
        return
    here = sliced.engines[exchange.engine] = OnEngine()
    link = _Errand(exchange, engine, key)
    try:
        async with asyncio.timeout(engine.client.first_byte_s):
            if not await _read(link, here, asked, tokens, answered):
                sliced.failed += 1
    except TimeoutError:
        sliced.failed += 1
    except UpstreamError as error:
        sliced.failed += 1
        if error.fault in (Fault.CONNECT, Fault.CLOSED):
            raise
    except asyncio.CancelledError:
        # The client leaves: this is what it has used.
        exchange.usage = here.usage
        raise


def settle(exchange: Exchange, engine: Engine, now_s: float) -> None:
    """Learn from the request's own usage what the engine has kept of its prefixes.

    What lies a slice or more beyond is forgotten. Less is no sign: engines keep whole blocks only,
    and with some draft models one block less.
    """
    sliced, usage = exchange.sliced, exchange.usage
    here = sliced.on(exchange.engine)
    ends, marks = here.ends, here.marks
    here.ends, here.marks = [], []
    told = usage.prompt_tokens is not None and exchange.outcome is Outcome.FINISHED
    if not (ends and told and engine.prefixes.tells):
        return
    found = usage.cached_tokens if here.found_tokens is None else here.found_tokens
    lost = [mark for mark, end in zip(marks, ends, strict=True) if end - found >= ends[0]]
    engine.prefixes.forget(lost)
    if here.usage.prompt_tokens is not None and 2 * found < ends[0]:
        sliced.missed += 1
        engine.prefixes.pause(now_s)


class _Errand:
    """Requests of the gateway's own, under a client's labels."""

    def __init__(self, exchange: Exchange, engine: Engine, key: str | None) -> None:
        self.exchange, self.engine, self._key = exchange, engine, key

    async def post(
        self, path: bytes, body: bytes, most_bytes: int = _MOST_ANSWER_BYTES
    ) -> bytes | None:
        """The answer's body; None: the engine has refused."""
        identity, client = self.exchange.identity, self.engine.client
        assert identity is not None
        head = wire.request_head(
            client, b"POST", path, self.exchange.scope["headers"], key=self._key,
            tenant=identity.tenant, tier=identity.tier, is_slice=path == _COMPLETIONS,
            length=len(body), trace=self.exchange.spans.heads,
        )  # fmt: skip
        answer = await client.send(head, body)
        try:
            data = await answer.read_all(most_bytes)
        finally:
            answer.close()
        return data if answer.status < 300 else None


async def _read(
    link: _Errand,
    here: OnEngine,
    asked: Mapping[str, object] | PromptTokens,
    slice_tokens: int,
    answered: Callable[[], None],
) -> bool:
    """Have all prefixes read that are not known; False: the engine has refused."""
    exchange, prefixes = link.exchange, link.engine.prefixes
    prompt = asked if isinstance(asked, PromptTokens) else await _prompt(link, asked)
    if prompt is None:
        return False
    exchange.sliced.prompt = prompt
    if not _fits(exchange, prompt, prefixes.longest_tokens.get(exchange.model)):
        return True
    identity = exchange.identity
    assert identity is not None
    here.ends = cuts(len(prompt), slice_tokens)
    here.marks = prompt.marks(f"{identity.tenant}\0{exchange.model}", here.ends)
    for number in range(prefixes.known(here.marks), len(here.ends)):
        if not await _slice(link, here, prompt, number):
            return False
        prefixes.add(here.marks[number])
        answered()
    return True


async def _prompt(link: _Errand, asked: Mapping[str, object]) -> PromptTokens | None:
    """The prompt's token ids, from the engine; None: it does not say them."""
    async with link.engine.tokenizing:
        answer = await link.post(_TOKENIZE, json.dumps(asked).encode(), _MOST_IDS_BYTES)
    if answer is None:
        return None
    longest = max_model_len(answer)
    if longest is not None:
        link.engine.prefixes.longest_tokens[link.exchange.model] = longest
    return PromptTokens.in_answer(answer)


def _fits(exchange: Exchange, prompt: PromptTokens, longest_tokens: int | None) -> bool:
    """Whether the engine will take the request; slices of one that it refuses are for nothing."""
    if longest_tokens is None:
        return True
    return len(prompt) + max(1, answer_tokens(exchange.path, exchange.body)) <= longest_tokens


async def _slice(link: _Errand, here: OnEngine, prompt: PromptTokens, number: int) -> bool:
    """Have one prefix read; False: the engine has refused."""
    end, before = here.ends[number], here.ends[number - 1] if number else 0
    model = json.dumps(link.exchange.model).encode()
    body = b'{"model":%b,"max_tokens":1,"prompt":[%b]}' % (model, prompt.head(end))
    answer = await link.post(_COMPLETIONS, body)
    if answer is None:
        return False
    cached = cached_tokens(answer)
    link.engine.prefixes.tells = cached is not None
    link.exchange.sliced.read += 1
    found = before if cached is None else cached
    if here.cached_before is None and end - found > ALIGN_TOKENS:
        here.cached_before = found
    here.usage = Usage(end, found if here.cached_before is None else here.cached_before, 0)
    return True
