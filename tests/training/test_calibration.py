"""Calibration: the fit finds known coefficients, and the shipped engines meet their bounds."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.controller.cli.app import main
from trimtab.engine_bridge.engine_spec import engine_names, get_engine_spec
from trimtab.engine_bridge.step_time import step_ms
from trimtab.training.calibration.fit import error_report, fit_coefficients
from trimtab.training.calibration.generate import draw_steps
from trimtab.training.calibration.generate import main as generate
from trimtab.training.calibration.table import PARTS, REQUIRED, read_step_table

TP8 = "h100:llama-3.1-70b-tp8"


def _write_table(path: Path, coef: np.ndarray, *, rows: int = 300, noise: float = 0.0) -> None:
    """A table of steps as long as the model of these coefficients says."""
    rng = np.random.default_rng(3)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*REQUIRED, "prefill_chunks", "source"))
        for step in draw_steps(rng, rows):
            chunks, size, prefix = step["chunks"], step["chunk_tokens"], step["prefix_tokens"]
            batch, context = step["batch"], step["context_tokens"]
            tokens = chunks * size
            pairs = tokens * (prefix + size / 2)
            arguments = (tokens + batch, chunks + batch, chunks, tokens, pairs)
            ms = step_ms(coef, *map(float, (*arguments, batch, batch * context)))
            ms *= 1.0 + noise * rng.standard_normal()
            kind = ("mixed" if batch else "prefill") if chunks else "decode"
            writer.writerow(
                ("Llama-3.1-70B", 8, kind, tokens, prefix, batch, context, ms, chunks, "made")
            )


# The separate composition has no steps of the multimodal engine.
@pytest.mark.parametrize("name", [name for name in engine_names() if "llama" in name])
def test_shipped_engines_meet_the_bounds_on_rows_that_were_not_fitted(
    name: str, shared_dir: Path
) -> None:
    spec = get_engine_spec(name)
    table = read_step_table(
        shared_dir / "facts" / "step-times.csv",
        model=spec.model,
        tp=spec.tp,
        source="aiconfigurator-core",
    )
    report = error_report(spec.coef, table)
    assert report["rows"] == 20
    for errors in (report, *report["by_kind"].values()):
        assert errors["median"] <= 0.03
        assert errors["p95"] <= 0.08


@pytest.mark.parametrize("name", engine_names())
def test_shipped_engines_state_their_error_on_rows_that_were_not_fitted(name: str) -> None:
    errors = get_engine_spec(name).fidelity["relative_error"]["held_out"]
    for kind in ("all", "decode", "prefill", "mixed"):
        assert errors[kind]["rows"] >= 300
        assert errors[kind]["median"] <= 0.03
        assert errors[kind]["p95"] <= 0.08


def test_the_fit_of_whole_steps_finds_a_slower_engine(tmp_path: Path) -> None:
    base = get_engine_spec(TP8).coef
    path = tmp_path / "steps.csv"
    _write_table(path, base * 1.7, noise=0.01)
    table = read_step_table(path, model="Llama-3.1-70B", tp=8)
    coef = fit_coefficients(table, base)
    assert error_report(coef, table)["p95"] < 0.035
    assert np.all(coef >= 0)


def test_the_fit_leaves_what_the_table_does_not_say(tmp_path: Path) -> None:
    base = get_engine_spec(TP8).coef
    path = tmp_path / "steps.csv"
    _write_table(path, base, rows=200)
    table = read_step_table(path, model="Llama-3.1-70B", tp=8)
    decode = table.take(np.flatnonzero(table.chunks == 0).astype(np.int64))
    coef = fit_coefficients(decode, base)
    assert coef[10:14] == pytest.approx(base[10:14], rel=1e-3)


def test_a_few_rows_move_the_level_alone(tmp_path: Path) -> None:
    base = get_engine_spec(TP8).coef
    path = tmp_path / "steps.csv"
    _write_table(path, base * np.where(np.arange(len(base)) == 4, 1.0, 1.2), rows=12)
    coef = fit_coefficients(read_step_table(path, model="Llama-3.1-70B", tp=8), base)
    assert coef[4] == base[4]
    assert np.delete(coef, 4) == pytest.approx(np.delete(base * 1.2, 4), rel=1e-3)


def test_chunks_share_a_prefix_each(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    header = ",".join((*REQUIRED, "prefill_chunks", *PARTS))
    path.write_text(f"{header}\nM,1,mixed_prefix,200,50,3,40,9.5,2,4,3,2.5,1\n")
    table = read_step_table(path, model="m", tp=1)
    assert (table.tokens[0], table.sequences[0], table.chunks[0]) == (203, 5, 2)
    assert table.pairs[0] == 2 * 100 * (50 + 100 / 2)
    assert table.kv_tokens[0] == 120
    assert table.allreduce_ms[0] == 1


def test_check_writes_the_report_of_the_contract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, result = tmp_path / "steps.csv", tmp_path / "errors.json"
    _write_table(path, get_engine_spec(TP8).coef * 1.1, rows=60)
    flags = ["--engine", TP8, "--table", str(path), "--check", "--json", str(result)]
    assert main(["calibrate", *flags]) == 0
    report: dict[str, Any] = json.loads(result.read_text())
    assert list(report) == ["rows", "median", "p95", "max", "by_kind"]
    assert list(report["by_kind"]) == ["decode", "prefill", "mixed"]
    assert report["rows"] == 60 == sum(kind["rows"] for kind in report["by_kind"].values())
    assert report["median"] == pytest.approx(1 - 1 / 1.1)
    assert "60 rows" in capsys.readouterr().out


def test_rows_of_other_engines_and_sources_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.csv"
    _write_table(path, get_engine_spec(TP8).coef, rows=20)
    with path.open("a") as file:
        file.write("Llama-3.1-8B,1,decode,0,0,4,100,6.5,0,made\n")
        file.write("Llama-3.1-70B,8,decode,0,0,4,100,10.5,0,guessed\n")
        file.write("Llama-3.1-70B,8,decode_nonattn,0,0,4,100,9.5,0,made\n")
    flags = ["--engine", TP8, "--table", str(path), "--check", "--source", "MADE"]
    assert main(["calibrate", *flags]) == 0
    scope = capsys.readouterr().out.splitlines()[0]
    assert scope.startswith("20 rows of Llama-3.1-70B tp 8; skipped")
    for part in ("1 of other engines", "1 of other sources", "1 without attention"):
        assert part in scope


def test_out_writes_an_engine_that_fits_the_table(tmp_path: Path) -> None:
    path, out = tmp_path / "steps.csv", tmp_path / "engine.yaml"
    _write_table(path, get_engine_spec(TP8).coef * 1.3)
    flags = ["--table", str(path), "--out", str(out), "--engine", TP8, "--name", "slower"]
    assert main(["calibrate", *flags]) == 0
    spec = get_engine_spec(out)
    assert spec.name == "slower"
    assert spec.fidelity["sources"] == ["made"]
    assert spec.fidelity["relative_error"]["held_out"]["all"]["rows"] == 75
    assert spec.fidelity["relative_error"]["held_out"]["all"]["p95"] < 0.02


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--check", "--out", "engine.yaml"],
        ["--out", "engine.yaml", "--held-out", "1"],
        ["--out", "engine.yaml", "--seed", "-1"],
        ["--check", "--engine", "h100:llama-3.1-70b-tp9"],
        ["--check", "--table", "nowhere.csv"],
    ],
)
def test_wrong_flags_give_exit_code_2_and_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    _write_table(tmp_path / "steps.csv", get_engine_spec(TP8).coef, rows=5)
    given = ["--engine", TP8, "--table", "steps.csv", *flags]
    assert main(["calibrate", *given]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_generating_needs_a_known_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "Llama-9", "--tp", "1", "--out", str(tmp_path / "steps.csv")]
    assert generate(flags) == 2
    assert "Llama-3.1-8B" in capsys.readouterr().err


def test_drawn_steps_stay_inside_the_regions_and_repeat() -> None:
    def draw() -> list[dict[str, int]]:
        return list(draw_steps(np.random.default_rng(5), 500))

    bounds: dict[str, Callable[[dict[str, int]], bool]] = {
        "tokens": lambda s: s["chunks"] * s["chunk_tokens"] + s["batch"] <= 16_384,
        "context": lambda s: s["prefix_tokens"] + s["chunk_tokens"] <= 131_072,
        "batch": lambda s: s["batch"] <= 256,
        "work": lambda s: s["batch"] + s["chunks"] > 0,
    }
    for name, holds in bounds.items():
        assert all(map(holds, draw())), name
    assert draw() == draw()
