"""`trimtab trace`: what it writes and prints, and one line for every wrong flag."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trimtab.controller.cli.app import main
from trimtab.engine_bridge.capacity import offered_load
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces import read_trace

ENGINE = "h100:llama-3.1-8b-tp1"


def _azure(path: Path, n: int = 3000, span_s: float = 600.0, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    stamps = np.datetime64("2023-11-16T18:15:46.0000000") + (
        np.sort(rng.uniform(0, span_s, n)) * 1e9
    ).astype("timedelta64[ns]")
    rows = [
        f"{str(stamp)[:27].replace('T', ' ')},{prompt},{output}"
        for stamp, prompt, output in zip(
            stamps, rng.integers(10, 2000, n), rng.integers(1, 300, n), strict=True
        )
    ]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + "\r\n".join(rows))
    return path


def _read(path: Path) -> Trace:
    return read_trace(path, rng=np.random.default_rng(0))


def test_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = _azure(tmp_path / "a.csv"), tmp_path / "info.json"
    assert main(["trace", "info", str(file), "--json", str(out), "--engine", ENGINE]) == 0
    found = json.loads(out.read_text())
    assert found["format"] == "azure"
    assert found["rows"] == 3000
    assert found["engine"] == ENGINE
    assert 0 < found["offered_load"] < 10
    assert found["digest"] == _read(file).digest()
    assert "3,000" in capsys.readouterr().out


def test_convert_there_and_back(tmp_path: Path) -> None:
    file = _azure(tmp_path / "a.csv")
    words = ["trace", "convert", str(file), "--tier", "T2", "--tenant", "acme", "--out"]
    assert main([*words, str(tmp_path / "a.parquet")]) == 0
    assert main([*words[:2], str(tmp_path / "a.parquet"), "--out", str(tmp_path / "b.csv")]) == 0
    trace = _read(tmp_path / "b.csv")
    assert trace.digest() == _read(tmp_path / "a.parquet").digest()
    assert trace.tier_names == ("T2",)
    assert trace.tenant_names == ("acme",)


def test_compose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = _azure(tmp_path / "a.csv"), _azure(tmp_path / "b.csv", 500, seed=1)
    words = ["trace", "compose", "--tier", f"T0={one}", "--tier", f"T2={two}", "--tier",
             f"T0={two}", "--load", "0.9", "--engine", ENGINE, "--seed", "4", "--tenants", "T0=20",
             "--offset", "T2=60", "--share", "T2=0.3", "--format", "T2=azure", "--out"]  # fmt: skip
    assert main([*words, str(tmp_path / "x.parquet")]) == 0
    said = capsys.readouterr().out
    assert main([*words, str(tmp_path / "y.parquet")]) == 0
    trace = _read(tmp_path / "x.parquet")
    assert trace.digest() == _read(tmp_path / "y.parquet").digest()
    assert offered_load(trace, get_engine_spec(ENGINE)) == pytest.approx(0.9, rel=0.02)
    assert trace.arrival_s[trace.tier == 1].min() >= 60
    assert sum(name.startswith("T0-") for name in trace.tenant_names) == 20
    assert f"offered load of {ENGINE}: " in said


def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "g.parquet"
    words = ["trace", "generate", "--hours", "0.2", "--seed", "3", "--out", str(out)]
    assert main(words) == 0
    plain = _read(out)
    assert plain.duration_s < 720
    assert main([*words, "--preset", "bursty", "--load", "0.5"]) == 0
    said = capsys.readouterr().out
    assert float(said.split(f"offered load of {ENGINE}: ")[1].split()[0]) == pytest.approx(
        0.5, 0.02
    )
    assert _read(out).digest() != plain.digest()


BAD: dict[str, tuple[list[str], str]] = {
    "no file": (["info", "none.csv"], "none.csv"),
    "unknown format": (["info", "a.csv", "--format", "azur"], 'did you mean "azure"'),
    "another format": (["info", "a.csv", "--format", "vidur"], "num_prefill_tokens"),
    "unknown engine": (["info", "a.csv", "--engine", "h100:llama"], "h100:llama"),
    "json into nowhere": (["info", "a.csv", "--json", "no/x.json"], "make the folder"),
    "json onto a folder": (["info", "a.csv", "--json", "."], "it is a folder"),
    "negative seed": (["info", "a.csv", "--seed", "-1"], "--seed"),
    "negative window": (["info", "a.csv", "--window-s", "-1"], "--window-s"),
    "no context": (["info", "a.csv", "--max-context-tokens", "0"], "--max-context-tokens"),
    "text for a number": (["info", "a.csv", "--max-idle-s", "long"], "--max-idle-s"),
    "unknown flag": (["info", "a.csv", "--jsn", "x"], "--json"),
    "out of no suffix": (["convert", "a.csv", "--out", "x"], ".parquet or .csv"),
    "out into nowhere": (["convert", "a.csv", "--out", "no/x.csv"], "make the folder"),
    "no out": (["convert", "a.csv"], "--out"),
    "convert to no tier": (["convert", "a.csv", "--tier", "", "--out", "x.csv"], "--tier"),
    "convert to no tenant": (["convert", "a.csv", "--tenant", " ", "--out", "x.csv"], "--tenant"),
    "no tier": (["compose", "--out", "x.csv"], "--tier"),
    "tier without file": (["compose", "--tier", "T0", "--out", "x.csv"], "TIER=VALUE"),
    "tier of no name": (["compose", "--tier", "=a.csv", "--out", "x.csv"], "TIER=VALUE"),
    "tier of blanks": (["compose", "--tier", "T 0=a.csv", "--out", "x.csv"], "TIER=VALUE"),
    "missing part": (["compose", "--tier", "T0=b.csv", "--out", "x.csv"], "b.csv"),
    "load without engine": (["compose", "--load", "0.9"], "--engine"),
    "engine without load": (["compose", "--engine", ENGINE], "--load"),
    "load of zero": (["compose", "--load", "0", "--engine", ENGINE], "--load"),
    "load of many": (["compose", "--load", "99", "--engine", ENGINE], "--load"),
    "load that is none": (["compose", "--load", "nan", "--engine", ENGINE], "--load"),
    "share of another tier": (
        ["compose", "--load", "0.9", "--engine", ENGINE, "--share", "T5=0.5"],
        "--share",
    ),
    "share without load": (["compose", "--share", "T0=0.5"], "--share"),
    "share twice": (["compose", "--share", "T0=0.5", "--share", "T0=0.4"], "named twice"),
    "share of text": (["compose", "--share", "T0=half"], "--share"),
    "offset beyond": (["compose", "--offset", "T0=1e6"], "--offset"),
    "offset before": (["compose", "--offset", "T0=-5"], "--offset"),
    "offset of another tier": (["compose", "--offset", "T5=5"], "--offset"),
    "tenants of none": (["compose", "--tenants", "T0=0"], "--tenants"),
    "half a tenant": (["compose", "--tenants", "T0=1.5"], "--tenants"),
    "format of a tier": (["compose", "--format", "T0=azur"], 'did you mean "azure"'),
    "format without tier": (["compose", "--format", "azure"], "TIER=VALUE"),
    "no duration": (["compose", "--duration-s", "0"], "--duration-s"),
    "endless": (["compose", "--duration-s", "inf"], "--duration-s"),
    "no hours": (["generate", "--hours", "0", "--out", "x.csv"], "--hours"),
    "too many hours": (["generate", "--hours", "1e9", "--out", "x.csv"], "--hours"),
    "unknown preset": (["generate", "--preset", "wave", "--out", "x.csv"], 'mean "waves"'),
    "negative load": (["generate", "--load", "-1", "--out", "x.csv"], "--load"),
    "no command": (["infos"], 'did you mean "info"'),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_wrong_flag_gives_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    _azure(tmp_path / "a.csv", 50)
    words, said = BAD[kind]
    if words[0] == "compose" and "--tier" not in words and kind != "no tier":
        words = [*words, "--tier", "T0=a.csv"]
    if words[0] == "compose" and "--out" not in words:
        words = [*words, "--out", "x.csv"]
    assert main(["trace", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not (tmp_path / "x.csv").exists()


def test_a_failed_compose_keeps_the_file_that_was_there(tmp_path: Path) -> None:
    out = tmp_path / "x.csv"
    out.write_text("old")
    assert main(["trace", "compose", "--tier", f"T0={tmp_path}/no.csv", "--out", str(out)]) == 2
    assert out.read_text() == "old"


def test_media_from_a_made_trace_and_from_azures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, summary = tmp_path / "m.parquet", tmp_path / "m.json"
    flags = ["--hours", "0.05", "--seed", "1", "--preset", "steady"]
    assert main(["trace", "generate", *flags, "--media-share", "0.5", "--out", str(made)]) == 0
    assert main(["trace", "info", str(made), "--json", str(summary)]) == 0
    shown = capsys.readouterr().out
    assert "50 % of the chats' and agents' turns" in shown
    assert "of the prompt tokens" in shown
    media = json.loads(summary.read_text())["media"]
    assert media["items"] == sum(kind["items"] for kind in media["kinds"].values()) > 0

    lmm = tmp_path / "lmm.csv"
    lmm.write_text(
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.269Z,2,770,491\n"
    )
    assert main(["trace", "info", str(lmm), "--tokens-per-image", "100"]) == 0
    assert "image 2 (200 tokens)" in capsys.readouterr().out
    assert main(["trace", "info", str(lmm), "--tokens-per-image", "0"]) == 2
    assert "--tokens-per-image" in capsys.readouterr().err
