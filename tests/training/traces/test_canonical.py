"""Trimtab's own form: lossless, streamed, atomic."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from dataclasses import fields
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.media import AUDIO, IMAGE, MediaItems
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces import read_trace, write_trace
from trimtab.training.traces.merge import merge

from .conftest import Read, Write


def _again(trace: Trace, suffix: str) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"t{suffix}"
        write_trace(trace, path)
        return read_trace(path, rng=np.random.default_rng(0))


def _media(rng: np.random.Generator, prompt_tokens: np.ndarray) -> MediaItems:
    """Up to three items a prompt, apart from one another or touching."""
    counts = rng.integers(0, 4, len(prompt_tokens))
    cuts = [
        np.sort(rng.choice(n, 2 * k, replace=False))
        for n, k in zip(prompt_tokens, counts, strict=True)
    ]
    ends = np.concatenate(cuts).reshape(-1, 2) if counts.sum() else np.zeros((0, 2), np.int64)
    kind = rng.integers(0, 3, len(ends))
    # Few lengths: equal contents are of one kind and one length.
    tokens = np.minimum(ends[:, 1] - ends[:, 0], 1 + rng.integers(0, 2, len(ends)))
    return MediaItems(
        offsets=np.r_[0, np.cumsum(counts)].astype(np.int64),
        kind=kind.astype(np.int32),
        start_tokens=ends[:, 0].astype(np.int32),
        tokens=tokens.astype(np.int32),
        content=(3 * kind + tokens).astype(np.int32),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Traces with every column, some of them empty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    pieces = []
    for number in range(draw(st.integers(1, 3))):
        n = draw(st.integers(1, 6))
        closed = draw(st.booleans())
        lengths = rng.integers(0, 4, n) * draw(st.booleans())
        prompt = rng.integers(300, 2000, n)
        seen = _media(rng, prompt) if draw(st.booleans()) else MediaItems.none(n)
        pieces.append(
            Trace.build(
                arrival_s=np.sort(rng.exponential(10.0, n)),
                prompt_tokens=prompt,
                output_tokens=rng.integers(1, 50, n),
                media=seen,
                tier_names=(f"T{number}",),
                tenant=rng.integers(0, 2, n),
                tenant_names=(f'a "b", {number}', f"c-{number}"),
                session=np.full(n, 0 if closed else -1, np.int32),
                turn=np.arange(n, dtype=np.int32) * closed,
                think_s=rng.exponential(1.0, n) * closed,
                prefix_offsets=np.r_[0, np.cumsum(lengths)].astype(np.int64),
                prefix_ids=rng.integers(0, 9, int(lengths.sum())).astype(np.int32),
                prefix_block_tokens=np.where(lengths > 0, 64, 0).astype(np.int32),
                cancel_after_s=np.where(rng.random(n) < 0.5, np.inf, rng.exponential(9.0, n)),
                stop_reason=rng.integers(0, 2, n).astype(np.int32),
                stop_names=("", "end_turn"),
                acceptance=np.where(rng.random(n) < 0.5, np.nan, rng.random(n)),
            )
        )
    return merge(pieces)


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
@settings(max_examples=60)
@given(trace=traces())
def test_what_is_written_is_read_again(suffix: str, trace: Trace) -> None:
    assert _again(trace, suffix).digest() == trace.digest()


def test_parquet_keeps_names_in_any_order_and_notes(tmp_path: Path) -> None:
    trace = Trace.build(
        arrival_s=[0.0],
        prompt_tokens=[1],
        output_tokens=[1],
        tier=1,
        tier_names=("gold", "T10", "T9"),
        tenant_names=("z", "a"),
        notes=("One.", "Two."),
    )
    again = _again(trace, ".parquet")
    assert again.digest() == trace.digest()
    assert again.notes == trace.notes


def test_a_csv_by_hand(write: Write, read: Read) -> None:
    text = (
        "arrival_s,tenant,tier,prompt_tokens,output_tokens,session,turn,think_s,prefix_ids,"
        "prefix_block_tokens\n"
        "1.5,acme,T1,200,5,s-b,0,,70 80 90,64\n"
        ",acme,T1,300.0,5,s-b,1,2.5,70 80 90 95,64\n"
        "0.5,zoo,T0,10,1,,,,,\n"
    )
    trace = read(write("t.csv", text))
    assert trace.arrival_s.tolist() == [0.5, 1.5, 1.5]
    assert trace.turn.tolist() == [0, 0, 1]
    assert trace.session.tolist() == [-1, 0, 0]
    assert trace.think_s.tolist() == [0.0, 0.0, 2.5]
    assert trace.prefix_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert trace.prefix_block_tokens.tolist() == [0, 64, 64]
    assert trace.tier_names == ("T0", "T1")


def test_parquet_of_other_writers(tmp_path: Path, read: Read) -> None:
    table = pa.table(
        {
            "arrival_s": pa.array([0, 1, 2], pa.int64()),
            "tenant": pa.array(["b", "a", "b"]).dictionary_encode(),
            "tier": ["T0", "T0", "T1"],
            "prompt_tokens": pa.array([5.0, 6.0, 7.0]),
            "output_tokens": pa.array([1, 2, 3], pa.uint8()),
            "prefix_ids": pa.array([None, None, None], pa.list_(pa.int64())),
            "prefix_block_tokens": pa.array([None, None, None], pa.int32()),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    trace = read(tmp_path / "t.parquet")
    assert trace.tenant_names == ("a", "b")
    assert trace.tenant.tolist() == [1, 0, 1]
    assert trace.prompt_tokens.tolist() == [5, 6, 7]


def test_reading_needs_little_more_than_the_columns(tmp_path: Path, read: Read) -> None:
    n = 400_000
    trace = Trace.build(
        arrival_s=np.arange(n) * 0.01,
        prompt_tokens=np.full(n, 100),
        output_tokens=np.full(n, 10),
    )
    path = tmp_path / "t.parquet"
    write_trace(trace, path)
    size = sum(
        getattr(trace, f.name).nbytes
        for f in fields(trace)
        if isinstance(getattr(trace, f.name), np.ndarray)
    )
    tracemalloc.start()
    read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    chunk = 131_072 * 8 * 5 * 2
    assert peak < 1.15 * size + chunk


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("old")
    trace = Trace.build(arrival_s=[0.0], prompt_tokens=[1], output_tokens=[1])

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_batch", full)
    with pytest.raises(TraceError, match="No space left"):
        write_trace(trace, path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["t.parquet"]


@pytest.mark.parametrize("name", ["t.txt", "missing/t.csv", "t", "folder.csv"])
def test_places_that_no_trace_can_be_written_to(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.csv").mkdir()
    trace = Trace.build(arrival_s=[0.0], prompt_tokens=[1], output_tokens=[1])
    with pytest.raises(TraceError):
        write_trace(trace, tmp_path / name)


HEAD = "arrival_s,tenant,tier,prompt_tokens,output_tokens,"


def test_media_by_hand(write: Write, read: Read) -> None:
    text = (
        HEAD + "media\n"
        "1,a,T0,900,5,image:100 audio:50@300#clip image:20#7\n"
        "2,a,T0,900,5,\n"
        "3,a,T0,900,5,image:100#7 video:400#clip image:100\n"
    )
    media = read(write("t.csv", text)).media
    assert media.offsets.tolist() == [0, 3, 3, 6]
    assert media.kind.tolist() == [IMAGE, AUDIO, IMAGE, IMAGE, 2, IMAGE]
    assert media.start_tokens.tolist() == [0, 300, 350, 0, 100, 500]
    assert media.tokens.tolist() == [100, 50, 20, 100, 400, 100]
    # 7 is the only number, then the name, then the two that name nothing, each for itself. What
    # has another kind or length is something else under the same name.
    assert media.content.tolist() == [4, 2, 0, 1, 3, 5]


def test_equal_contents_are_of_one_kind_and_length(write: Write, read: Read) -> None:
    text = HEAD + "media\n1,a,T0,900,5,image:9#x image:9#x image:8#x audio:9#x image:9#y\n"
    assert read(write("t.csv", text)).media.content.tolist() == [1, 1, 0, 2, 3]


def test_media_of_rows_out_of_order_stay_with_their_rows(write: Write, read: Read) -> None:
    text = HEAD + "media\n5,a,T0,900,5,image:100@7\n2,a,T0,90,5,audio:9 audio:8\n"
    trace = read(write("t.csv", text))
    assert trace.prompt_tokens.tolist() == [90, 900]
    assert trace.media.start_tokens.tolist() == [0, 9, 7]


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        (
            "90,imge:10",
            r't.csv line 3: media: "imge:10".*image, audio, video.*did you mean "image"',
        ),
        ("90,image:0", r'line 3: media: "image:0".*1 to 10,000,000 tokens'),
        ("90,image", r'line 3: media: "image".*kind:tokens@start#content'),
        ("90,image:10@-3", "kind:tokens@start#content"),
        ("90,image:10@85", "image:10@85 in a prompt of 90 tokens.*ends inside the prompt"),
        ("90,image:30@50 image:30@10", "image:30@10 .*order of the prompt"),
        ("90,image:30@50 image:10@79", "none over another"),
    ],
)
def test_media_that_are_none(write: Write, read: Read, cells: str, says: str) -> None:
    path = write("t.csv", f"{HEAD}media\n1,a,T0,90,5,\n2,a,T0,{cells.replace(',', ',5,', 1)}\n")
    with pytest.raises(TraceError, match=says):
        read(path)


def test_image_tokens_beside_media_may_say_the_same_only(write: Write, read: Read) -> None:
    head = HEAD + "image_tokens,media\n"
    same = "1,a,T0,90,5,40,image:30 audio:10 image:10\n2,a,T0,90,5,,image:9\n3,a,T0,90,5,0,\n"
    assert read(write("t.csv", head + same)).image_tokens.tolist() == [40, 9, 0]
    with pytest.raises(TraceError, match=r"line 2: image_tokens: 40.*30, .*media"):
        read(write("u.csv", head + "1,a,T0,90,5,40,image:30\n"))
    with pytest.raises(TraceError, match=r"line 2: image_tokens: 40.*0, .*media"):
        read(write("u.csv", head + "1,a,T0,90,5,40,\n"))
    with pytest.raises(TraceError, match=r"line 2: image_tokens: 91.*at most prompt_tokens"):
        read(write("u.csv", HEAD + "image_tokens\n1,a,T0,90,5,91\n"))


def test_media_of_other_writers(tmp_path: Path, read: Read) -> None:
    table = pa.table(
        {
            "arrival_s": [0.0, 1.0, 2.0],
            "tenant": ["a", "a", "a"],
            "tier": ["T0", "T0", "T0"],
            "prompt_tokens": [50, 60, 70],
            "output_tokens": [1, 1, 1],
            "media": pa.array([["image:50"], None, []], pa.list_(pa.string())),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    assert read(tmp_path / "t.parquet").media.offsets.tolist() == [0, 1, 1, 1]
    wrong = table.set_column(5, "media", pa.array([[5], None, []]))
    pq.write_table(wrong, tmp_path / "t.parquet")
    with pytest.raises(TraceError, match="media"):
        read(tmp_path / "t.parquet")
