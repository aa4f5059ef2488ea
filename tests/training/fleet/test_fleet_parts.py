"""A fleet's file and its shared store by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.controller.cli.app import main
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.trace import Trace
from trimtab.training.fleet.settings import FleetSettingsError, Store, fleet_from, load_fleet
from trimtab.training.fleet.store import SharedStore
from trimtab.training.traces.canonical_write import write_trace
from trimtab.training.traces.generate import generate

ENGINE = "h100:llama-3.1-8b-tp1"
TOKEN_BYTES = 1 << 20
IDS = st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True)


def prompts(rows: list[list[int]]) -> Trace:
    """Prompts of 16-token blocks with these contents."""
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    return Trace.build(
        arrival_s=np.arange(len(rows), dtype=float),
        prompt_tokens=[16 * len(row) + 1 for row in rows],
        output_tokens=1,
        prefix_offsets=offsets.astype(np.int64),
        prefix_ids=np.concatenate(rows).astype(np.int32),
        prefix_block_tokens=np.full(len(rows), 16, np.int32),
    )


def store(trace: Trace, *, blocks: float, least_tokens: int = 0) -> SharedStore:
    """A store of so many blocks of 16 MiB."""
    settings = Store(gib=blocks / 64, gib_per_s=1.0, latency_ms=0.0, least_tokens=least_tokens)
    return SharedStore(settings, trace, block_tokens=16, kv_bytes_per_token=TOKEN_BYTES)


@given(rows=st.lists(IDS, min_size=1, max_size=12), blocks=st.integers(1, 12))
def test_a_store_never_holds_more_than_it_can_and_no_end_without_its_beginning(
    rows: list[list[int]], blocks: int
) -> None:
    trace = prompts(rows)
    one = store(trace, blocks=blocks)
    for row, ids in enumerate(rows):
        one.keep(row, 16 * len(ids))
        assert np.sum(one._used >= 0) <= blocks
        # It drops a little more than it must.
        whole = min(len(ids), blocks)
        assert 16 * (whole - 1) <= one.held_tokens(row) <= 16 * whole


def test_a_load_takes_its_bytes_and_is_left_out_where_it_saves_little() -> None:
    trace = prompts([list(range(8))])
    one = store(trace, blocks=64.0, least_tokens=64)
    assert one.load_s(0, 0) == 0.0
    one.keep(0, 128)
    assert one.load_s(0, 0) == pytest.approx(128 * TOKEN_BYTES / 2**30)
    assert one.load_s(0, 80) == 0.0
    assert one.loaded_tokens == 128


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"engines": {}}, "engines"),
        ({"engines": {"a": {"engine": ENGINE, "reserve": True}}}, "at least one warm engine"),
        ({"failures": [{"engine": "aa", "at_s": 1}]}, 'did you mean "a"?'),
        ({"drafts": {"T2": "code"}}, "the draft of one of the engines"),
        ({"store": {"gib": 0, "gib_per_s": 1}}, "store.gib"),
        ({"wiat_s": 3}, 'did you mean "wait_s"?'),
    ],
)
def test_a_wrong_fleet_is_told_in_one_line(values: dict[str, Any], said: str) -> None:
    whole = {"name": "x", "engines": {"a": {"engine": ENGINE}}, **values}
    with pytest.raises(FleetSettingsError) as caught:
        fleet_from(whole, where="fleet.yaml")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tier_that_the_plan_does_not_have_is_refused() -> None:
    one = fleet_from(
        {"name": "x", "engines": {"a": {"engine": ENGINE, "tiers": ["T9"]}}}, where="fleet.yaml"
    )
    with pytest.raises(FleetSettingsError, match=r"engines\.a\.tiers"):
        one.check_tiers(load_plan(), "fleet.yaml")


def test_the_command_compares_fleets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, engines in (("one", "a"), ("two", "ab")):
        path = tmp_path / f"{name}.yaml"
        lines = [f"name: {name}", "engines:", *(f"  {e}: {{engine: '{ENGINE}'}}" for e in engines)]
        path.write_text("\n".join(lines))
        files += ["--fleet", str(path)]
        assert load_fleet(path).name == name
    trace = tmp_path / "t.parquet"
    write_trace(generate(hours=0.02, seed=0, preset="steady", load=1.2), trace)
    words = ["fleet", "--trace", str(trace), *files, "--policy", "static"]
    words += ["--policy", "stock-fcfs", "--jobs", "1", "--json", str(tmp_path / "f.json")]
    code = main(words)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert out.count("stock-fcfs") == 2
    assert (tmp_path / "f.json").stat().st_size > 1000
    assert main(["fleet", "--trace", str(trace), *files[:2], *files[:2]]) == 2
    assert "fleets of different names" in capsys.readouterr().err
    assert main(["fleet", "--trace", str(trace), "--fleet", str(tmp_path / "no.yaml")]) == 2
    assert "must be a file that exists" in capsys.readouterr().err
