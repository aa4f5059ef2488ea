"""What an engine's vision and audio encoders are to the replay: limits, and what an item costs.

It holds facts and reads them from a file; when an item is encoded, `replay.encoding` decides. It
knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from trimtab.engine_bridge.media import MEDIA_KINDS, MediaItems

_MS_PER_US = 1e-3
_MS_PER_NS = 1e-6
_GRAINS_A_MS = float(1 << 20)
"""An item's time is a whole number of these (about a nanosecond each), so that the sum of a
step's is exact in whatever order an engine adds them."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class EncoderKindFile(_Part):
    """What an item of one kind costs."""

    item_ms: float = Field(default=0.0, ge=0, le=1e4)
    """Milliseconds of any item: launches, reading the encoder's weights."""
    us_per_token: float = Field(default=0.0, ge=0, le=1e6)
    """Microseconds that each of its prompt tokens costs more: the encoder's matrix work."""
    pair_ns: float = Field(default=0.0, ge=0, le=1e6)
    """Nanoseconds of each pair of its prompt tokens (their square): the encoder's attention, which
    looks both ways; 0 where it looks only around itself."""


class EncoderFile(_Part):
    """The `encoder` section of an engine file."""

    budget_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    """Most tokens of items that one step encodes, vLLM's encoder compute budget. Without it
    `max_num_batched_tokens`, as in vLLM. An item that is longer raises it, as vLLM's own does."""
    cache_tokens: int | None = Field(default=None, ge=1, le=1_073_741_824)
    """Tokens of encoded items that are kept until their part of the prompt is computed, and for
    whoever shows the same; vLLM's encoder cache. Without it as `budget_tokens`."""
    image: EncoderKindFile = EncoderKindFile()
    audio: EncoderKindFile = EncoderKindFile()
    video: EncoderKindFile = EncoderKindFile()


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """The same as a plain value."""

    budget_tokens: int | None = None
    cache_tokens: int | None = None
    kinds: tuple[tuple[float, float, float], ...] = ((0.0, 0.0, 0.0),) * len(MEDIA_KINDS)
    """By kind, in the order of `MEDIA_KINDS`: item_ms, us_per_token, pair_ns."""

    @classmethod
    def of(cls, file: EncoderFile) -> EncoderSpec:
        """The facts of a checked section."""
        parts = (file.image, file.audio, file.video)
        return cls(
            budget_tokens=file.budget_tokens,
            cache_tokens=file.cache_tokens,
            kinds=tuple((p.item_ms, p.us_per_token, p.pair_ns) for p in parts),
        )

    def as_file(self) -> EncoderFile:
        """The section of an engine file that `of` reads back."""
        parts = (
            EncoderKindFile(item_ms=once, us_per_token=us, pair_ns=ns)
            for once, us, ns in self.kinds
        )
        return EncoderFile(
            budget_tokens=self.budget_tokens,
            cache_tokens=self.cache_tokens,
            **dict(zip(MEDIA_KINDS, parts, strict=True)),
        )

    def item_ms(self, kind: int, tokens: int) -> float:
        """Milliseconds of encoding one item of a kind (see `MEDIA_KINDS`)."""
        once, us, ns = self.kinds[kind]
        ms = once + us * tokens * _MS_PER_US + ns * float(tokens) * float(tokens) * _MS_PER_NS
        return round(ms * _GRAINS_A_MS) / _GRAINS_A_MS

    def items_ms(self, items: MediaItems) -> npt.NDArray[np.float64]:
        """Milliseconds of encoding each item, float64, shape (m,)."""
        once, us, ns = np.array(self.kinds)[items.kind].reshape(-1, 3).T
        tokens = items.tokens.astype(np.float64)
        ms = once + us * tokens * _MS_PER_US + ns * tokens * tokens * _MS_PER_NS
        grains: npt.NDArray[np.float64] = np.rint(ms * _GRAINS_A_MS)
        return grains / _GRAINS_A_MS

    def limits(self, max_num_batched_tokens: int, largest_item_tokens: int) -> tuple[int, int]:
        """Tokens that one step may encode, and that the encoder cache holds.

        As vLLM reckons them (`compute_mm_encoder_budget`): each at least the largest item.
        """
        budget = self.budget_tokens or max_num_batched_tokens
        cache = self.cache_tokens or budget
        return max(budget, largest_item_tokens), max(cache, largest_item_tokens)
