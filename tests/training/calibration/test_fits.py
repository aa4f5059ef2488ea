"""Calibration from kernels, step logs and isolated requests finds the law that made them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.training.calibration import layouts
from trimtab.controller.cli.app import main
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.errors import TableError
from trimtab.engine_bridge.media import IMAGE
from trimtab.engine_bridge.step_time import CoefArray, step_ms
from trimtab.training.calibration.capacity_guess import overhead_gib
from trimtab.training.calibration.cards import find_card, scaled_engine
from trimtab.training.calibration.draws import Limits, Steps, draw_steps
from trimtab.training.calibration.encoder_fit import fit_encoder
from trimtab.training.calibration.isolated import Isolated, decode_ms, fit_isolated, prompt_ms
from trimtab.training.calibration.kernel_fit import fit_profile
from trimtab.training.calibration.layer_profile import padded, read_profile
from trimtab.training.calibration.models import ModelShape, find_model
from trimtab.training.calibration.step_fit import fit_step_log
from trimtab.training.calibration.step_log import (
    ENCODED_COLUMNS,
    OWN_COLUMNS,
    read_step_log,
)

SHAPE, H100 = find_model(layouts.MODEL), find_card(layouts.CARD)
LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=2048, kv_tokens=300_000)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.mark.parametrize(
    ("name", "gib", "kib"),
    [
        ("codellama/CodeLlama-34b-Instruct-hf", 62.857, 192),
        ("meta-llama/Llama-2-7b-hf", 12.552, 512),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 56.9, 96),
    ],
)
def test_shapes_give_the_weights_that_vllm_logged(name: str, gib: float, kib: float) -> None:
    shape = find_model(name)
    assert shape.weights_gib() == pytest.approx(gib, rel=2e-3)
    assert shape.kv_kib_per_token() == kib


def test_an_unknown_model_says_how_to_go_on() -> None:
    with pytest.raises(TableError, match="--model-config"):
        find_model("acme/frobnicator")


def test_a_configuration_file_gives_a_shape(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100,'
        '"intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}'
    )
    shape = ModelShape.from_config(path)
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.experts) == (2, 4, 16, 8)
    path.write_text("{}")
    with pytest.raises(TableError, match=r"config\.json"):
        ModelShape.from_config(path)


def test_the_memory_left_over_is_what_logs_say() -> None:
    sizes = {"tp": 1, "max_num_seqs": 256, "max_num_batched_tokens": 4096, "counts_graphs": False}
    for model, logged in (("CodeLlama-34b", 0.9), ("Llama-2-7b", 0.5)):
        assert overhead_gib(find_model(model), **sizes) == pytest.approx(logged, abs=0.2)


def test_draws_stay_within_the_limits(rng: np.random.Generator) -> None:
    steps = draw_steps(LIMITS, rng, 2000)
    assert np.all(steps.decodes <= LIMITS.max_num_seqs)
    assert np.all(steps.decodes + steps.chunk <= LIMITS.max_num_batched_tokens)
    assert np.all(steps.decodes * steps.context <= LIMITS.kv_tokens)
    assert np.all(steps.decodes + steps.chunk > 0)


def test_tokens_are_padded_to_the_captured_graphs() -> None:
    tokens = np.array([1.0, 3.0, 9.0, 250.0, 260.0, 513.0])
    assert padded(tokens, 256).tolist() == [1.0, 4.0, 16.0, 256.0, 272.0, 513.0]
    assert padded(tokens, 16).tolist() == [1.0, 4.0, 16.0, 250.0, 260.0, 513.0]


def test_the_fit_of_a_profile_meets_its_steps(tmp_path: Path) -> None:
    layouts.write_profile(tmp_path / "bf16" / "tp1")
    profile = read_profile(tmp_path / "bf16" / "tp1", SHAPE)
    coef, errors = fit_profile(profile, H100, LIMITS, tp=1)
    assert errors["median"] < 0.02
    # Decodes beside a chunk read at half the speed in this profile.
    assert coef[20] == pytest.approx(coef[16], rel=0.5)


def test_twice_the_kernels_take_twice_the_time(tmp_path: Path) -> None:
    one = Steps(
        decodes=np.array([64.0]),
        context=np.array([1000.0]),
        chunk=np.array([512.0]),
        prefix=np.array([0.0]),
    )
    times = []
    for name, slower in (("a", 1.0), ("b", 2.0)):
        layouts.write_profile(tmp_path / name / "tp1", slower=slower)
        profile = read_profile(tmp_path / name / "tp1", SHAPE)
        times.append(profile.steps(one, max_num_seqs=256).iter_ms[0])
    assert 1.9 < times[1] / times[0] <= 2.0


def test_skew_lengthens_the_decodes_only(tmp_path: Path) -> None:
    one = Steps(
        decodes=np.array([64.0]),
        context=np.array([1000.0]),
        chunk=np.array([0.0]),
        prefix=np.array([0.0]),
    )
    tables = []
    for name, skew in (("a", False), ("b", True)):
        layouts.write_profile(tmp_path / name / "tp1", skew=skew)
        profile = read_profile(tmp_path / name / "tp1", SHAPE)
        tables.append(profile.steps(one, max_num_seqs=256))
    assert tables[1].decode_attn_ms[0] / tables[0].decode_attn_ms[0] == pytest.approx(1.1)
    assert tables[1].nonattn_ms[0] == tables[0].nonattn_ms[0]


def test_isolated_requests_tell_both_speeds(rng: np.random.Generator) -> None:
    law, base = layouts.known_law(), scaled_engine(SHAPE, H100, 1)
    prompts = rng.integers(20, 6000, 30).astype(float)
    outputs = rng.integers(50, 300, 30).astype(float)
    host_s = 0.002
    requests = Isolated(
        prompt_tokens=prompts,
        cached_tokens=np.zeros(30),
        output_tokens=outputs,
        prefill_s=np.array([prompt_ms(law, p, 0.0, 2048) for p in prompts]) * 1e-3 + host_s,
        tpot_s=np.array([decode_ms(law, c) for c in prompts + outputs / 2]) * 1e-3,
    )
    # The first one pays the warm-up.
    requests.prefill_s[0] *= 5.0
    coef, told_s = fit_isolated(base, requests, max_num_batched_tokens=2048)
    assert told_s == pytest.approx(host_s, abs=1e-3)
    for tokens in (500.0, 2000.0, 6000.0):
        told, true = (prompt_ms(c, tokens, 0.0, 2048) for c in (coef, law))
        assert told == pytest.approx(true, rel=0.03)
    assert decode_ms(coef, 3000.0) == pytest.approx(decode_ms(law, 3000.0), rel=0.01)


def test_too_few_isolated_requests_are_refused() -> None:
    one = np.array([100.0])
    requests = Isolated(
        prompt_tokens=one, cached_tokens=one * 0, output_tokens=one, prefill_s=one, tpot_s=one
    )
    with pytest.raises(TableError, match="at least 3"):
        fit_isolated(scaled_engine(SHAPE, H100, 1), requests, max_num_batched_tokens=2048)


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_step_log_tells_the_level(tmp_path: Path, rng: np.random.Generator, form: str) -> None:
    law = layouts.known_law(compute=1.0)
    path = tmp_path / f"steps.{form}"
    write = layouts.write_own_log if form == "parquet" else layouts.write_sampled_log
    write(path, law, rng)
    log = read_step_log(path)
    assert log.num_gpu_blocks == (0 if form == "parquet" else 20_000)
    coef = fit_step_log(log.table, scaled_engine(SHAPE, H100, 1))
    step = (40.0, 40.0, 0.0, 0.0, 0.0, 40.0, 40.0 * 640)
    assert step_ms(coef, *step) == pytest.approx(step_ms(law, *step), rel=0.02)


def encoding_log(rng: np.random.Generator, law: CoefArray, steps: int) -> pd.DataFrame:
    """Steps of Trimtab's log, half of which encode images of several sizes or one clip each."""
    rows = []
    for n in range(steps):
        chunk, batch = float(rng.integers(50, 900)), float(rng.integers(1, 60))
        ms = step_ms(law, chunk + batch, 1 + batch, 1.0, chunk, chunk**2 / 2, batch, batch * 700)
        images = rng.integers(200, 1500, rng.integers(1, 3)) if n % 4 == 0 else []
        clips = [750] if n % 4 == 2 else []
        ms += sum(4.0 + 0.02 * size for size in images) + sum(0.03 * size for size in clips)
        encoded = (len(images), sum(images), len(clips), sum(clips), 0, 0)
        row = (ms * rng.lognormal(0.0, 0.01), batch, batch * 700, 1.0, chunk, chunk**2 / 2)
        rows.append((*row, *encoded))
    return pd.DataFrame(rows, columns=[*OWN_COLUMNS, *ENCODED_COLUMNS])


def test_encode_time_is_not_taken_for_prefill_and_makes_an_encoder(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    law, path = layouts.known_law(compute=1.0), tmp_path / "steps.parquet"
    encoding_log(rng, law, 800).to_parquet(path)
    log = read_step_log(path)
    assert (len(log.table), len(log.encoding)) == (400, 400)
    coef = fit_step_log(log.table, scaled_engine(SHAPE, H100, 1))
    step = (600.0, 41.0, 1.0, 560.0, 560.0**2 / 2, 40.0, 40.0 * 700)
    assert step_ms(coef, *step) == pytest.approx(step_ms(law, *step), rel=0.02)
    file = fit_encoder(log.encoding, log.encoded, coef)
    assert file is not None
    assert file.image.item_ms == pytest.approx(4.0, rel=0.2)
    assert file.image.us_per_token == pytest.approx(20.0, rel=0.05)
    # Clips of one size: what an item costs beside its tokens cannot be told.
    assert (file.audio.item_ms, file.video.us_per_token) == (0.0, 0.0)
    assert file.audio.us_per_token == pytest.approx(30.0, rel=0.05)


def test_a_few_steps_say_nothing_of_an_encoder(tmp_path: Path, rng: np.random.Generator) -> None:
    law, path = layouts.known_law(compute=1.0), tmp_path / "steps.parquet"
    encoding_log(rng, law, 76).to_parquet(path)
    log = read_step_log(path)
    assert fit_encoder(log.encoding, log.encoded, law) is None


def test_the_command_writes_the_encoder_and_wants_steps_of_text(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    law, log, out = layouts.known_law(compute=1.0), tmp_path / "log", tmp_path / "mine.yaml"
    log.mkdir()
    steps = encoding_log(rng, law, 400)
    encodes = steps[list(ENCODED_COLUMNS)].any(axis=1)
    # A file of a log may have no other steps.
    steps[encodes].to_parquet(log / "steps-1.parquet")
    flags = ["--model", layouts.MODEL, "--card", "H100", "--kv-blocks", "777", "--out", str(out)]
    assert main(["calibrate", "--steps", str(log), *flags]) == 2
    assert "steps without media" in capsys.readouterr().err
    steps[~encodes].to_parquet(log / "steps-2.parquet")
    assert main(["calibrate", "--steps", str(log), *flags]) == 0
    encoder = get_engine_spec(out).encoder
    assert encoder is not None
    assert encoder.item_ms(IMAGE, 1000) == pytest.approx(24.0, rel=0.1)


BAD_LOGS = {
    "no such column": ("step_ms,decodes\n1,2\n", "kv_tokens"),
    "text in a number": (
        "step_ms,decodes,kv_tokens,chunks,chunk_tokens,pairs\nslow,1,1,0,0,0\n",
        "step_ms",
    ),
    "negative": ("step_ms,decodes,kv_tokens,chunks,chunk_tokens,pairs\n1,-1,1,0,0,0\n", "decodes"),
    "nothing usable": (
        "step_ms,decodes,kv_tokens,chunks,chunk_tokens,pairs\n0,1,1,0,0,0\n",
        "usable",
    ),
}


@pytest.mark.parametrize("fault", BAD_LOGS)
def test_a_bad_step_log_is_refused_in_one_line(tmp_path: Path, fault: str) -> None:
    text, needle = BAD_LOGS[fault]
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(TableError, match=needle) as caught:
        read_step_log(path)
    assert "\n" not in str(caught.value)


def test_the_command_writes_an_engine_that_can_be_used(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    law = layouts.known_law(compute=1.0)
    log, out = tmp_path / "steps.parquet", tmp_path / "mine.yaml"
    layouts.write_own_log(log, law, rng)
    flags = ["--model", layouts.MODEL, "--card", "H100", "--kv-blocks", "777", "--out", str(out)]
    assert main(["calibrate", "--steps", str(log.parent), *flags]) == 0
    spec = get_engine_spec(out)
    assert spec.num_gpu_blocks == 777
    assert "777 KV blocks" in capsys.readouterr().out
    step = (300.0, 41.0, 1.0, 260.0, 260.0**2 / 2, 40.0, 40.0 * 900)
    assert step_ms(spec.coef, *step) == pytest.approx(step_ms(law, *step), rel=0.03)


@pytest.mark.parametrize(
    ("flags", "needle"),
    [
        ([], "no measurements"),
        (["--steps", "none.parquet", "--out", "x.yaml"], "--card"),
        (["--steps", "none.parquet", "--out", "x.yaml", "--card", "H100"], "--model"),
        (
            ["--steps", "none.csv", "--out", "x.yaml", "--card", "H100", "--model", "Llama-3.1-8B"],
            "none.csv",
        ),
        (["--steps", "none.csv", "--card", "H100", "--model", "Llama-3.1-8B"], "--out"),
        (
            ["--kernels", ".", "--out", "x", "--card", "Z80", "--model", "Llama-3.1-8B"],
            "Z80",
        ),
        (
            ["--kernels", ".", "--out", "x", "--card", "H100", "--model", "Llama-3.1-8B"],
            "0 profiles",
        ),
        (
            ["--kernels", ".", "--out", "x", "--card", "L4", "--model", "Llama-3.1-70B"],
            "raise --tp",
        ),
    ],
)
def test_bad_flags_get_one_clear_line(
    flags: list[str],
    needle: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *flags]) == 2
    shown = capsys.readouterr().err.strip()
    assert needle in shown
    assert len(shown.splitlines()) == 1
