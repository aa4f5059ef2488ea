"""How long a prompt an engine can read in a given time, by its step-time model."""

from __future__ import annotations

from trimtab.engine_bridge.engine_spec import EngineSpec


def prefill_ms(engine: EngineSpec, tokens: int) -> float:
    """Time of the steps that read a prompt alone, with nothing cached, milliseconds.

    Each step takes as many of its tokens as the engine's limit of a step allows.
    """
    from trimtab.engine_bridge.step_time import step_ms

    coef, most = engine.coef, engine.max_num_batched_tokens
    total = 0.0
    for done in range(0, tokens, most):
        chunk = min(most, tokens - done)
        pairs = chunk * (done + 0.5 * chunk)
        total += float(step_ms(coef, float(chunk), 1.0, 1.0, float(chunk), pairs, 0.0, 0.0))
    return total


def tokens_within(engine: EngineSpec, limit_ms: float) -> int | None:
    """The longest prompt whose prefill takes no longer, tokens; None: any that its cache holds."""
    low, high = 0, engine.kv_tokens
    if prefill_ms(engine, high) <= limit_ms:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if prefill_ms(engine, middle) <= limit_ms else (low, middle)
    return low
