"""How fast the engine would serve a request if it had nothing else to do, by the step-time model.

A lower bound of its latency: what is above it is waiting, or sharing. It knows no queue.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.step_time import (
    CoefArray,
    decode_attention_ms,
    linear_ms,
    prefill_attention_ms,
)
from trimtab.training.diagnosis.observed import FloatArray, IntArray, Observed


def ttft_alone_ms(
    seen: Observed, spec: EngineSpec, computed_tokens: IntArray | None = None
) -> FloatArray:
    """Time to first token of each request on an idle engine, ms, shape (n,).

    Its uncached prompt in chunks of the engine's token limit; attention's query-key pairs are
    spread evenly over the chunks.

    Args:
        seen: The requests.
        spec: The engine.
        computed_tokens: Prompt tokens to compute of each, shape (n,); None: those not cached.
    """
    tokens = seen.uncached_tokens if computed_tokens is None else computed_tokens
    uncached = tokens.astype(np.float64)
    pairs = uncached * (seen.prompt_tokens - 0.5 * uncached)
    times = np.empty(len(seen))
    _ttft(spec.coef, float(spec.max_num_batched_tokens), uncached, pairs, times)
    return times


def tpot_alone_ms(seen: Observed, spec: EngineSpec) -> FloatArray:
    """Time per output token of each request on an idle engine, ms, shape (n,)."""
    times = np.empty(len(seen))
    _tpot(spec.coef, seen.prompt_tokens + 0.5 * seen.generated_tokens, times)
    return times


@compiled
def _ttft(
    coef: CoefArray, limit: float, uncached: FloatArray, pairs: FloatArray, times: FloatArray
) -> None:
    whole_ms = linear_ms(coef, limit, 1.0)
    for row in range(len(times)):
        tokens = uncached[row]
        full = tokens // limit
        rest = tokens - full * limit
        chunks = full + (1.0 if rest > 0.0 else 0.0)
        linear = full * whole_ms + (linear_ms(coef, rest, 1.0) if rest > 0.0 else 0.0)
        attention = prefill_attention_ms(coef, 1.0, tokens / chunks, pairs[row] / chunks)
        times[row] = linear + chunks * attention


@compiled
def _tpot(coef: CoefArray, context_tokens: FloatArray, times: FloatArray) -> None:
    step_ms = linear_ms(coef, 1.0, 1.0)
    for row in range(len(times)):
        times[row] = step_ms + decode_attention_ms(coef, 1.0, context_tokens[row])
