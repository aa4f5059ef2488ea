"""What slices have done for one request, and how its client and its accounts see none of it.

Slices are sent in `slices`; nothing is sent here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from trimtab.engine_bridge.gateway.prompt_tokens import PromptTokens
from trimtab.engine_bridge.gateway.sse import Usage

if TYPE_CHECKING:
    from trimtab.engine_bridge.gateway.exchange import Exchange

_CACHED: Final = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')


@dataclass
class OnEngine:
    """What slices have done on one engine."""

    cached_before: int | None = None
    """Tokens of the prompt that were cached before they came; None: all that they have read, but
    for the last blocks, which an engine always computes."""
    found_tokens: int | None = None
    """What of the prompt was cached, by the request's own usage; None: as that says."""
    ends: list[int] = field(default_factory=list)
    """Lengths of the prompt's prefixes, tokens."""
    marks: list[bytes] = field(default_factory=list)
    """Their marks."""
    usage: Usage = field(default_factory=Usage)
    """What they have read, should the request itself read nothing."""


@dataclass
class Sliced:
    """What slices have done for one request."""

    read: int = 0
    """Slices that an engine has answered."""
    failed: int = 0
    """Whether it went on as it was: 0 or 1 for each engine."""
    missed: int = 0
    """Whether it did not find what its own slices had read."""
    prompt: PromptTokens | None = None
    engines: dict[str, OnEngine] = field(default_factory=dict)
    """Who was asked already, by name."""

    def on(self, engine: str) -> OnEngine:
        """What was done on an engine; on one that got no slices nothing."""
        return self.engines.get(engine) or OnEngine()


def cached_tokens(answer: bytes) -> int | None:
    """What an answer says of the cache; None: nothing."""
    found = _CACHED.search(answer)
    return None if found is None else int(found[1])


def own_cached(data: bytes, cached_before: int) -> bytes:
    """An answer's `cached_tokens` without what the request's own slices have put there."""

    def less(found: re.Match[bytes]) -> bytes:
        return b'"cached_tokens":%d' % min(int(found[1]), cached_before)

    return _CACHED.sub(less, data)


def take_own(exchange: Exchange) -> None:
    """Take the slices' tokens out of the cached ones in the request's usage."""
    usage, here = exchange.usage, exchange.sliced.on(exchange.engine)
    here.found_tokens = usage.cached_tokens
    if here.cached_before is not None:
        usage.cached_tokens = min(usage.cached_tokens, here.cached_before)
