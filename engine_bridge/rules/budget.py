"""Rules 4 and 13: how much prefill a step may carry.

It decides token counts; who gets them is the order's business (`rules.fair_queue`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.step_time import (
    decode_attention_ms,
    linear_ms,
    mixed_attention_ms,
    prefill_attention_ms,
)


@compiled
def step_limit_ms(
    tpot_s: float, slack_s: float, tpot_fraction: float, slack_fraction: float
) -> float:
    """Rule 13: how long a step may take for one running request.

    A share of its TPOT target, or, if it is ahead of its token deadlines, a share of that slack.
    """
    return 1e3 * max(tpot_fraction * tpot_s, slack_fraction * slack_s)


@compiled
def predicted_step_ms(
    coef: npt.NDArray[np.float64],
    decodes: float,
    kv_tokens: float,
    chunks: float,
    chunk_tokens: float,
    pairs: float,
    drafts: float = 0.0,
) -> float:
    """The step-time model for decodes that read `kv_tokens` beside prefill chunks.

    `drafts` are the draft tokens that the decodes verify.
    """
    linear = linear_ms(coef, decodes + drafts + chunk_tokens, decodes + chunks)
    attention = prefill_attention_ms(coef, chunks, chunk_tokens, pairs)
    reading = decode_attention_ms(coef, decodes, kv_tokens)
    reading += mixed_attention_ms(coef, chunk_tokens, decodes, kv_tokens)
    return linear + attention + reading


@compiled
def chunk_within(
    coef: npt.NDArray[np.float64],
    limit_ms: float,
    decodes: float,
    kv_tokens: float,
    chunks: float,
    chunk_tokens: float,
    pairs: float,
    cached_tokens: float,
    most_tokens: int,
    drafts: float,
) -> int:
    """The largest chunk after `cached_tokens` that keeps the step within `limit_ms`.

    `chunks`, `chunk_tokens` and `pairs` describe the prefill already in the step. The step time
    never falls as the chunk grows, so bisection finds it.
    """
    low, high = 0, most_tokens
    while low < high:
        middle = (low + high + 1) // 2
        ms = predicted_step_ms(
            coef,
            decodes,
            kv_tokens,
            chunks + 1.0,
            chunk_tokens + middle,
            pairs + middle * (cached_tokens + 0.5 * middle),
            drafts,
        )
        if ms <= limit_ms:
            low = middle
        else:
            high = middle - 1
    return low
