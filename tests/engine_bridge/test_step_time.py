"""The step-time model: physical sense, and the same number on every machine."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.engine_bridge.engine_spec import engine_names, get_engine_spec
from trimtab.engine_bridge.step_time import (
    COEF_LEN,
    COEFFICIENTS,
    decode_attention_ms,
    linear_ms,
    mixed_attention_ms,
    prefill_attention_ms,
    step_ms,
)

COEFS = {name: get_engine_spec(name).coef for name in engine_names()}
SIZES = st.floats(0, 1e7, allow_nan=False)
COEF_VECTORS = st.one_of(
    st.sampled_from(list(COEFS.values())),
    st.lists(st.floats(0, 1e3), min_size=COEF_LEN, max_size=COEF_LEN).map(np.array),
)

# Prints the bytes of step times over a grid, so that two interpreters can be compared.
_GRID = """
import numpy as np
from trimtab.engine_bridge.engine_spec import engine_names, get_engine_spec
from trimtab.engine_bridge.step_time import step_ms
rng = np.random.default_rng(7)
steps = rng.uniform(0, 20_000, (100, 7))
values = [step_ms(get_engine_spec(n).coef, *map(float, s)) for n in engine_names() for s in steps]
print(np.array(values, np.float64).tobytes().hex())
"""


def test_names_are_unique() -> None:
    assert len({name for name, _, _ in COEFFICIENTS}) == COEF_LEN == len(COEFFICIENTS)


@settings(max_examples=300, deadline=None)
@given(COEF_VECTORS, st.lists(SIZES, min_size=7, max_size=7), st.integers(0, 6), SIZES)
def test_no_step_gets_shorter_when_an_argument_grows(
    coef: np.ndarray, sizes: list[float], which: int, growth: float
) -> None:
    larger = sizes.copy()
    larger[which] += growth
    shorter_ms, longer_ms = step_ms(coef, *sizes), step_ms(coef, *larger)
    assert math.isfinite(longer_ms)
    assert 0.0 <= shorter_ms <= longer_ms


@settings(deadline=None)
@given(COEF_VECTORS, SIZES, SIZES)
def test_absent_parts_cost_nothing(coef: np.ndarray, tokens: float, sequences: float) -> None:
    assert prefill_attention_ms(coef, 0.0, tokens, tokens) == 0.0
    assert decode_attention_ms(coef, 0.0, tokens) == 0.0
    whole = step_ms(coef, tokens, sequences, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert whole == linear_ms(coef, tokens, sequences)


@settings(deadline=None)
@given(COEF_VECTORS, st.lists(SIZES, min_size=7, max_size=7))
def test_the_step_is_the_sum_of_its_parts(coef: np.ndarray, sizes: list[float]) -> None:
    tokens, sequences, chunks, chunk_tokens, pairs, requests, kv_tokens = sizes
    parts = linear_ms(coef, tokens, sequences)
    parts += prefill_attention_ms(coef, chunks, chunk_tokens, pairs)
    parts += decode_attention_ms(coef, requests, kv_tokens)
    parts += mixed_attention_ms(coef, chunk_tokens, requests, kv_tokens)
    assert step_ms(coef, *sizes) == parts


@pytest.mark.parametrize("interpreted", [True, False])
def test_compiled_and_interpreted_agree_to_the_last_bit(interpreted: bool) -> None:
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1" if interpreted else "0"}
    done = subprocess.run(
        [sys.executable, "-c", _GRID], env=environment, capture_output=True, text=True, check=True
    )
    rng = np.random.default_rng(7)
    steps = rng.uniform(0, 20_000, (100, 7))
    values = [step_ms(coef, *map(float, step)) for coef in COEFS.values() for step in steps]
    assert done.stdout.strip() == np.array(values, np.float64).tobytes().hex()


@pytest.mark.parametrize("name", engine_names())
def test_a_whole_prefill_costs_more_in_chunks_but_not_much(name: str) -> None:
    coef = COEFS[name]
    whole = step_ms(coef, 8192.0, 1.0, 1.0, 8192.0, 8192.0 * 4096.0, 0.0, 0.0)
    chunks = sum(
        step_ms(coef, 2048.0, 1.0, 1.0, 2048.0, 2048.0 * (done + 1024.0), 0.0, 0.0)
        for done in (0.0, 2048.0, 4096.0, 6144.0)
    )
    assert whole <= chunks <= 1.15 * whole


@pytest.mark.parametrize(
    ("name", "bytes_per_token", "gpus"),
    [
        ("h100:llama-3.1-8b-tp1", 131_072, 1),
        ("h100:llama-3.1-70b-tp4", 327_680, 4),
        ("h100:llama-3.1-70b-tp8", 327_680, 8),
    ],
)
def test_kv_reads_stay_below_the_memory_bandwidth_of_the_card(
    name: str, bytes_per_token: int, gpus: int
) -> None:
    index = [coefficient for coefficient, _, _ in COEFFICIENTS].index("kv_ns_per_token")
    bytes_per_s = bytes_per_token / gpus / (COEFS[name][index] * 1e-9)
    assert 2.5e12 < bytes_per_s < 3.35e12
