"""The fidelity benchmark finds every layout and judges only what it did not calibrate on."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.training.calibration import layouts
from trimtab.training.calibration.measured import read_bench
from trimtab.training.calibration.published_bench import bench_case
from trimtab.training.calibration.replayed import predict

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def fidelity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fidelity", ROOT / "benchmarks/fidelity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def _report(fidelity: ModuleType, data: Path, *more: str) -> dict[str, dict[str, Any]]:
    out = data.parent / "report.json"
    fidelity.main(["--data", str(data), "--json", str(out), *more])
    return {item["name"]: item for item in json.loads(out.read_text())}


def _bench(data: Path, rng: np.random.Generator, *, slower: float) -> None:
    """A profile, and a run on the same card as the calibrated replay sees it, times `slower`."""
    layouts.write_profile(data / "profiles/H100/8b/bf16/tp1")
    requests = layouts.workload(rng, 8.0, 80)
    requests = replace(requests, start_s=requests.start_s - requests.start_s[0])
    draft = layouts.served(requests, layouts.known_law())
    run = data / "runs/H100/8b"
    layouts.write_bench(run, requests, draft)
    case = bench_case(data, run)
    for name in ("requests.jsonl", "meta.json"):
        (run / name).unlink()
    run.rmdir()
    layouts.write_bench(run, requests, predict(case.trace, case.setting), slower=slower)


@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_an_engine_benchmark_is_judged_on_its_cards_kernels(
    fidelity: ModuleType, tmp_path: Path, rng: np.random.Generator, slower: float
) -> None:
    data = tmp_path / "data"
    _bench(data, rng, slower=slower)
    item = _report(fidelity, data)["runs/H100/8b"]
    assert "profiles/H100/8b/bf16/tp1" in item["calibrated_on"]
    for quantity in ("ttft", "tpot", "e2e"):
        for statistic in ("mean", "p50", "p99"):
            told = item["errors"][quantity][statistic]
            assert told == pytest.approx(1.0 / slower - 1.0, abs=0.01)


def test_the_authors_error_stands_beside_ours(
    fidelity: ModuleType, tmp_path: Path, rng: np.random.Generator
) -> None:
    data = tmp_path / "data"
    _bench(data, rng, slower=1.0)
    summary = "Metric vLLM Sim Diff%\n----\nTTFT Mean    100.0   90.0   -10.0%\n"
    (data / "runs/H100/8b/authors-simulator-summary.txt").write_text(summary)
    item = _report(fidelity, data)["runs/H100/8b"]
    assert item["published"]["authors"]["ttft"]["mean"] == pytest.approx(-0.1)


def test_spans_calibrate_on_what_ran_alone_and_judge_the_rest(
    fidelity: ModuleType, tmp_path: Path, rng: np.random.Generator
) -> None:
    law, data = layouts.known_law(), tmp_path / "h100-data"
    alone = layouts.one_at_a_time(layouts.workload(rng, 1.0, 25), law)
    loaded = layouts.workload(rng, 6.0, 60)
    after = float(alone.start_s[-1]) + 60.0
    names = ("prompt_tokens", "output_tokens", "ttft_s", "e2e_s", "decode_s", "prefill_s", "host_s")
    columns = {
        name: np.concatenate((getattr(alone, name), getattr(loaded, name))) for name in names
    }
    start = np.concatenate((alone.start_s, loaded.start_s + after))
    both = replace(alone, row=np.arange(len(start)), start_s=start, **columns)
    told = layouts.served(both, law, host_s=0.003)
    layouts.write_spans(data / "run-1", both, told, host_s=0.003)
    item = _report(fidelity, data)["run-1"]
    assert item["num_gpu_blocks"] == 20_000
    assert item["requests"] <= 61
    for quantity in ("tpot", "e2e"):
        assert abs(item["errors"][quantity]["mean"]) < 0.02
    assert abs(item["errors"]["ttft"]["mean"]) < 0.04


def test_client_loads_are_judged_but_the_lowest(
    fidelity: ModuleType, tmp_path: Path, rng: np.random.Generator
) -> None:
    law, data = layouts.known_law(), tmp_path / "data"
    base = layouts.workload(rng, 1.0, 60)
    for rate in (0.5, 4.0):
        requests = replace(base, start_s=base.start_s / rate)
        told = layouts.served(requests, law, reply_s=0.01)
        layouts.write_client(data / f"h100-llama-3.1-8b-tp1/out_{rate}.csv", requests, told)
    report = _report(fidelity, data)
    assert list(report) == ["h100-llama-3.1-8b-tp1/out_4.0.csv"]
    errors = next(iter(report.values()))["errors"]
    # The data does not tell the budget, so that chunks are longer than they were.
    assert abs(errors["tpot"]["p50"]) < 0.05
    assert abs(errors["e2e"]["p50"]) < 0.05


def test_a_step_log_is_judged_on_the_other_log(
    fidelity: ModuleType, tmp_path: Path, rng: np.random.Generator
) -> None:
    law, folder = layouts.known_law(), tmp_path / "h100-steps"
    for name in ("a-llama-3.1-8b-tp1", "b-llama-3.1-8b-tp1"):
        layouts.write_sampled_log(folder / f"{name}.csv", law, rng)
    (folder / "measured-means.csv").write_text(
        "experiment,gt_requests,gt_e2e_ms,gt_ttft_ms\na-llama-3.1-8b-tp1,1600,1500.0,20.0\n"
    )
    report = _report(fidelity, folder)
    assert "b-llama-3.1-8b-tp1" in report["a-llama-3.1-8b-tp1.csv"]["calibrated_on"]
    assert set(report["a-llama-3.1-8b-tp1.csv"]["errors"]["e2e"]) >= {"mean"}
    assert "no measured mean" in report["b-llama-3.1-8b-tp1.csv"]["refused"]


def test_what_cannot_be_run_says_why_and_the_rest_goes_on(
    fidelity: ModuleType, tmp_path: Path, rng: np.random.Generator
) -> None:
    data = tmp_path / "data"
    _bench(data, rng, slower=1.0)
    requests = layouts.workload(rng, 1.0, 5)
    told = layouts.served(requests, layouts.known_law())
    layouts.write_bench(data / "runs/Z80/8b", requests, told)
    layouts.write_bench(data / "runs/H100/other", requests, told, model="acme/frobnicator")
    broken = data / "runs/H100/broken"
    layouts.write_bench(broken, requests, told)
    (broken / "requests.jsonl").write_text("{}\n")
    report = _report(fidelity, data)
    assert "errors" in report["runs/H100/8b"]
    assert "Z80" in report["runs/Z80/8b"]["refused"]
    assert "frobnicator" in report["runs/H100/other"]["refused"]
    assert "line 1" in report["runs/H100/broken"]["refused"]
    assert all("\n" not in item.get("refused", "") for item in report.values())


def test_a_missing_folder_is_a_bad_flag(fidelity: ModuleType, tmp_path: Path) -> None:
    assert fidelity.main(["--data", str(tmp_path / "none")]) == 2
    assert fidelity.main(["--data", str(tmp_path)]) == 1


def test_asynchronous_scheduling_costs_a_step_before_the_first_token(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    requests = layouts.workload(rng, 5.0, 40)
    law = layouts.known_law()
    setting = {"from_queue": True}
    now = layouts.served(requests, law, **setting)
    ahead = layouts.served(requests, law, asynchronous=True, **setting)
    assert ahead.ttft_s[0] == pytest.approx(now.ttft_s[0])
    assert np.median(ahead.ttft_s) > np.median(now.ttft_s) + 0.003
    assert np.nanmean(ahead.tpot_s) == pytest.approx(np.nanmean(now.tpot_s), rel=0.1)


def test_two_engines_share_the_requests(rng: np.random.Generator) -> None:
    requests = layouts.workload(rng, 40.0, 80)
    one = layouts.served(requests, layouts.known_law())
    two = layouts.served(requests, layouts.known_law(), engines=2)
    assert np.nanmean(two.tpot_s) < 0.95 * np.nanmean(one.tpot_s)


@pytest.mark.parametrize(
    ("run", "most"),
    [
        ("llmservingsim/runs/RTX4090/Llama-3.1-8B", 0.03),
        ("llmservingsim/runs/RTXPRO6000/Llama-3.1-8B", 0.03),
    ],
)
def test_real_runs_are_predicted(shared_dir: Path, run: str, most: float) -> None:
    data = shared_dir / "ground-truth"
    if not (data / run).is_dir():
        pytest.skip("the measured runs are not beside the checkout")
    case = bench_case(data, data / run)
    told = predict(case.trace, case.setting)
    for quantity in ("tpot_s", "e2e_s"):
        true = getattr(case.requests, quantity)
        assert np.nanmean(getattr(told, quantity)) == pytest.approx(np.nanmean(true), rel=most)


def test_a_bench_file_is_read_in_the_order_of_arrival(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    requests = layouts.workload(rng, 5.0, 10)
    told = layouts.served(requests, layouts.known_law())
    layouts.write_bench(tmp_path / "run", requests, told)
    path = tmp_path / "run" / "requests.jsonl"
    path.write_text("\n".join(reversed(path.read_text().splitlines())) + "\n")
    read = read_bench(path)
    assert read.row.tolist() == list(range(10))
    assert np.allclose(read.ttft_s, told.ttft_s)
