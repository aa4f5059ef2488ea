"""Whatever bytes a reader gets, nothing but an error of ours comes out."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from trimtab.engine_bridge.errors import TrimtabError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces import READERS, read_trace, write_trace

from .conftest import request, session


def _parquet() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        write_trace(Trace.build(arrival_s=[0, 1], prompt_tokens=[1, 2], output_tokens=[1, 2]), path)
        return path.read_bytes()


GOOD: dict[str, bytes] = {
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n",
    "trimtab": b"arrival_s,tenant,tier,prompt_tokens,output_tokens,session,turn,prefix_ids,"
    b"prefix_block_tokens,media\n0,a,T0,64,1,0,0,1 2,16,image:9@3#7 audio:4\n"
    b"1,a,T0,64,1,0,1,1 2 3,16,\n",
    "mooncake": json.dumps(
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    ).encode(),
    "kv-cache-tester": session([request(0, 130, 7, [1, 2]), request(9, 260, 7, [1, 2])]).encode(),
    "servegen": b"0,1,1,Gamma,1,1\n600,2,1,Weibull,0.5,1\n",
    "burstgpt": b"Timestamp,Model,Request tokens,Response tokens\n5,m,4,4\n6,m,4,4\n",
    "vidur": b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,48,10\n",
}
PARQUET = _parquet()
TOKENS = st.sampled_from(
    [b"nan", b"inf", b"-1", b"1e400", b"9" * 30, b"", b",", b"\n", b'"', b"{", b"[", b"\x00",
     b"\xff\xfe", b"null", b"true", b"0.5", b"\r"]
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, good: bytes) -> bytes:
    """A good file with some bytes cut out, doubled or replaced."""
    data = good
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 8)))
        data = data[:start] + draw(st.one_of(TOKENS, st.binary(max_size=4))) + data[end:]
    return gzip.compress(data)[: draw(st.integers(0, 300))] if draw(st.booleans()) else data


def _survives(data: bytes, format: str | None, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        if format in (None, "servegen"):
            (Path(folder) / "chunk-1-dataset.json").write_text(
                '{"0": {"input_tokens": "{5: 1}", "output_tokens": "{5: 1}"}}'
            )
        try:
            read_trace(path, rng=np.random.default_rng(0), format=format).check()
        except TrimtabError as error:
            assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("format", [None, *READERS])
@settings(max_examples=40)
@given(data=st.binary(max_size=400))
def test_random_bytes(format: str | None, data: bytes) -> None:
    _survives(data, format, "chunk-1-trace.csv")


@pytest.mark.parametrize("format", READERS)
@settings(max_examples=120)
@given(data=st.data())
def test_damaged_files(format: str, data: st.DataObject) -> None:
    bytes_in = data.draw(mutated(GOOD[format]))
    _survives(bytes_in, data.draw(st.sampled_from([None, format])), "chunk-1-trace.csv")


@settings(max_examples=150)
@given(data=mutated(PARQUET))
def test_damaged_parquet(data: bytes) -> None:
    _survives(data, None, "t.parquet")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["requests", "t", "in", "out", "hash_ids", "type", "input_tokens", "0"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda value: {"block_size": 64, "requests": [value]},
        lambda value: {"block_size": 64, "requests": [request(0, 130, 7, [1]) | {"out": value}]},
        lambda value: {"block_size": value, "requests": [request(0, 130, 7, [1])]},
    ],
)
@settings(max_examples=60)
@given(value=JSON)
def test_sessions_of_other_shapes(wrap: Callable[[object], object], value: object) -> None:
    _survives(json.dumps(wrap(value)).encode(), "kv-cache-tester", "trace_1.json")


@settings(max_examples=60)
@given(value=st.dictionaries(st.text(max_size=4), JSON, max_size=3))
def test_lengths_of_other_shapes(value: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "chunk-1-trace.csv").write_bytes(GOOD["servegen"])
        (Path(folder) / "chunk-1-dataset.json").write_text(json.dumps(value))
        try:
            read_trace(folder, rng=np.random.default_rng(0))
        except TrimtabError as error:
            assert "\n" not in str(error)  # noqa: PT017
