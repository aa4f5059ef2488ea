"""Random images, clips and videos for the workloads of `parity.py`; encoders for its engines."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from trimtab.engine_bridge.encoder_spec import EncoderSpec
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.media import MEDIA_KINDS, MediaItems

LONGEST_ITEM = 400
MOST_ITEMS = 8
"""Of a request: vLLM lets go of them in the order of a Python set, which is theirs up to here."""
POPULAR = 8
"""Contents that many requests show."""


class Item(NamedTuple):
    """One item of a prompt."""

    start: int
    kind: int
    tokens: int
    content: int

    @property
    def end(self) -> int:
        """Prompt tokens up to its last one."""
        return self.start + self.tokens


class Gallery:
    """All contents of one workload; each has one kind and one size."""

    def __init__(self, rng: np.random.Generator) -> None:
        """Begin with the popular ones."""
        self._rng = rng
        self._longest = int(rng.choice([30, 120, LONGEST_ITEM]))
        self._contents: list[tuple[int, int]] = []
        for _ in range(POPULAR):
            self._new()

    def _new(self) -> int:
        size = int(np.exp(self._rng.uniform(0.0, np.log(self._longest + 1))))
        self._contents.append((int(self._rng.integers(0, len(MEDIA_KINDS))), size))
        return len(self._contents) - 1

    def place(self, first: int, last: int) -> list[Item]:
        """Items of the text between two places; none, or several that may go on beyond its end.

        Args:
            first: Prompt tokens before that text.
            last: Prompt tokens before what follows it.
        """
        rng = self._rng
        if rng.random() < 0.3:
            return []
        at = first if rng.random() < 0.4 else int(rng.integers(first, max(first, last) + 1))
        items = []
        for _ in range(int(rng.choice([1, 1, 2, 4]))):
            content = int(rng.integers(0, POPULAR)) if rng.random() < 0.4 else self._new()
            kind, tokens = self._contents[content]
            items.append(Item(at, kind, tokens, content))
            # Often one right behind the other.
            at += tokens + (0 if rng.random() < 0.5 else int(rng.integers(1, 60)))
        return items


def end_of(items: list[Item]) -> int:
    """Prompt tokens that hold these items."""
    return items[-1].end if items else 0


def columns(rows: list[list[Item]]) -> MediaItems:
    """The items of all requests, in their order."""
    flat = [item for items in rows for item in items]
    offsets = np.concatenate(([0], np.cumsum([len(items) for items in rows])))
    fields = {
        name: np.array([getattr(item, name) for item in flat], np.int32)
        for name in ("kind", "tokens", "content")
    }
    _, fields["content"] = np.unique(fields["content"], return_inverse=True)
    fields["content"] = fields["content"].astype(np.int32)
    starts = np.array([item.start for item in flat], np.int32)
    return MediaItems(offsets=offsets.astype(np.int64), start_tokens=starts, **fields)


def encoding(rng: np.random.Generator, spec: EngineSpec) -> EngineSpec:
    """The same engine with random encoders, budgets and caches; of some nothing is known."""
    if rng.random() < 0.15:
        return spec
    most = spec.max_num_batched_tokens
    return replace(
        spec,
        encoder=EncoderSpec(
            budget_tokens=None if rng.random() < 0.3 else int(rng.integers(10, most)),
            cache_tokens=None if rng.random() < 0.3 else int(rng.integers(10, 2 * most)),
            kinds=tuple(
                (
                    float(rng.choice([0.0, 0.4, 3.0])),
                    float(rng.choice([0.0, 4.0, 30.0])),
                    float(rng.choice([0.0, 20.0])),
                )
                for _ in MEDIA_KINDS
            ),
        ),
    )
