"""Rule 2: what a request is expected to cost, in engine milliseconds, and how long its answer.

Estimates only: what it really cost is booked by the engine, step by step (`rules.fair_queue.use`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.step_time import decode_attention_ms, prefill_attention_ms

TYPICAL_DECODES = 32.0
"""Batch in which a decode token's cost is estimated before any is measured."""
_FASTEST_LEARNING = 0.5
_SLOWEST_LEARNING = 0.05


@compiled
def prefill_cost_ms(
    coef: npt.NDArray[np.float64], uncached_tokens: float, cached_tokens: float, share_ms: float
) -> float:
    """Prefill of `uncached_tokens` after `cached_tokens`, ms.

    The linear part at `share_ms` a token, and attention's quadratic part.
    """
    pairs = uncached_tokens * (cached_tokens + 0.5 * uncached_tokens)
    return uncached_tokens * share_ms + prefill_attention_ms(coef, 1.0, uncached_tokens, pairs)


@compiled
def decode_cost_ms(
    coef: npt.NDArray[np.float64], context_tokens: float, output_tokens: float, share_ms: float
) -> float:
    """Decode of `output_tokens` from a context: linear part at `share_ms` a token, KV reads."""
    mean_context = context_tokens + 0.5 * output_tokens
    batch_ms = decode_attention_ms(coef, TYPICAL_DECODES, TYPICAL_DECODES * mean_context)
    return output_tokens * (share_ms + batch_ms / TYPICAL_DECODES)


@compiled
def learn_output(predicted: float, samples: int, actual: float, quantile: float) -> float:
    """One step of an online quantile of output lengths.

    The estimate rises by `rate * quantile` of itself when an answer was longer and falls by
    `rate * (1 - quantile)` when it was not, so it rests where a share `quantile` of the answers is
    no longer (Robbins and Monro, 1951). The rate falls with the number of samples to a floor, so
    that it follows drift.
    """
    rate = min(_FASTEST_LEARNING, max(_SLOWEST_LEARNING, 1.0 / (samples + 1.0)))
    if actual > predicted:
        return predicted * (1.0 + rate * quantile)
    return max(1.0, predicted * (1.0 - rate * (1.0 - quantile)))


@compiled
def skew(service_ms: float, estimate_ms: float) -> float:
    """Rule 12: real over predicted distance from virtual start to virtual finish, minus 1."""
    if estimate_ms <= 0.0:
        return 0.0
    return service_ms / estimate_ms - 1.0
