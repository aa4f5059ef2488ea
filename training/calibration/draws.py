"""Draws the steps that a fit to kernel tables is made on: random batches within an engine's limits.

It knows sizes only; what such a step costs is the tables' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from trimtab.training.calibration.table import FloatArray, StepTable

_DECODE, _PREFILL, _MIXED = 0, 1, 2
_SHARES: Final = (0.45, 0.1, 0.45)
_FEWEST_CHUNK: Final = 16


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a batch of the engine can hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    typical_context_tokens: float = 1024.0
    """Mean context of a decoding request; steps are drawn from a quarter of it to four times it."""
    engines: int = 1
    """Data-parallel engines in lock step; the limits are those of all together."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of decodes with a mean context, beside at most one chunk; shape (n,) each."""

    decodes: FloatArray
    context: FloatArray
    """Mean context of a decode, tokens."""
    chunk: FloatArray
    prefix: FloatArray
    """Tokens of the chunk's request that are computed already."""

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.decodes)


def draw_steps(limits: Limits, rng: np.random.Generator, rows: int) -> Steps:
    """Random steps: 45 % decode, 10 % prefill, 45 % mixed.

    Sizes are uniform in their logarithm in one half of the rows and uniform in the other, so that
    small batches and full ones both count. Three chunks of four follow no cached token.
    """
    kind = rng.choice(3, rows, p=_SHARES)
    decodes = _up_to(rng, np.full(rows, float(limits.max_num_seqs)))
    # The mean of many contexts strays less from the typical one than a single context.
    spread = np.log(2.0 + 2.0 / np.sqrt(decodes)) * rng.uniform(-1.0, 1.0, rows)
    context = np.round(limits.typical_context_tokens * np.exp(spread))
    context = np.clip(context, 1.0, max(limits.kv_tokens, 1.0))
    decodes = np.minimum(decodes, np.floor(limits.kv_tokens / context))
    decodes = np.where(kind == _PREFILL, 0.0, decodes)
    room = np.maximum(limits.max_num_batched_tokens - decodes, _FEWEST_CHUNK)
    chunk = _FEWEST_CHUNK - 1 + _up_to(rng, room - _FEWEST_CHUNK + 1)
    chunk = np.where(kind == _DECODE, 0.0, chunk)
    longest = max(4.0 * limits.typical_context_tokens, 1.0)
    prefix = _up_to(rng, np.full(rows, longest))
    prefix = np.where((kind == _DECODE) | (rng.random(rows) < 0.75), 0.0, prefix)
    context = np.where(decodes > 0, context, 0.0)
    return Steps(decodes=decodes, context=context, chunk=chunk, prefix=prefix)


def as_table(
    steps: Steps,
    *,
    linear_ms: FloatArray,
    prefill_ms: FloatArray,
    decode_ms: FloatArray,
    source: str = "",
) -> StepTable:
    """The steps with their times, split into the model's three parts."""
    with_chunk = (steps.chunk > 0).astype(np.float64)
    region = np.where(steps.chunk > 0, np.where(steps.decodes > 0, _MIXED, _PREFILL), _DECODE)
    return StepTable(
        region=region.astype(np.int8),
        tokens=steps.decodes + steps.chunk,
        sequences=steps.decodes + with_chunk,
        chunks=with_chunk,
        chunk_tokens=steps.chunk,
        pairs=steps.chunk * (steps.prefix + 0.5 * steps.chunk),
        requests=steps.decodes,
        kv_tokens=steps.decodes * steps.context,
        iter_ms=linear_ms + prefill_ms + decode_ms,
        nonattn_ms=linear_ms,
        prefill_attn_ms=prefill_ms,
        decode_attn_ms=decode_ms,
        allreduce_ms=np.full(len(steps), np.nan),
        sources=(source,) if source else (),
    )


def _up_to(rng: np.random.Generator, most: FloatArray) -> FloatArray:
    """Whole numbers from 1 to `most`, half of them log-uniform, half uniform."""
    u = rng.random(len(most))
    drawn = np.where(rng.random(len(most)) < 0.5, np.exp(u * np.log(most)), 1.0 + u * (most - 1.0))
    sizes: FloatArray = np.clip(np.round(drawn), 1.0, np.maximum(np.floor(most), 1.0))
    return sizes
