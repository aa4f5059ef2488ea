"""How long one engine step takes: a physical model of three additive parts.

It is a pure function of the step's batch; it knows no scheduler, no engine file and no units but
milliseconds. Coefficients come from `trimtab.engine_bridge.engine_spec`.

Every part is a maximum of lines (roofline regimes) in float64 sums and products, so the result is
the same bit for bit compiled and interpreted. With coefficients that are all at
least 0 no part is ever NaN or negative, and none falls when an argument grows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.compiled import compiled

CoefArray = npt.NDArray[np.float64]

COEFFICIENTS: Final[tuple[tuple[str, str, str], ...]] = (
    ("weights_ms", "ms", "reading all weights once, with the launches of every layer"),
    ("weights_us_per_token", "us/token", "growth per token while weight reads dominate"),
    ("tile_ms", "ms", "intercept where the matmuls' tiles are only partly filled"),
    ("tile_us_per_token", "us/token", "growth per token there"),
    ("tile_from_tokens", "tokens", "that regime holds above this many tokens"),
    ("compute_ms", "ms", "intercept where the matmuls run at full rate"),
    ("compute_us_per_token", "us/token", "matmuls and norms of one token at full rate"),
    ("sequence_us", "us/request", "output head and sampling of one request"),
    ("allreduce_ms", "ms", "latency of all the all-reduces of a step; 0 on one GPU"),
    ("allreduce_us_per_token", "us/token", "all-reduce traffic of one token; 0 on one GPU"),
    ("prefill_launch_ms", "ms", "prefill attention of a step with almost no work"),
    ("prefill_us_per_token", "us/token", "query tiles, rotary embedding and KV write of one token"),
    ("pair_base_ms", "ms", "intercept where the query-key pairs dominate prefill attention"),
    ("pair_ns", "ns/pair", "one query-key pair over all layers, heads of one GPU"),
    ("decode_launch_ms", "ms", "decode attention of a step with almost no work"),
    ("decode_us_per_request", "us/request", "decode attention of one more request"),
    ("kv_ns_per_token", "ns/token", "reading the KV of one context token"),
    ("decode_batch_ms", "ms", "intercept where a big batch of short contexts dominates"),
    ("decode_batch_us_per_request", "us/request", "one more request there"),
    ("mixed_us_per_request", "us/request", "decode attention beside chunks, more a request"),
    ("mixed_kv_ns_per_token", "ns/token", "decode attention beside chunks, more a context token"),
    ("mixed_grid_ns", "ns", "decode attention beside chunks, more a request times chunk token"),
    ("experts_ms", "ms", "reading the weights of all experts; 0 for a dense model"),
    ("experts_per_token", "fraction", "part of the experts that one token activates"),
)
"""Name, unit and meaning of every coefficient, in vector order."""
COEF_LEN: Final = len(COEFFICIENTS)
"""Length of a coefficient vector."""
OPTIONAL_COEFFICIENTS: Final = COEFFICIENTS[19:]
"""Those that an engine file may leave out: 0 then, and the model is as it was without them."""

_MS_PER_US: Final = 1e-3
_MS_PER_NS: Final = 1e-6


@compiled
def linear_ms(coef: CoefArray, tokens: float, sequences: float) -> float:
    """Everything but attention: weights, matmuls, launches, all-reduce, output head.

    Args:
        coef: coefficient vector, float64, shape (COEF_LEN,).
        tokens: tokens of the step, prefill and decode together.
        sequences: requests in the step.

    Returns:
        Milliseconds.
    """
    weights = coef[0] + coef[1] * tokens * _MS_PER_US
    compute = coef[5] + coef[6] * tokens * _MS_PER_US
    matmuls = max(weights, compute)
    if tokens > coef[4]:
        matmuls = max(matmuls, coef[2] + coef[3] * tokens * _MS_PER_US)
    head = coef[7] * sequences * _MS_PER_US
    # 1 / (1 + x / 4)^4 in place of (1 - part)^tokens: products only, within 6 % of the experts.
    untouched = 1.0 + 0.25 * coef[23] * tokens
    untouched *= untouched
    experts = coef[22] * (1.0 - 1.0 / (untouched * untouched))
    return matmuls + head + (coef[8] + coef[9] * tokens * _MS_PER_US) + experts


@compiled
def prefill_attention_ms(
    coef: CoefArray, chunks: float, chunk_tokens: float, pairs: float
) -> float:
    """Attention of the step's prefill chunks.

    Args:
        coef: coefficient vector, float64, shape (COEF_LEN,).
        chunks: number of prefill chunks in the step.
        chunk_tokens: their tokens, summed.
        pairs: query-key pairs, the sum over chunks of c * (p + c / 2) for c tokens after p cached.

    Returns:
        Milliseconds; 0 without chunks.
    """
    if chunks <= 0:
        return 0.0
    light = coef[10] + coef[11] * chunk_tokens * _MS_PER_US
    heavy = coef[12] + coef[13] * pairs * _MS_PER_NS
    return max(light, heavy)


@compiled
def decode_attention_ms(coef: CoefArray, requests: float, kv_tokens: float) -> float:
    """Attention of the step's decoding requests.

    Args:
        coef: coefficient vector, float64, shape (COEF_LEN,).
        requests: decoding requests in the step.
        kv_tokens: tokens of KV cache they read, summed.

    Returns:
        Milliseconds; 0 without requests.
    """
    if requests <= 0:
        return 0.0
    reads = coef[14] + coef[15] * requests * _MS_PER_US + coef[16] * kv_tokens * _MS_PER_NS
    batch = coef[17] + coef[18] * requests * _MS_PER_US
    return max(reads, batch)


@compiled
def mixed_attention_ms(
    coef: CoefArray, chunk_tokens: float, requests: float, kv_tokens: float
) -> float:
    """What decode attention costs more because prefill chunks run in the same kernel.

    Beside a chunk FlashAttention 2 does not pack the query heads that share a KV head, so each
    context token is read several times, and every request gets as many thread blocks as the chunk.

    Args:
        coef: coefficient vector, float64, shape (COEF_LEN,).
        chunk_tokens: tokens of the step's prefill chunks, summed; 0 without chunks.
        requests: decoding requests of the step.
        kv_tokens: tokens of KV cache they read, summed.

    Returns:
        Milliseconds, on top of `decode_attention_ms`; 0 without chunks.
    """
    if chunk_tokens <= 0:
        return 0.0
    reads = coef[19] * requests * _MS_PER_US + coef[20] * kv_tokens * _MS_PER_NS
    return reads + coef[21] * requests * chunk_tokens * _MS_PER_NS


@compiled
def step_ms(
    coef: CoefArray,
    tokens: float,
    sequences: float,
    chunks: float,
    chunk_tokens: float,
    pairs: float,
    requests: float,
    kv_tokens: float,
) -> float:
    """The whole step: the sum of the three parts, milliseconds."""
    linear = linear_ms(coef, tokens, sequences)
    prefill = prefill_attention_ms(coef, chunks, chunk_tokens, pairs)
    decode = decode_attention_ms(coef, requests, kv_tokens)
    return linear + prefill + decode + mixed_attention_ms(coef, chunk_tokens, requests, kv_tokens)
