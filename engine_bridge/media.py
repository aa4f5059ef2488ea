"""Images, clips of audio and videos inside the prompts of a trace: columns, one row an item.

An item is what vLLM calls a multimodal item: its encoder runs over the whole of it at once, and its
output stands for a run of prompt tokens. This module holds and checks them; what an encoder costs
is `encoder_spec`'s, when one runs `replay.encoding`'s.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import TraceError

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

MEDIA_KINDS: Final = ("image", "audio", "video")
"""Kinds of items, as vLLM names its modalities; `MediaItems.kind` counts in this order."""
IMAGE, AUDIO, VIDEO = range(len(MEDIA_KINDS))


@dataclass(frozen=True, kw_only=True)
class MediaItems:
    """The m media items of n requests, in the order of the requests, then of their prompts."""

    offsets: LongArray
    """Request i's items lie between `offsets[i]` and the next offset, shape (n + 1,)."""
    kind: IntArray
    """Index into `MEDIA_KINDS`, shape (m,)."""
    start_tokens: IntArray
    """Prompt tokens before the item's first one, shape (m,)."""
    tokens: IntArray
    """Prompt tokens that the item takes, at least 1, shape (m,)."""
    content: IntArray
    """What it shows, as dense numbers (0..c-1): equal ones are encoded once, shape (m,)."""

    def __len__(self) -> int:
        """Number of items."""
        return len(self.kind)

    @classmethod
    def none(cls, requests: int) -> Self:
        """No items, for so many requests."""
        empty = np.zeros(0, np.int32)
        return cls(
            offsets=np.zeros(requests + 1, np.int64),
            kind=empty,
            start_tokens=empty,
            tokens=empty,
            content=empty,
        )

    @classmethod
    def one_image_each(cls, image_tokens: IntArray) -> Self:
        """One image at the head of every prompt that has image tokens; each another image.

        Args:
            image_tokens: Tokens from images by request, shape (n,).
        """
        rows = np.flatnonzero(image_tokens > 0)
        offsets = np.zeros(len(image_tokens) + 1, np.int64)
        np.cumsum(image_tokens > 0, out=offsets[1:])
        return cls(
            offsets=offsets,
            kind=np.full(len(rows), IMAGE, np.int32),
            start_tokens=np.zeros(len(rows), np.int32),
            tokens=image_tokens[rows].astype(np.int32),
            content=np.arange(len(rows), dtype=np.int32),
        )

    @property
    def request(self) -> LongArray:
        """The request of each item, shape (m,)."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def tokens_of(self, kind: int) -> IntArray:
        """Tokens that items of a kind take, by request, shape (n,)."""
        sums = np.zeros(len(self.offsets) - 1, np.int32)
        chosen = self.kind == kind
        np.add.at(sums, self.request[chosen], self.tokens[chosen])
        return sums

    def take(self, rows: npt.NDArray[np.int64]) -> Self:
        """The items of the given requests, in the given order; content numbers stay."""
        starts = self.offsets[rows]
        counts = self.offsets[rows + 1] - starts
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        index = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
        return replace(
            self,
            offsets=offsets,
            kind=self.kind[index],
            start_tokens=self.start_tokens[index],
            tokens=self.tokens[index],
            content=self.content[index],
        )

    def update_digest(self, sha: hashlib._Hash) -> None:
        """Feed every column to a hash.

        Without items it is fed what a column of image tokens would be, which is what traces had in
        their place: so their digests stay as they were.
        """
        if not len(self):
            sha.update(b"image_tokens")
            sha.update(np.zeros(len(self.offsets) - 1, np.int32).tobytes())
            return
        for name in ("offsets", "kind", "start_tokens", "tokens", "content"):
            sha.update(name.encode())
            sha.update(np.ascontiguousarray(getattr(self, name)).tobytes())

    def check(self, prompt_tokens: IntArray) -> None:
        """Refuse items that lie outside their prompts or over one another.

        Args:
            prompt_tokens: Prompt lengths, shape (n,).

        Raises:
            TraceError: with the request's row, the item, and the bound.
        """
        if self.offsets.shape != (len(prompt_tokens) + 1,):
            raise TraceError(
                "trace",
                key="media",
                value=f"offsets of shape {self.offsets.shape}",
                bound=f"({len(prompt_tokens) + 1},)",
            )
        if not len(self):
            return
        request, end = self.request, self.start_tokens.astype(np.int64) + self.tokens
        follows = np.zeros(len(self), np.bool_)
        follows[1:] = (request[1:] == request[:-1]) & (self.start_tokens[1:] < end[:-1])
        bounds = (
            (self.kind < 0) | (self.kind >= len(MEDIA_KINDS)),
            self.tokens < 1,
            self.start_tokens < 0,
            end > prompt_tokens[request],
            follows,
            self.content < 0,
        )
        words = (
            f"one of {', '.join(MEDIA_KINDS)}",
            "at least 1 token",
            "a start inside the prompt",
            "items that end inside the prompt",
            "items in the order of the prompt, none over another",
            "a content number",
        )
        for bad, bound in zip(bounds, words, strict=True):
            if bad.any():
                at = int(np.argmax(bad))
                raise TraceError(
                    f"trace row {int(request[at])}",
                    key="media",
                    value=f"{int(self.tokens[at])} tokens from {int(self.start_tokens[at])} "
                    f"in a prompt of {int(prompt_tokens[request[at]])}",
                    bound=bound,
                )
