"""The step log: whole files, bounded, and a bad disk that costs rows but never the engine."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trimtab.engine_bridge.vllm.rotating_parquet import Limits, LogFolderError, write_parquet
from trimtab.engine_bridge.vllm.step_log import COLUMNS, ENCODED, METADATA_KEY, StepLog

WAIT_S = 10.0


def add(log: StepLog, time_s: float, **fields: Any) -> None:
    row: dict[str, Any] = {name: 0 for name in COLUMNS if name not in ENCODED}
    row |= {"time_s": time_s, "step_ms": 10.0} | fields
    log.add(**row)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("steps-*.parquet"))


def test_steps_come_back_as_they_were(tmp_path: Path) -> None:
    log = StepLog(tmp_path, engine="h100:x", plan_digest="abc", origin_unix_s=1.7e9)
    row = (0.5, 12.25, 32, 64_000, 2, 512, 1.5e6, 33, 4, 4100, 1, 3)
    encoded = (2, 1152, 1, 300, 0, 0)
    log.add(*row, encoded)
    log.close()
    (file,) = files(tmp_path)
    table = pq.read_table(file)
    assert table.column_names == list(COLUMNS)
    assert table.to_pylist() == [dict(zip(COLUMNS, (*row, *encoded), strict=True))]
    assert ENCODED[:4] == ("image_items", "image_tokens", "audio_items", "audio_tokens")
    facts = json.loads(pq.read_schema(file).metadata[METADATA_KEY])
    assert facts == {
        "schema": 1,
        "engine": "h100:x",
        "plan_digest": "abc",
        "origin_unix_s": 1.7e9,
        "dropped_rows": 0,
    }


def test_the_calibration_reads_it(tmp_path: Path) -> None:
    step_log = pytest.importorskip("trimtab.training.calibration.step_log")
    log = StepLog(tmp_path, engine="x", plan_digest="y")
    for n in range(50):
        add(log, n * 0.01, decodes=8, kv_tokens=8000 + n, step_ms=7.0)
    add(log, 1.0, chunks=1, chunk_tokens=600, encoded=(0, 0, 2, 750, 0, 0))
    log.close()
    (file,) = files(tmp_path)
    read = step_log.read_step_log(file)
    assert step_log.ENCODED_COLUMNS == ENCODED
    # A step that encodes says nothing of the language model.
    assert len(read.table) == 50
    assert len(read.encoding) == 1
    assert read.encoded.tolist() == [[0, 0, 2, 750, 0, 0]]


def test_a_full_buffer_becomes_a_file_and_close_writes_the_rest(tmp_path: Path) -> None:
    log = StepLog(tmp_path, engine="x", plan_digest="y", rows_per_file=10)
    for n in range(25):
        add(log, n * 0.01)
    log.close()
    tables = [pq.read_table(file) for file in files(tmp_path)]
    assert [len(table) for table in tables] == [10, 10, 5]
    times = pa.concat_tables(tables)["time_s"].to_pylist()
    assert times == [n * 0.01 for n in range(25)]
    assert (log.written_rows, log.dropped_rows) == (25, 0)


def test_a_quiet_engine_writes_by_time(tmp_path: Path) -> None:
    log = StepLog(tmp_path, engine="x", plan_digest="y", longest_s=60.0)
    for time_s in (0.0, 59.0, 60.0, 61.0):
        add(log, time_s)
    log.close()
    assert [len(pq.read_table(file)) for file in files(tmp_path)] == [3, 1]


def test_the_oldest_files_go_first(tmp_path: Path) -> None:
    log = StepLog(
        tmp_path, engine="x", plan_digest="y", rows_per_file=10, limits=Limits(most_files=3)
    )
    written = threading.Event()
    for n in range(80):
        add(log, float(n))
        if n % 10 == 9:
            # The writer may be behind: what matters here is what it deletes.
            while log.written_rows + log.dropped_rows < n + 1:
                written.wait(0.001)
    log.close()
    assert log.dropped_rows == 0
    kept = [pq.read_table(file)["time_s"][0].as_py() for file in files(tmp_path)]
    assert kept == [50.0, 60.0, 70.0]


def test_all_files_together_stay_below_the_bytes_allowed(tmp_path: Path) -> None:
    most = 20_000
    log = StepLog(
        tmp_path, engine="x", plan_digest="y", rows_per_file=100, limits=Limits(most_bytes=most)
    )
    for n in range(2000):
        add(log, float(n))
        if n % 100 == 99:
            log_wait(log, n + 1)
    log.close()
    assert 1 < len(files(tmp_path)) < 20
    assert sum(file.stat().st_size for file in files(tmp_path)) <= most


def log_wait(log: StepLog, rows: int) -> None:
    pause = threading.Event()
    while log.written_rows + log.dropped_rows < rows:
        pause.wait(0.001)


def test_a_slow_disk_costs_whole_buffers_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = threading.Event()

    def slow(table: pa.Table, path: Path) -> None:
        free.wait(WAIT_S)
        write_parquet(table, path)

    log = StepLog(tmp_path, engine="x", plan_digest="y", rows_per_file=10, write=slow)
    with caplog.at_level(logging.WARNING, "trimtab.logs"):
        for n in range(200):
            add(log, float(n))
    free.set()
    log.close(WAIT_S)
    assert log.dropped_rows > 0
    assert log.dropped_rows % 10 == 0
    assert log.written_rows + log.dropped_rows == 200
    assert sum(len(pq.read_table(file)) for file in files(tmp_path)) == log.written_rows
    assert len(caplog.records) == 1
    assert "too slow" in caplog.text


def test_a_full_disk_costs_rows_until_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = [False]

    def write(table: pa.Table, path: Path) -> None:
        if not room[0]:
            path.write_bytes(b"PAR1 half a file")
            raise OSError(28, "No space left on device")
        write_parquet(table, path)

    log = StepLog(tmp_path, engine="x", plan_digest="y", rows_per_file=10, write=write)
    for n in range(20):
        add(log, float(n))
        log_wait(log, (n + 1) // 10 * 10)
    assert (log.dropped_rows, files(tmp_path)) == (20, [])
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1
    room[0] = True
    for n in range(20, 30):
        add(log, float(n))
    log.close()
    (file,) = files(tmp_path)
    assert json.loads(pq.read_schema(file).metadata[METADATA_KEY])["dropped_rows"] == 20
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_really_full_device_is_survived(tmp_path: Path) -> None:
    def write(table: pa.Table, path: Path) -> None:
        write_parquet(table, Path("/dev/full"))

    log = StepLog(tmp_path, engine="x", plan_digest="y", write=write)
    add(log, 0.0)
    log.close()
    assert log.dropped_rows == 1


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def write(table: pa.Table, path: Path) -> None:
        write_parquet(table, path)
        seen.append([p.name for p in files(tmp_path)])

    log = StepLog(tmp_path, engine="x", plan_digest="y", write=write)
    add(log, 0.0)
    log.close()
    assert seen == [[]]
    assert len(files(tmp_path)) == 1


def test_files_are_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    log = StepLog(folder, engine="x", plan_digest="y")
    add(log, 0.0)
    log.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(files(folder)[0].stat().st_mode) == 0o600


def test_what_a_dead_engine_left_half_written_is_tidied(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".steps-1.parquet.part", tmp_path / ".steps-2.parquet.part"
    for part in (old, fresh):
        part.touch()
    os.utime(old, (0, 0))
    StepLog(tmp_path, engine="x", plan_digest="y").close()
    assert not old.exists()
    assert fresh.exists()


def test_a_folder_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LogFolderError, match="cannot be written"):
        StepLog(tmp_path / "file" / "log", engine="x", plan_digest="y")
