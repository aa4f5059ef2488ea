"""Reads a long prompt in growing prefixes on its engine, before the request itself goes there.

Each prefix is a completion of one token from the prompt's own token ids, under the tenant's labels,
so that its blocks are where the request will look for them. It is help, never an error: whatever
goes wrong, the request goes on as it is. Only that the engine is gone is told, as of any request.
Where prompts are cut is `engine_bridge.slicing`'s business.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from trimtab.engine_bridge.gateway import wire
from trimtab.engine_bridge.gateway.prompt_tokens import PromptTokens, question
from trimtab.engine_bridge.gateway.sse import Usage
from trimtab.engine_bridge.gateway.upstream import Fault, UpstreamError
from trimtab.engine_bridge.slicing import cuts

if TYPE_CHECKING:
    from trimtab.engine_bridge.gateway.exchange import Exchange
    from trimtab.engine_bridge.gateway.fleet import Engine

_LEAST_BYTES: Final = 2
"""Bytes of a body a token, at least: what is shorter is not tokenized to find out."""
_COMPLETIONS: Final = b"/v1/completions"
_TOKENIZE: Final = b"/tokenize"
_MOST_ANSWER_BYTES: Final = 64 << 20
_CACHED: Final = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')


@dataclass
class Sliced:
    """What slices have done for one request."""

    read: int = 0
    """Slices that an engine has answered."""
    failed: int = 0
    """Whether it went on as it was: 0 or 1 for each engine."""
    fresh_tokens: int = 0
    """Tokens that the slices computed on the engine asked last: to the client they were not
    cached."""
    found_tokens: int | None = None
    """What of the prompt was cached, by the request's own usage; None: as that says."""
    known_tokens: int = 0
    """So much of the prompt must be cached there when the request arrives."""
    marks: list[bytes] = field(default_factory=list)
    """Of its prefixes on that engine."""
    prompt: PromptTokens | None = None
    engines: set[str] = field(default_factory=set)
    """Who was asked already."""


def own_cached(data: bytes, fresh_tokens: int) -> bytes:
    """An answer's `cached_tokens` less what the request's own slices have put there."""

    def less(found: re.Match[bytes]) -> bytes:
        return b'"cached_tokens":%d' % max(0, int(found[1]) - fresh_tokens)

    return _CACHED.sub(less, data)


def take_own(exchange: Exchange) -> None:
    """Take the slices' tokens out of the cached ones in the request's usage."""
    usage, sliced = exchange.usage, exchange.sliced
    sliced.found_tokens = usage.cached_tokens
    usage.cached_tokens = max(0, usage.cached_tokens - sliced.fresh_tokens)


async def read_ahead(
    exchange: Exchange, engine: Engine, tokens_of_tier: Mapping[str, int], *, key: str | None
) -> None:
    """Send the slices of a request, if its tier has any, and wait for each.

    Args:
        exchange: The request; it notes what was done.
        engine: Where it will go.
        tokens_of_tier: `slice_tokens` of the tiers that have it.
        key: API key that the engine asks for.

    Raises:
        UpstreamError: the engine cannot be reached, or has closed the connection.
    """
    sliced, tokens = exchange.sliced, tokens_of_tier.get(exchange.tier)
    if tokens is None or len(exchange.raw) <= _LEAST_BYTES * tokens:
        return
    if engine.name in sliced.engines:
        return
    sliced.engines.add(engine.name)
    sliced.fresh_tokens = sliced.known_tokens = 0
    sliced.found_tokens = None
    sliced.marks = []
    try:
        async with asyncio.timeout(engine.client.first_byte_s):
            await _read(_Errand(exchange, engine, key), tokens)
    except TimeoutError:
        sliced.failed += 1
    except UpstreamError as error:
        sliced.failed += 1
        if error.fault in (Fault.CONNECT, Fault.CLOSED):
            raise


def settle(exchange: Exchange, engine: Engine) -> None:
    """Forget prefixes that the engine has not kept, once the request's own usage is known."""
    sliced = exchange.sliced
    found = exchange.usage.cached_tokens if sliced.found_tokens is None else sliced.found_tokens
    if engine.prefixes.tells and found < sliced.known_tokens:
        engine.prefixes.forget(sliced.marks)


class _Errand:
    """Requests of the gateway's own, under a client's labels."""

    def __init__(self, exchange: Exchange, engine: Engine, key: str | None) -> None:
        self.exchange, self.engine, self._key = exchange, engine, key

    async def post(self, path: bytes, body: bytes) -> bytes | None:
        """The answer's body; None: the engine has refused."""
        identity, client = self.exchange.identity, self.engine.client
        assert identity is not None
        head = wire.request_head(
            client, b"POST", path, self.exchange.scope["headers"], key=self._key,
            tenant=identity.tenant, tier=identity.tier, length=len(body),
            trace=self.exchange.spans.heads,
        )  # fmt: skip
        answer = await client.send(head, body)
        try:
            data = await answer.read_all(_MOST_ANSWER_BYTES)
        finally:
            answer.close()
        return data if answer.status < 300 else None


async def _read(link: _Errand, slice_tokens: int) -> None:
    sliced, prefixes = link.exchange.sliced, link.engine.prefixes
    if sliced.prompt is None:
        sliced.prompt = await _prompt(link)
    if sliced.prompt is None:
        sliced.failed += 1
        return
    identity = link.exchange.identity
    assert identity is not None
    ends = cuts(len(sliced.prompt), slice_tokens)
    sliced.marks = sliced.prompt.marks(f"{identity.tenant}\0{link.exchange.model}", ends)
    done = prefixes.known(sliced.marks)
    for number in range(done, len(ends)):
        before = ends[number - 1] if number else 0
        if not await _slice(link, sliced.prompt, before, ends[number]):
            sliced.failed += 1
            return
        prefixes.add(sliced.marks[number])
    sliced.known_tokens = ends[-1] if ends else 0


async def _prompt(link: _Errand) -> PromptTokens | None:
    """The prompt's token ids; None where nobody can say them."""
    asked = question(link.exchange.path, link.exchange.body)
    if asked is None or isinstance(asked, PromptTokens):
        return asked
    answer = await link.post(_TOKENIZE, json.dumps(asked).encode())
    return None if answer is None else PromptTokens.in_answer(answer)


async def _slice(link: _Errand, prompt: PromptTokens, before: int, end: int) -> bool:
    """Have one prefix read; False: the engine has refused."""
    model = json.dumps(link.exchange.model).encode()
    body = b'{"model":%b,"max_tokens":1,"prompt":[%b]}' % (model, prompt.head(end))
    answer = await link.post(_COMPLETIONS, body)
    if answer is None:
        return False
    sliced, cached = link.exchange.sliced, _cached_tokens(answer)
    link.engine.prefixes.tells = cached is not None
    sliced.read += 1
    sliced.fresh_tokens += max(0, end - (before if cached is None else cached))
    # Should the client leave now, this is what it has used.
    link.exchange.usage = Usage(end, max(0, end - sliced.fresh_tokens), 0)
    return True


def _cached_tokens(answer: bytes) -> int | None:
    """What a slice's answer says of the cache; None: nothing."""
    found = _CACHED.search(answer)
    return None if found is None else int(found[1])
