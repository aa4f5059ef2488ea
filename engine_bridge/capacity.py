"""How much of an engine a trace asks for: cost of a request and offered load, without a replay.

A fluid estimate of an engine that never lacks work, in closed form; it schedules nothing. It says
at what rate a trace just about saturates an engine (`trimtab trace compose --load`).

The saturated step decodes the largest batch that `max_num_seqs`, the KV blocks and the token budget
allow for requests like these. Prompts arrive at the rate at which that batch finishes requests, so
a fraction of the steps carries prefill tokens too; what those tokens add is charged to the
prompts, what the decode-only step takes is shared by the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.cache_reach import find_reuse, kept_tokens
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.step_time import (
    COEFFICIENTS,
    decode_attention_ms,
    linear_ms,
    prefill_attention_ms,
)
from trimtab.engine_bridge.trace import NO_SESSION, Trace

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]

_KV_NS = [name for name, _, _ in COEFFICIENTS].index("kv_ns_per_token")
_NS_PER_MS = 1e6
_ASKED_FRACTION = 0.95
_BUSY_FRACTION = 0.75


@dataclass(frozen=True, kw_only=True)
class SaturatedStep:
    """The mean step of an engine that never lacks work of one kind of traffic."""

    batch: float
    """Decoding requests in a step."""
    decode_ms: float
    """Share of a step that decoding one token takes, beside reading its own context."""
    kv_ms_per_token: float
    """Reading one context token for one output token."""
    prefill_ms_per_token: float
    """What one uncached prompt token adds to the steps that carry it."""
    pair_ms: float
    """What one query-key pair of the prompt adds."""
    step_ms: float
    """Mean length of a step, with and without prefill."""


def saturated_step(
    spec: EngineSpec,
    uncached_prompt_tokens: npt.ArrayLike,
    prompt_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    *,
    busy_fraction: float = 1.0,
) -> SaturatedStep:
    """The mean step of `spec` when it is saturated with requests like these.

    Args:
        spec: the engine.
        uncached_prompt_tokens: prompt tokens to compute, at least 1 each, shape (n,).
        prompt_tokens: whole prompts, shape (n,).
        output_tokens: generated tokens, at least 1 each, shape (n,).
        busy_fraction: share of the largest batch that decodes; below 1 the engine is not saturated.
    """
    uncached, prompt, decoded, pairs = _work(uncached_prompt_tokens, prompt_tokens, output_tokens)
    coef, budget = spec.coef, float(spec.max_num_batched_tokens)
    prompt_mean, decoded_mean = float(uncached.mean()), float(decoded.mean())
    batch, context = 0.0, 0.0
    prefill = budget
    if decoded_mean > 0:
        context = float((decoded * (prompt + decoded / 2)).sum() / decoded.sum())
        by_memory = spec.kv_tokens / context
        by_budget = budget / (1.0 + prompt_mean / decoded_mean)
        largest = min(float(spec.max_num_seqs), by_memory, by_budget)
        batch = max(1.0, busy_fraction * largest)
        prefill = batch / decoded_mean * prompt_mean
    started = prefill / prompt_mean
    # Prompts come singly: a step carries none with the probability of a Poisson count of 0.
    carrying = max(1.0 - math.exp(-started), min(1.0, prefill / max(budget - batch, 1.0)))
    alone = linear_ms(coef, batch, batch) if batch else 0.0
    together = linear_ms(coef, batch + prefill / carrying, batch + started / carrying)
    pairs_mean = float(pairs.mean())
    attention = carrying * prefill_attention_ms(
        coef, 1.0, prefill / carrying, started * pairs_mean / carrying
    )
    reading = decode_attention_ms(coef, batch, batch * context)
    kv_ms = float(coef[_KV_NS]) / _NS_PER_MS
    return SaturatedStep(
        batch=batch,
        decode_ms=max(0.0, (alone + reading) / batch - kv_ms * context) if batch else 0.0,
        kv_ms_per_token=kv_ms,
        prefill_ms_per_token=carrying * (together - alone) / prefill,
        pair_ms=attention / (started * pairs_mean),
        step_ms=alone + carrying * (together - alone) + attention + reading,
    )


def request_cost_ms(
    spec: EngineSpec,
    uncached_prompt_tokens: npt.ArrayLike,
    prompt_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
) -> FloatArray:
    """Engine time that each request costs when `spec` is saturated with requests like these.

    Args:
        spec: the engine.
        uncached_prompt_tokens: prompt tokens to compute, at least 1 each, shape (n,).
        prompt_tokens: whole prompts, shape (n,).
        output_tokens: generated tokens, at least 1 each, shape (n,).

    Returns:
        Milliseconds, shape (n,); empty without requests.
    """
    uncached, prompt, decoded, pairs = _work(uncached_prompt_tokens, prompt_tokens, output_tokens)
    if not len(uncached):
        return np.zeros(0)
    step = saturated_step(spec, uncached, prompt, decoded + 1.0)
    return _cost_ms(step, uncached, prompt, decoded, pairs)


def offered_load(trace: Trace, spec: EngineSpec) -> float:
    """Engine milliseconds that the trace asks for per millisecond: its share of the capacity.

    Prompt tokens whose prefix ids occurred earlier in the trace count as cached where the engine's
    KV cache would still hold them (`cache_reach`), beside what an engine at three quarters of its
    largest batch runs. Turns of sessions are placed in time by their pauses and by the time that
    such an engine needs for the turns before them. The span runs to the last arrival of an open
    request or of a session; where sessions go on past it, at least until 95 % of all work has been
    asked for. Work asked for after the span is left out. Images and so on are encoded wherever they
    are not cached: that another request may have encoded the same is not looked at.

    Returns:
        1.0 for a trace that just saturates the engine; infinity where all work is asked for at
        once; 0 without requests.
    """
    if not len(trace):
        return 0.0
    uncached, asked_s = _uncached_and_asked(trace, spec)
    work = _work(uncached, trace.prompt_tokens, trace.output_tokens)
    cost_ms = _cost_ms(saturated_step(spec, work[0], work[1], work[2] + 1.0), *work)
    return _load(trace, cost_ms + _encode_ms(trace, spec, uncached), asked_s)


def _uncached_and_asked(trace: Trace, spec: EngineSpec) -> tuple[LongArray, FloatArray]:
    """Prompt tokens to compute, and when each request is asked for, seconds."""
    prompt = trace.prompt_tokens.astype(np.int64)
    if not spec.enable_prefix_caching:
        service_s = _service_s(trace, spec, prompt)
        return prompt, _asked_s(trace, service_s)
    reuse = find_reuse(trace)
    service_s = _service_s(trace, spec, prompt - reuse.cached_tokens)
    asked_s = _asked_s(trace, service_s)
    kept = kept_tokens(
        trace, reuse, asked_s=asked_s, service_s=service_s, cache_tokens=float(spec.kv_tokens)
    )
    return prompt - kept, asked_s


def _load(trace: Trace, cost_ms: FloatArray, asked_s: FloatArray) -> float:
    span_s = float(asked_s[trace.turn == 0].max(initial=0.0))
    if trace.closed_loop:
        order = np.argsort(asked_s, kind="stable")
        asked_ms = np.cumsum(cost_ms[order])
        place = int(np.searchsorted(asked_ms, _ASKED_FRACTION * asked_ms[-1]))
        span_s = max(span_s, float(asked_s[order[place]]))
    total_ms = float(cost_ms[asked_s <= span_s].sum())
    return total_ms / (span_s * 1000.0) if span_s > 0 else math.inf


def _work(
    uncached: npt.ArrayLike, prompt: npt.ArrayLike, output: npt.ArrayLike
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Uncached and prompt tokens, decode steps (the prefill yields the first token) and pairs."""
    new, whole = np.asarray(uncached, np.float64), np.asarray(prompt, np.float64)
    decoded = np.asarray(output, np.float64) - 1.0
    return new, whole, decoded, new * (whole - new / 2)


def _cost_ms(
    step: SaturatedStep,
    uncached: FloatArray,
    prompt: FloatArray,
    decoded: FloatArray,
    pairs: FloatArray,
) -> FloatArray:
    prefill = step.prefill_ms_per_token * uncached + step.pair_ms * pairs
    own_context = step.kv_ms_per_token * (prompt + decoded / 2)
    cost: FloatArray = prefill + decoded * (step.decode_ms + own_context)
    return cost


def _encode_ms(trace: Trace, spec: EngineSpec, uncached: LongArray) -> FloatArray:
    """What the encoders take for each request: every item that reaches beyond its cached part."""
    media = trace.media
    if spec.encoder is None or not len(media):
        return np.zeros(len(trace))
    request = media.request
    cached = trace.prompt_tokens[request] - uncached[request]
    needed = media.start_tokens.astype(np.int64) + media.tokens > cached
    times = np.where(needed, spec.encoder.items_ms(media), 0.0)
    sums: FloatArray = np.bincount(request, weights=times, minlength=len(trace)).astype(np.float64)
    return sums


def _service_s(trace: Trace, spec: EngineSpec, uncached: LongArray) -> FloatArray:
    """Time that each request takes on an engine that is busy but not saturated, seconds."""
    new, prompt, decoded, pairs = _work(uncached, trace.prompt_tokens, trace.output_tokens)
    step = saturated_step(spec, new, prompt, decoded + 1.0, busy_fraction=_BUSY_FRACTION)
    prefill_ms = step.prefill_ms_per_token * new + step.pair_ms * pairs
    service: FloatArray = (prefill_ms + (decoded + 1.0) * step.step_ms) / 1000.0
    return service


def _asked_s(trace: Trace, service_s: FloatArray) -> FloatArray:
    """When each request is asked for: its arrival, or its place in its session."""
    asked = trace.arrival_s.copy()
    if not trace.closed_loop:
        return asked
    rows = np.flatnonzero(trace.session != NO_SESSION)
    rows = rows[np.lexsort((trace.turn[rows], trace.session[rows]))]
    first = np.flatnonzero(np.diff(trace.session[rows], prepend=NO_SESSION))
    # A turn waits for the service of the turn before it, then for its own pause.
    wait = trace.think_s[rows] + np.concatenate(([0.0], service_s[rows[:-1]]))
    wait[first] = 0.0
    total = np.cumsum(wait)
    start = np.repeat(first, np.diff(np.append(first, len(rows))))
    asked[rows] = trace.arrival_s[rows[start]] + total - total[start]
    return asked
