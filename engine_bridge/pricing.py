"""What requests ask for, in priced tokens: the unit in which demand and goodput are counted.

A fresh prompt token counts 1, one that a prefix cache can hold 0.1, an output token 3. It knows no
tier and no money: a tier's value multiplies it elsewhere.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.trace import Trace

FloatArray = npt.NDArray[np.float64]

REPEATED_PROMPT_PRICE: Final = 0.1
"""Price of a prompt token that a prefix cache can hold, over a fresh one (public price lists)."""
OUTPUT_PRICE: Final = 3.0
"""Price of an output token over a fresh prompt token (public price lists)."""


def repeated_prompt_tokens(trace: Trace) -> FloatArray:
    """Prompt tokens of each request in blocks that an earlier row of the trace had, shape (n,).

    It is a property of the traffic, not of a cache: the same for every policy.
    """
    repeated = np.zeros(len(trace))
    if not len(trace.prefix_ids):
        return repeated
    lengths = np.diff(trace.prefix_offsets)
    row = np.repeat(np.arange(len(trace)), lengths)
    place = np.arange(len(row)) - np.repeat(trace.prefix_offsets[:-1], lengths)
    block_tokens = trace.prefix_block_tokens[row]
    left = trace.prompt_tokens[row] - place * block_tokens
    first_row = np.empty(int(trace.prefix_ids.max()) + 1, np.int64)
    first_row[trace.prefix_ids[::-1]] = row[::-1]
    tokens = np.where(first_row[trace.prefix_ids] < row, np.clip(left, 0, block_tokens), 0)
    return np.bincount(row, weights=tokens, minlength=len(trace)).astype(np.float64)


def priced_prompt_tokens(trace: Trace) -> FloatArray:
    """Priced tokens of each request's prompt, shape (n,): fresh + 0.1 x repeated."""
    repeated = repeated_prompt_tokens(trace)
    return np.asarray(trace.prompt_tokens - (1.0 - REPEATED_PROMPT_PRICE) * repeated, np.float64)


def priced_tokens(trace: Trace) -> FloatArray:
    """Priced tokens that each request asks for, shape (n,): its prompt's + 3 x output tokens."""
    return priced_prompt_tokens(trace) + OUTPUT_PRICE * trace.output_tokens
