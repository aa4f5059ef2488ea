"""What a tenant's past requests say about its next one: tokens a byte, length of the answer.

Estimates only: they are reserved until the request's own figures are known.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import Final

from trimtab.engine_bridge.admission.breaker import MOST_TENANTS

_REMEMBERED: Final = 64
_QUANTILE: Final = 0.9
"""Part of the past answers that a reservation without `max_tokens` would have covered."""
_UNKNOWN_DENSITY: Final = 1.0
"""Tokens a byte that no byte-level tokenizer exceeds."""


class _Past:
    __slots__ = ("densities", "outputs")

    def __init__(self) -> None:
        self.densities: deque[float] = deque(maxlen=_REMEMBERED)
        self.outputs: deque[int] = deque(maxlen=_REMEMBERED)


class History:
    """The past of all tenants, each one's own."""

    def __init__(self, initial_output_tokens: int) -> None:
        """Start without any past.

        Args:
            initial_output_tokens: Length of a tenant's first answer.
        """
        self._initial_output_tokens = initial_output_tokens
        self._of: OrderedDict[str, _Past] = OrderedDict()

    def prompt_tokens(self, tenant: str, text_bytes: int) -> int:
        """Tokens of so much text, at the highest density that the tenant has lately had."""
        past = self._of.get(tenant)
        density = max(past.densities) if past is not None and past.densities else _UNKNOWN_DENSITY
        return math.ceil(density * text_bytes)

    def output_tokens(self, tenant: str) -> int:
        """Length that nine of ten of its answers have not exceeded."""
        past = self._of.get(tenant)
        if past is None or not past.outputs:
            return self._initial_output_tokens
        ordered = sorted(past.outputs)
        return max(1, ordered[min(len(ordered) - 1, math.ceil(_QUANTILE * len(ordered)) - 1)])

    def learn_prompt(self, tenant: str, text_bytes: int, tokens: int) -> None:
        """A prompt was counted."""
        if text_bytes > 0:
            density = min(_UNKNOWN_DENSITY, max(0, tokens) / text_bytes)
            self._past(tenant).densities.append(density)

    def learn_output(self, tenant: str, tokens: int) -> None:
        """An answer that ended by itself had so many tokens."""
        self._past(tenant).outputs.append(tokens)

    def _past(self, tenant: str) -> _Past:
        past = self._of.get(tenant)
        if past is None:
            past = self._of[tenant] = _Past()
            if len(self._of) > MOST_TENANTS:
                self._of.popitem(last=False)
        self._of.move_to_end(tenant)
        return past
