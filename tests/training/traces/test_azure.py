"""The Azure traces: exact times, silence, CRLF, unfinished last line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trimtab.engine_bridge.errors import TraceError

from .conftest import Read, Write

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
ROWS = (
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:46.6805901,396,109\r\n"
    "2023-11-16 18:19:46.6805900,879,55"
)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "no-suffix"])
def test_seven_digits_crlf_and_an_unfinished_last_line(write: Write, read: Read, name: str) -> None:
    trace = read(write(name, HEADER + ROWS))
    assert trace.arrival_s.tolist() == [0.0, 1e-7, 240.0]
    assert trace.prompt_tokens.tolist() == [374, 396, 879]
    assert trace.output_tokens.tolist() == [44, 109, 55]
    assert trace.notes == ()


def test_whole_seconds_and_zones_of_the_later_release(write: Write, read: Read) -> None:
    rows = "2024-05-10 00:00:00+00:00,1,2\n2024-05-10 00:00:00.009930+00:00,3,4\n"
    trace = read(write("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows))
    assert trace.arrival_s.tolist() == [0.0, 0.00993]


def test_rows_out_of_order_are_sorted_and_noted(write: Write, read: Read) -> None:
    rows = "2023-11-16 18:15:47,1,2\r\n2023-11-16 18:15:46,3,4\r\n"
    trace = read(write("a.csv", HEADER + rows))
    assert trace.arrival_s.tolist() == [0.0, 1.0]
    assert trace.prompt_tokens.tolist() == [3, 1]
    assert "1 rows stood after a later one" in trace.notes[0]


def test_a_byte_order_mark_is_no_part_of_a_name(write: Write, read: Read) -> None:
    assert len(read(write("a.csv", b"\xef\xbb\xbf" + (HEADER + ROWS).encode()))) == 3


def test_the_real_conversation_slice(shared_dir: Path, read: Read) -> None:
    trace = read(shared_dir / "traces/azure-2023/AzureLLMInferenceTrace_conv.csv.gz")
    assert len(trace) == 13_531
    assert round(trace.prompt_tokens.mean()) == 1208
    assert round(trace.output_tokens.mean()) == 200
    gaps = np.diff(trace.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.08, abs=0.005)


def test_the_real_code_slice_stays_silent(shared_dir: Path, read: Read) -> None:
    trace = read(shared_dir / "traces/azure-2023/AzureLLMInferenceTrace_code.csv.gz")
    assert len(trace) == 7015
    assert trace.prompt_tokens.max() == 7437
    a_minute = np.bincount((trace.arrival_s // 60).astype(np.int64))
    assert a_minute.min() == 0
    assert a_minute.max() > 500
    assert np.diff(trace.arrival_s).max() == pytest.approx(174, abs=1)


LMM = (
    "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
    "2024-10-15T12:00:00.269Z,0,770,491\n"
    "2024-10-15T12:00:05.819Z,1,949,126\n"
    "2024-10-15T12:00:06.513Z,16,4564,137\n"
    "2024-10-15T12:00:07.000Z,0,0,5\n"
    "2024-10-15T12:00:08.000Z,3,3,5\n"
)


def test_the_release_with_images(write: Write, read: Read) -> None:
    trace = read(write("m.csv.gz", LMM))
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 5.55, 6.244, 7.731])
    assert trace.prompt_tokens.tolist() == [770, 949, 4564, 3]
    # 255 each; of the last row's three images two find a token beside one of text.
    assert np.diff(trace.media.offsets).tolist() == [0, 1, 16, 2]
    assert trace.image_tokens.tolist() == [0, 255, 16 * 255, 2]
    assert trace.media.start_tokens[1:4].tolist() == [0, 255, 510]
    assert len(np.unique(trace.media.content)) == 19
    assert "1 rows of 0 tokens left out" in trace.notes[0]
    assert "an assumption; fewer in 1 prompts" in trace.notes[1]


def test_images_of_another_size_are_cut_to_their_prompts(write: Write, read: Read) -> None:
    trace = read(write("m.csv", LMM), tokens_per_image=765)
    assert trace.image_tokens.tolist() == [0, 765, 16 * (4563 // 16), 2]
    assert "fewer in 2 prompts" in trace.notes[1]


def test_cells_of_images_that_are_none(write: Write, read: Read) -> None:
    with pytest.raises(TraceError, match="line 2: NumImages"):
        read(write("m.csv", LMM.replace("0,770", "-1,770")))
