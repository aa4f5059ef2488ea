"""How long a prompt is: by its bytes where they are enough, by the real tokenizer where not.

A byte-level tokenizer never has more tokens than bytes, so most prompts need no counting.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from trimtab.engine_bridge.admission import refusal
from trimtab.engine_bridge.admission.asked import Asked
from trimtab.engine_bridge.admission.bounds import FRESH_PRICE, Bounds
from trimtab.engine_bridge.admission.counting import TokenCounter, counted
from trimtab.engine_bridge.admission.history import History
from trimtab.engine_bridge.admission.media import MediaCost, without_media
from trimtab.engine_bridge.admission.refusal import Refusal
from trimtab.engine_bridge.plan.section import LARGEST_COUNT

_MOST_BYTES_PER_TOKEN: Final = 16
"""No text has so many bytes a token on average: above it a prompt is too long without counting."""
_TYPICAL_BYTES_PER_TOKEN: Final = 4
_WORTH_COUNTING: Final = 8
"""A prompt that may take more than this part of its quota is counted before it is charged."""


class Lengths:
    """The lengths of prompts, as well as they can be known before the engine has seen them."""

    def __init__(self, counter: TokenCounter, history: History) -> None:
        """Say who counts, and what is known of the tenants."""
        self._counter = counter
        self._history = history

    async def prompt_tokens(
        self, asked: Asked, bounds: Bounds, media: MediaCost, *, template_tokens: int
    ) -> int | Refusal:
        """What to reserve for the prompt, tokens; a refusal if it is longer than it may be."""
        text_bytes = max(0, asked.body_bytes - media.characters)
        most = text_bytes + template_tokens
        guess = min(most, self._history.prompt_tokens(asked.identity.tenant, text_bytes))
        exact: int | None = None
        longest = bounds.longest_prompt
        if longest is not None and most + media.tokens > longest:
            room = longest - media.tokens
            if text_bytes > room * _MOST_BYTES_PER_TOKEN:
                return refusal.too_long(longest, by_prefill=bounds.by_prefill)
            exact = await self._count(asked, media)
            # Where nobody can count, a typical prompt of that length decides.
            typical = min(guess, text_bytes // _TYPICAL_BYTES_PER_TOKEN)
            if (typical if exact is None else exact) > room:
                return refusal.too_long(longest, by_prefill=bounds.by_prefill)
        if exact is None and _is_large(guess + media.tokens, bounds):
            exact = await self._count(asked, media)
        if exact is not None:
            return exact + media.tokens
        # An estimate alone refuses nobody for good.
        least = text_bytes // _MOST_BYTES_PER_TOKEN + media.tokens
        return max(least, min(guess + media.tokens, _most_charged(bounds)))

    async def _count(self, asked: Asked, media: MediaCost) -> int | None:
        if media.tokens:
            asked = replace(asked, body=without_media(asked.body))
        return await counted(self._counter, asked)


def _is_large(tokens: int, bounds: Bounds) -> bool:
    """Whether a prompt may take so much of a quota that an estimate will not do."""
    in_prompt = bounds.prompt is not None and tokens * _WORTH_COUNTING > bounds.prompt.limit
    price = tokens * FRESH_PRICE * _WORTH_COUNTING
    return in_prompt or (bounds.budget is not None and price > bounds.budget.limit)


def _most_charged(bounds: Bounds) -> int:
    """The longest prompt that the quotas could hold, tokens."""
    by_prompt = LARGEST_COUNT if bounds.prompt is None else bounds.prompt.limit
    by_budget = LARGEST_COUNT if bounds.budget is None else bounds.budget.limit // FRESH_PRICE
    return min(by_prompt, by_budget)
