"""Every bad trace file gives one line that names the file, the place and the fault."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trimtab.engine_bridge.errors import FlagError, InputError, TraceError
from trimtab.training.traces import read_trace

from .conftest import Read, Write, request, session

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
OWN = "arrival_s,tenant,tier,prompt_tokens,output_tokens"
BURST = "Timestamp,Model,Request tokens,Response tokens\n"
MOON = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


def _azure(row: str) -> str:
    return f"{AZURE}2023-11-16 18:15:46.6805900,374,44\n{row}\n"


def _own(row: str, extra: str = "") -> str:
    return f"{OWN}{extra}\n0,a,T0,10,1{',' * extra.count(',')}\n{row}\n"


def _moon(**changes: object) -> str:
    record = {k: v for k, v in (MOON | changes).items() if v is not None}
    return json.dumps(MOON) + "\n" + json.dumps(record) + "\n"


def _agent(**changes: object) -> str:
    record = request(0, 130, 7, [1, 2])
    return session([{k: v for k, v in (record | changes).items() if v != "gone"}])


BAD: dict[str, tuple[str, str | bytes, str]] = {
    "empty": ("t.csv", "", "empty"),
    "only blanks": ("t.csv", "\n \n", "empty"),
    "header only": ("t.csv", AZURE, "no rows"),
    "own header only": ("t.csv", OWN + "\n", "no rows"),
    "prose": ("t.csv", "Dear Sir,\nthe trace is late.\n", "formats"),
    "binary": ("t.csv", bytes(range(256)) * 8, "t.csv"),
    "not UTF-8": ("t.csv", _azure("2023-11-16 18:15:47,\xff,44").encode("latin-1"), "t.csv"),
    "truncated gzip": ("t", gzip.compress(_azure("").encode() * 50)[:40], "gzip"),
    "damaged gzip": ("t", b"\x1f\x8b" + b"junk" * 30, "gzip"),
    "missing column": ("t.csv", "TIMESTAMP,ContextTokens\n2023-11-16,1\n", "GeneratedTokens"),
    "misspelt column": ("t.csv", f"{OWN.replace('prompt', 'promt')}\n", 'mean "prompt_tokens"'),
    "unknown column": ("t.csv", f"{OWN},sesion\n0,a,T0,1,1,2\n", 'mean "session"'),
    "strange column": ("t.csv", f"{OWN},colour\n0,a,T0,1,1,2\n", "a known column"),
    "doubled column": ("t.csv", f"{OWN},tier\n0,a,T0,1,1,T0\n", "twice"),
    "too few cells": ("t.csv", _azure("2023-11-16 18:15:47,7"), "3 columns"),
    "too many cells": ("t.csv", _azure("2023-11-16 18:15:47,7,8,9"), "it has 4"),
    "text in a number": ("t.csv", _azure("2023-11-16 18:15:47,many,44"), 'line 3.*"many"'),
    "empty number": ("t.csv", _azure("2023-11-16 18:15:47,,44"), "line 3: ContextTokens"),
    "zero tokens": ("t.csv", _azure("2023-11-16 18:15:47,0,44"), 'line 3: ContextTokens: "0"'),
    "negative tokens": ("t.csv", _azure("2023-11-16 18:15:47,-5,44"), '"-5"'),
    "fraction of a token": ("t.csv", _azure("2023-11-16 18:15:47,1.5,44"), "a whole number"),
    "too many tokens": ("t.csv", _azure("2023-11-16 18:15:47,1e300,44"), "1e300"),
    "overflowing tokens": ("t.csv", _azure(f"2023-11-16 18:15:47,{10**400},4"), "line 3"),
    "NaN tokens": ("t.csv", _azure("2023-11-16 18:15:47,nan,44"), '"nan"'),
    "a time that is none": ("t.csv", _azure("yesterday,1,44"), "TIMESTAMP.*yesterday"),
    "an impossible time": ("t.csv", _azure("2023-13-45 18:15:47,1,44"), "TIMESTAMP"),
    "infinite arrival": ("t.csv", _own("inf,a,T0,1,1"), "arrival_s"),
    "negative arrival": ("t.csv", _own("-1,a,T0,1,1"), "arrival_s"),
    "no tier": ("t.csv", _own("1,a,,1,1"), "tier.*a name"),
    "nine tiers": ("t.csv", OWN + "".join(f"\n0,a,T{k},1,1" for k in range(9)), "at most 8"),
    "negative session": ("t.csv", _own("1,a,T0,1,1,-4,0", ",session,turn"), "session"),
    "session without turns": ("t.csv", f"{OWN},session\n0,a,T0,1,1,3\n", "the column turn"),
    "missing turn": ("t.csv", _own("1,a,T0,1,1,4,1", ",session,turn"), "session 4.*turn 1"),
    "doubled turn": (
        "t.csv",
        f"{OWN},session,turn\n0,a,T0,1,1,4,0\n1,a,T0,1,1,4,0\n",
        "session 4",
    ),
    "turn without session": ("t.csv", _own("1,a,T0,1,1,,2", ",session,turn"), "without a session"),
    "negative pause": ("t.csv", _own("1,a,T0,1,1,-2", ",think_s"), "think_s"),
    "no patience": ("t.csv", _own("1,a,T0,1,1,0", ",cancel_after_s"), "cancel_after_s.*above 0"),
    "too much acceptance": ("t.csv", _own("1,a,T0,1,1,1.5", ",acceptance"), "from 0 to 1"),
    "ids without size": ("t.csv", f"{OWN},prefix_ids\n0,a,T0,64,1,7\n", "prefix_block_tokens"),
    "ids beyond the prompt": (
        "t.csv",
        _own("1,a,T0,64,1,7 8,64", ",prefix_ids,prefix_block_tokens"),
        "2 ids of 64 tokens",
    ),
    "ids of size 0": (
        "t.csv",
        _own("1,a,T0,64,1,7,0", ",prefix_ids,prefix_block_tokens"),
        "1 ids of 0 tokens",
    ),
    "ids that are text": (
        "t.csv",
        _own("1,a,T0,64,1,7 x,16", ",prefix_ids,prefix_block_tokens"),
        'line 3: prefix_ids: "x"',
    ),
    "huge id": (
        "t.csv",
        _own(f"1,a,T0,64,1,{2**63},16", ",prefix_ids,prefix_block_tokens"),
        "prefix_ids",
    ),
    "only failures": ("t.csv", BURST + "5,m,0,0\n6,m,0,9\n", "2 rows of 0 tokens"),
    "negative response": ("t.csv", BURST + "5,m,10,-1\n", "Response tokens"),
    "negative stamp": ("t.csv", BURST + "-5,m,10,1\n", "Timestamp"),
    "no decode tokens": ("t.csv", "num_prefill_tokens,num_decode_tokens\n5,0\n", "num_decode"),
    "a line that is no JSON": ("t.jsonl", json.dumps(MOON) + "\n{nope\n", "line 2"),
    "a line that is a list": ("t.jsonl", json.dumps(MOON) + "\n[1]\n", "line 2.*a JSON object"),
    "missing field": ("t.jsonl", _moon(hash_ids=None), "line 2: hash_ids: the field|hash_ids"),
    "text for a length": ("t.jsonl", _moon(input_length="long"), "input_length"),
    "true for a length": ("t.jsonl", _moon(output_length=True), "output_length"),
    "NaN stamp": ("t.jsonl", _moon(timestamp=float("nan")), "timestamp"),
    "fraction of a length": ("t.jsonl", _moon(input_length=600.5), "a whole number"),
    "zero length": ("t.jsonl", _moon(output_length=0), "output_length"),
    "too many ids": ("t.jsonl", _moon(hash_ids=[1, 2, 3]), "3 ids"),
    "ids that are no list": ("t.jsonl", _moon(hash_ids="1 2"), "a list of ids"),
    "text among ids": ("t.jsonl", _moon(hash_ids=[1, "2"]), "whole numbers"),
    "JSON of another shape": ("t.json", '{"a": {"b": 1}}', "formats"),
    "JSON cut short": ("t.json", _agent()[:-9], "must be JSON"),
    "deep JSON": ("t.json", '{"requests": ' + "[" * 100_000, "t.json"),
    "session of nothing": ("t.json", session([]), "at least one request"),
    "requests that are no list": ("t.json", '{"block_size": 64, "requests": 7}', "a list"),
    "no block size": ("t.json", '{"requests": [{}]}', "block_size"),
    "request that is no object": ("t.json", session([7]), "a JSON object"),  # type: ignore[list-item]
    "prompt of nothing": ("t.json", _agent(**{"in": 0}), r"requests\[0\]: in"),
    "negative answer": ("t.json", _agent(out=-1), r"requests\[0\]: out"),
    "no time": ("t.json", _agent(t="gone"), r"requests\[0\]: t"),
    "negative think time": ("t.json", _agent(think_time=-3), "think_time"),
    "more ids than blocks": ("t.json", _agent(hash_ids=[1, 2, 3, 4]), "one a block of 64"),
    "negative id": ("t.json", _agent(hash_ids=[-1]), "at least 0"),
    "sub-agent of nothing": ("t.json", session([{"type": "subagent", "t": 0}]), "plain requests"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_gives_one_line(write: Write, read: Read, kind: str) -> None:
    name, content, said = BAD[kind]
    path = write(name, content)
    with pytest.raises(TraceError, match=said) as caught:
        read(path)
    line = str(caught.value)
    assert "\n" not in line
    assert name in line
    assert len(line) < 500


def _directory(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "readme.txt").write_text("no traces")
    return tmp_path / "d"


def _empty_parquet(tmp_path: Path) -> Path:
    columns = {"arrival_s": [0.0], "tenant": ["a"], "tier": ["T0"], "prompt_tokens": [1],
               "output_tokens": [1]}  # fmt: skip
    pq.write_table(pa.table(columns).slice(0, 0), tmp_path / "t.parquet")
    return tmp_path / "t.parquet"


def _cut_parquet(tmp_path: Path) -> Path:
    path = _empty_parquet(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    return path


def _parquet_of_lists(tmp_path: Path) -> Path:
    columns = {"arrival_s": [0.0], "tenant": ["a"], "tier": ["T0"], "prompt_tokens": [[1]],
               "output_tokens": [1]}  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    return tmp_path / "t.parquet"


def _client(lines: str, lengths: str) -> Callable[[Path], Path]:
    def make(tmp_path: Path) -> Path:
        (tmp_path / "chunk-1-trace.csv").write_text(lines)
        (tmp_path / "chunk-1-dataset.json").write_text(lengths)
        return tmp_path

    return make


KNOWN = '{"0": {"input_tokens": "{1: 1}", "output_tokens": "{1: 1}"}}'
BAD_PLACES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a missing file": (lambda p: p / "none.csv", "No such file"),
    "a missing folder": (lambda p: p / "x" / "none.csv", "No such file"),
    "a directory without traces": (_directory, "a directory of trace_"),
    "a Parquet file without rows": (_empty_parquet, "no rows"),
    "a cut Parquet file": (_cut_parquet, "t.parquet"),
    "Parquet lists for numbers": (_parquet_of_lists, "a column of numbers"),
    "a pattern that nobody knows": (_client("0,1,1,Pareto,1,1\n", KNOWN), "Gamma, Weibull"),
    "windows out of order": (_client("600,1,1,,1,1\n0,1,1,,1,1\n", KNOWN), "line 2"),
    "a negative rate": (_client("0,-1,1,,1,1\n", KNOWN), "rate"),
    "an idle client": (_client("0,0,0,,0,0\n", KNOWN), "a client is active"),
    "no lengths at all": (
        _client("0,5,1,,1,1\n", '{"0": {"input_tokens": "{}", "output_tokens": "{}"}}'),
        "no window holds",
    ),
    "lengths of another shape": (_client("0,5,1,,1,1\n", '{"a": 1}'), "a window's start"),
    "lengths that are no file": (_client("0,5,1,,1,1\n", "{}"), "no windows"),
}


@pytest.mark.parametrize("kind", BAD_PLACES)
def test_a_bad_place_gives_one_line(tmp_path: Path, read: Read, kind: str) -> None:
    make, said = BAD_PLACES[kind]
    with pytest.raises(TraceError, match=said) as caught:
        read(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_unknown_format(write: Write, read: Read) -> None:
    with pytest.raises(FlagError, match='did you mean "azure"'):
        read(write("t.csv", AZURE), format="azur")


def test_a_directory_in_a_format_of_files(tmp_path: Path, read: Read) -> None:
    with pytest.raises(TraceError, match="it is a directory"):
        read(tmp_path, format="azure")


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_context_tokens", 0), ("max_idle_s", -1.0), ("window_s", 0.0), ("rate_per_s", np.nan)],
)
def test_options_out_of_bounds(write: Write, read: Read, name: str, value: float) -> None:
    with pytest.raises(FlagError, match=name.replace("_", "-")):
        read(write("t.csv", AZURE), **{name: value})


def test_an_unreadable_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("t.csv", AZURE)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match="Permission denied"):
        read_trace(path, rng=np.random.default_rng(0))
