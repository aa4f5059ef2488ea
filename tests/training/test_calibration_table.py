"""Bad tables of step times: each kind gives one line that says where and what."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.engine_bridge.errors import TableError
from trimtab.training.calibration.table import REQUIRED, read_step_table

HEADER = ",".join(REQUIRED)
GOOD = "M,1,decode,0,0,4,100,6.5"

BAD_TABLES = {
    "empty file": (b"", "an empty file"),
    "blank header": (b"\n", "an empty file"),
    "header only": (HEADER.encode(), "no rows"),
    "missing column": (HEADER.replace(",iter_ms", "").encode(), "iter_ms"),
    "column twice": (f"{HEADER},tp\n".encode(), "twice"),
    "binary": (b"\xff\xfe\x00\x9f", "binary data"),
    "no such row": (f"{HEADER}\nN,1,decode,0,0,4,100,6.5\n".encode(), "N tp 1 (1)"),
    "other tp": (f"{HEADER}\nM,2,decode,0,0,4,100,6.5\n".encode(), "M tp 2 (1)"),
    "short row": (f"{HEADER}\n{GOOD}\nM,1,decode\n".encode(), "row 3"),
    "long row": (f"{HEADER}\n{GOOD},7\n".encode(), "9 cells"),
    "open quote": (f'{HEADER}\n"M,1\n'.encode(), "CSV"),
    "unknown kind": (f"{HEADER}\nM,1,decoding,0,0,4,100,6.5\n".encode(), 'did you mean "decode"'),
    "text for a number": (f"{HEADER}\nM,1,decode,0,0,four,100,6.5\n".encode(), "decode_batch"),
    "empty cell": (f"{HEADER}\nM,1,decode,0,0,4,100,\n".encode(), "fill in"),
    "negative time": (f"{HEADER}\nM,1,decode,0,0,4,100,-6.5\n".encode(), "-6.5"),
    "zero time": (f"{HEADER}\nM,1,decode,0,0,4,100,0\n".encode(), "iter_ms"),
    "NaN time": (f"{HEADER}\nM,1,decode,0,0,4,100,nan\n".encode(), "nan"),
    "infinite time": (f"{HEADER}\nM,1,decode,0,0,4,100,inf\n".encode(), "inf"),
    "half a request": (f"{HEADER}\nM,1,decode,0,0,4.5,100,6.5\n".encode(), "whole number"),
    "negative tokens": (f"{HEADER}\nM,1,prefill,-8,0,0,0,6.5\n".encode(), "prefill_tokens"),
    "decode of nothing": (f"{HEADER}\nM,1,decode,0,0,0,0,6.5\n".encode(), "decode_batch"),
    "decode without context": (f"{HEADER}\nM,1,decode,0,0,4,0,6.5\n".encode(), "decode_context"),
    "decode with prefill": (f"{HEADER}\nM,1,decode,64,0,4,9,6.5\n".encode(), "prefill_tokens"),
    "prefill with decode": (f"{HEADER}\nM,1,prefill,64,0,4,9,6.5\n".encode(), "decode_batch"),
    "tp of zero": (f"{HEADER}\nM,0,decode,0,0,4,100,6.5\n".encode(), "tp"),
    "bad part": (f"{HEADER},nonattn_ms\n{GOOD},much\n".encode(), "nonattn_ms"),
    "no chunks": (f"{HEADER},prefill_chunks\nM,1,prefill,8,0,0,0,6.5,0\n".encode(), "chunks"),
}


@pytest.mark.parametrize("kind", BAD_TABLES)
def test_a_bad_table_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    data, expected = BAD_TABLES[kind]
    path = tmp_path / "steps.csv"
    path.write_bytes(data)
    with pytest.raises(TableError) as caught:
        read_step_table(path, model="M", tp=1)
    line = str(caught.value)
    assert "steps.csv" in line
    assert expected in line
    assert "\n" not in line


def test_a_source_filter_needs_the_column(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(f"{HEADER}\n{GOOD}\n")
    with pytest.raises(TableError, match="source"):
        read_step_table(path, model="M", tp=1, source="vidur")


def test_a_source_that_no_row_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(f"{HEADER},source\n{GOOD},made\n")
    with pytest.raises(TableError, match="vidur"):
        read_step_table(path, model="M", tp=1, source="vidur")


def test_absent_files_and_folders_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere.csv"):
        with pytest.raises(TableError):
            read_step_table(path, model="M", tp=1)


def test_byte_order_marks_and_carriage_returns_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_bytes(f"\ufeff{HEADER}\r\n{GOOD}\r\n\r\n".encode())
    assert len(read_step_table(path, model="M", tp=1)) == 1


GARBAGE = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=300).map(str.encode),
    st.text(max_size=100).map(lambda text: f"{HEADER}\n{text}\n".encode()),
    st.lists(
        st.one_of(st.sampled_from([*GOOD.split(","), "", "nan", "1e400", "-1"]), st.text()),
        min_size=8,
        max_size=8,
    ).map(lambda cells: f"{HEADER}\n{','.join(cells)}\n".encode()),
)


@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(GARBAGE)
def test_garbage_is_read_or_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "garbage.csv"
    path.write_bytes(data)
    refused = ""
    try:
        rows = len(read_step_table(path, model="M", tp=1))
    except TableError as error:
        rows, refused = 0, str(error)
    assert bool(rows) != bool(refused)
    assert "\n" not in refused
