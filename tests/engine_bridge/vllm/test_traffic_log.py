"""The traffic log: a trace that what-if reads, and nothing in it that gives content away."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from trimtab.controller.cli.app import main
from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.media import AUDIO, IMAGE
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.rotating_parquet import LogFolderError
from trimtab.engine_bridge.vllm.settings import PluginSettings
from trimtab.engine_bridge.vllm.traffic_log import METADATA_KEY, SECRET_FILE, Item, TrafficLog
from trimtab.engine_bridge.vllm.watch import Watch
from trimtab.training.traces import canonical, detect_format, read_trace, traffic_log


def hashes(*blocks: str) -> list[bytes]:
    """Chained hashes of blocks, as the engine makes them."""
    chain, last = [], b""
    for block in blocks:
        last = hashlib.sha256(last + block.encode()).digest()
        chain.append(last)
    return chain


def new(folder: Path, **options: Any) -> TrafficLog:
    usual: dict[str, Any] = {"engine": "x", "plan_digest": "y", "origin_unix_s": 1e9}
    return TrafficLog(folder, **(usual | options))


def add(log: TrafficLog, arrival_s: float, **fields: Any) -> None:
    usual: dict[str, Any] = {
        "tenant": "acme",
        "tier": "T0",
        "prompt_tokens": 100,
        "output_tokens": 20,
        "ttft_s": 0.2,
        "e2e_s": 1.5,
    }
    log.add(arrival_s=arrival_s, **(usual | fields))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("traffic-*.parquet"))


def read(path: Path) -> Trace:
    return read_trace(path, rng=np.random.default_rng(0))


def test_requests_come_back_as_a_trace(tmp_path: Path) -> None:
    log = new(tmp_path)
    add(log, 10.0, stop_reason="tool_use", block_hashes=hashes("a", "b"), prefix_block_tokens=16)
    add(log, 12.5, tenant="zoo", tier="T3", prompt_tokens=7, output_tokens=3)
    log.close()
    trace = read(tmp_path)
    assert trace.arrival_s.tolist() == [0.0, 2.5]
    assert [trace.tenant_names[n] for n in trace.tenant] == ["acme", "zoo"]
    assert [trace.tier_names[n] for n in trace.tier] == ["T0", "T3"]
    assert trace.prompt_tokens.tolist() == [100, 7]
    assert trace.output_tokens.tolist() == [20, 3]
    assert trace.stop_names[trace.stop_reason[0]] == "tool_use"
    assert trace.prefix_offsets.tolist() == [0, 2, 2]
    assert trace.prefix_block_tokens.tolist() == [16, 0]


def test_what_the_engine_did_is_there_for_whoever_opens_the_file(tmp_path: Path) -> None:
    log = new(tmp_path)
    add(log, 1.0, cached_tokens=64, preemptions=2, ttft_s=None, outcome="failed")
    log.close()
    (row,) = pq.read_table(files(tmp_path)[0]).to_pylist()
    assert row["cached_tokens"] == 64
    assert (row["preemptions"], row["ttft_s"], row["outcome"]) == (2, None, "failed")
    facts = json.loads(pq.read_schema(files(tmp_path)[0]).metadata[METADATA_KEY])
    assert facts["origin_unix_s"] == 1e9
    assert facts["plan_digest"] == "y"


def test_the_columns_are_those_that_the_reader_knows(tmp_path: Path) -> None:
    log = new(tmp_path)
    add(log, 0.0)
    log.close()
    names = set(pq.read_schema(files(tmp_path)[0]).names)
    assert set(canonical.WANTED) <= names
    assert names <= {*canonical.WANTED, *canonical.OPTIONAL, *traffic_log.RECORDED}
    assert set(traffic_log.RECORDED) <= names
    assert traffic_log.METADATA_KEY == METADATA_KEY


def test_several_files_are_one_trace_in_order_of_arrival(tmp_path: Path) -> None:
    log = new(tmp_path, rows_per_file=2)
    for arrival_s in (5.0, 3.0, 8.0, 4.0, 9.0):
        add(log, arrival_s)
    log.close()
    assert len(files(tmp_path)) == 3
    assert detect_format(tmp_path) == "trimtab"
    assert read(tmp_path).arrival_s.tolist() == [0.0, 1.0, 2.0, 5.0, 6.0]


def test_engines_that_began_at_different_times_are_put_on_one_clock(tmp_path: Path) -> None:
    for origin_unix_s, tenant in ((1000.0, "first"), (1060.0, "second")):
        log = new(tmp_path, origin_unix_s=origin_unix_s)
        add(log, 30.0, tenant=tenant)
        add(log, 40.0, tenant=tenant)
        log.close()
    trace = read(tmp_path)
    assert trace.arrival_s.tolist() == [0.0, 10.0, 60.0, 70.0]
    assert [trace.tenant_names[n] for n in trace.tenant] == ["first", "first", "second", "second"]


def test_one_file_of_a_log_is_a_trace_too(tmp_path: Path) -> None:
    log = new(tmp_path)
    add(log, 7.0)
    log.close()
    assert read(files(tmp_path)[0]).arrival_s.tolist() == [0.0]


def test_the_command_line_reads_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "log"
    log = new(folder, rows_per_file=20)
    for n in range(50):
        add(log, n * 0.5, outcome="cancelled" if n == 7 else "finished")
    log.close()
    out = tmp_path / "info.json"
    assert main(["trace", "info", str(folder), "--json", str(out)]) == 0
    summary = json.loads(out.read_text())
    assert summary["rows"] == 50
    assert "1 requests did not end with their last token" in capsys.readouterr().out
    assert main(["trace", "convert", str(folder), "--out", str(tmp_path / "t.parquet")]) == 0


def test_a_cancelled_request_says_when_its_client_gave_up(tmp_path: Path) -> None:
    log = new(tmp_path)
    add(log, 0.0, outcome="cancelled", e2e_s=3.25, output_tokens=0)
    add(log, 1.0)
    log.close()
    trace = read(tmp_path)
    assert trace.cancel_after_s.tolist() == [3.25, np.inf]
    assert trace.output_tokens.tolist() == [1, 20]


def test_equal_prefixes_have_equal_ids_across_files_and_restarts(tmp_path: Path) -> None:
    for start in (0.0, 100.0):
        log = new(tmp_path)
        add(log, start, block_hashes=hashes("a", "b", "c"), prefix_block_tokens=16)
        add(log, start + 1, block_hashes=hashes("a", "b", "d"), prefix_block_tokens=16)
        log.close()
    trace = read(tmp_path)
    rows = trace.prefix_ids.reshape(4, 3).tolist()
    assert rows[0] == rows[2]
    assert rows[1] == rows[3]
    assert rows[0][:2] == rows[1][:2]
    assert rows[0][2] != rows[1][2]


def test_ids_stay_inside_the_tokens_of_the_request(tmp_path: Path) -> None:
    log = new(tmp_path)
    chain = hashes(*"abcdefgh")
    add(log, 0.0, prompt_tokens=40, output_tokens=9, block_hashes=chain, prefix_block_tokens=16)
    log.close()
    assert len(read(tmp_path).prefix_ids) == 3


def test_ids_cannot_be_checked_against_a_guess_without_the_secret(tmp_path: Path) -> None:
    chain, ids = hashes("the prompt that someone guesses"), []
    for name in ("one", "two"):
        log = new(tmp_path / name)
        add(log, 0.0, block_hashes=chain, prefix_block_tokens=16)
        log.close()
        (row,) = pq.read_table(files(tmp_path / name)[0]).to_pylist()
        ids += row["prefix_ids"]
        data = files(tmp_path / name)[0].read_bytes()
        assert chain[0] not in data
        assert (tmp_path / name / SECRET_FILE).read_bytes() not in data
    assert ids[0] != ids[1]
    assert ids[0] != int.from_bytes(chain[0][:8], "big") & (2**63 - 1)


def test_media_are_named_by_a_keyed_hash_that_is_equal_where_they_are(tmp_path: Path) -> None:
    seen = []
    for name in ("one", "one", "two"):
        log = new(tmp_path / name)
        add(log, 0.0, media=[Item("image", 3, 40, "cat"), Item("audio", 50, 20, "purr")])
        add(log, 1.0, media=[Item("image", 0, 40, "cat")])
        add(log, 2.0)
        log.close()
        table = pq.read_table(files(tmp_path / name)[-1])
        seen.append(table["media"].to_pylist())
    cat = seen[0][1][0].removeprefix("image:40@0#")
    assert seen[0][0][0] == f"image:40@3#{cat}"
    assert re.fullmatch(r"audio:20@50#\d+", seen[0][0][1])
    assert not seen[0][0][1].endswith(cat)
    assert seen[0][2] == []
    # After a restart in the folder the same, in another folder another.
    assert seen[1] == seen[0]
    assert seen[2][1] != seen[0][1]
    assert b"cat" not in files(tmp_path / "one")[0].read_bytes()


def test_media_come_back_as_a_trace_has_them(tmp_path: Path) -> None:
    log = new(tmp_path)
    add(log, 0.0, media=[Item("image", 3, 40, "cat"), Item("audio", 50, 20, "purr")])
    add(log, 1.0)
    add(log, 2.0, media=[Item("image", 0, 40, "cat")])
    log.close()
    media = read(tmp_path).media
    assert media.offsets.tolist() == [0, 2, 2, 3]
    assert media.kind.tolist() == [IMAGE, AUDIO, IMAGE]
    assert media.start_tokens.tolist() == [3, 50, 0]
    assert media.tokens.tolist() == [40, 20, 40]
    assert media.content[0] == media.content[2] != media.content[1]
    assert set(media.content.tolist()) == {0, 1}


def test_a_chosen_identifier_is_not_told_apart_from_a_block(tmp_path: Path) -> None:
    """Who names an image after a block's hash must not read that block's id."""
    log = new(tmp_path)
    add(log, 0.0, block_hashes=[b"key"], prefix_block_tokens=16, media=[Item("image", 0, 9, "key")])
    log.close()
    (row,) = pq.read_table(files(tmp_path)[0]).to_pylist()
    assert row["media"] != [f"image:9@0#{row['prefix_ids'][0]}"]


def test_the_secret_is_for_this_user_alone(tmp_path: Path) -> None:
    new(tmp_path).close()
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600
    assert len((tmp_path / SECRET_FILE).read_bytes()) == 32
    assert [path.name for path in tmp_path.iterdir()] == [SECRET_FILE]


def test_a_damaged_secret_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / SECRET_FILE).write_bytes(b"short")
    with pytest.raises(LogFolderError, match="delete it; prefix ids then begin anew"):
        new(tmp_path)


def test_a_buffer_is_bounded_in_bytes(tmp_path: Path) -> None:
    log = new(tmp_path, hash_bytes_per_file=100)
    for n in range(4):
        add(log, float(n), block_hashes=hashes("a", "b"), prefix_block_tokens=16)
    log.close()
    assert [pq.read_metadata(file).num_rows for file in files(tmp_path)] == [2, 2]


def test_the_writer_rests_between_ids_but_not_at_the_end(tmp_path: Path) -> None:
    rests: list[float] = []
    chain = [os.urandom(32) for _ in range(600)]
    log = new(tmp_path, rows_per_file=1, pause=rests.append)
    add(log, 0.0, prompt_tokens=9600, block_hashes=chain, prefix_block_tokens=16)
    while not log.written_rows:
        pass
    assert len(rests) == 3
    add(log, 1.0, prompt_tokens=9600, output_tokens=20)
    log.close()
    assert len(rests) == 3


def test_a_flush_from_another_thread_loses_and_doubles_no_row(tmp_path: Path) -> None:
    log, done = new(tmp_path, rows_per_file=10**6), threading.Event()
    counts: list[dict[str, int]] = []

    def flush() -> None:
        while not done.is_set():
            counts.append(log.flush_counted())
            # The writer takes a few buffers at a time and drops what comes faster.
            while log.written_rows < counts[-1]["handed_over_rows"]:
                pass

    flusher = threading.Thread(target=flush)
    flusher.start()
    for n in range(20_000):
        add(log, n / 128)
    done.set()
    flusher.join()
    log.close()
    assert len(counts) > 2
    assert log.dropped_rows == 0
    assert read(tmp_path).arrival_s.tolist() == [n / 128 for n in range(20_000)]


def test_a_flush_counts_what_waits_what_is_written_and_what_is_lost(tmp_path: Path) -> None:
    def full(table: object, path: Path) -> None:
        raise OSError(28, "No space left on device")

    log = new(tmp_path, write=full)
    add(log, 0.0)
    assert log.flush_counted()["handed_over_rows"] == 1
    log.close()
    assert log.flush_counted() == {"handed_over_rows": 1, "written_rows": 0, "dropped_rows": 1}


@pytest.mark.parametrize("kept", [True, False])
def test_the_engine_offers_a_flush_where_it_keeps_a_log(tmp_path: Path, kept: bool) -> None:
    settings = PluginSettings(traffic_log_dir=str(tmp_path) if kept else None)
    watch = Watch(load_plan(), settings, rank=0, start_id=1, block_size=16, now_s=0.0)
    assert (watch.flush_traffic is not None) == kept
    watch.close()


def test_a_foreign_file_in_the_folder_is_named(tmp_path: Path) -> None:
    log = new(tmp_path)
    add(log, 0.0)
    log.close()
    pq.write_table(
        pq.read_table(files(tmp_path)[0]).replace_schema_metadata(None),
        tmp_path / "traffic-zzz.parquet",
    )
    with pytest.raises(TraceError, match=r"traffic-zzz.parquet: .*move it out of the folder"):
        read(tmp_path)
