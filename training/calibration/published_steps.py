"""Runs in the layout of inference-sim's step logs: one CSV a run, with means over its requests.

Each run is predicted by an engine that is calibrated on the steps of the *other* logs of the same
model; a run without such another log cannot be judged. The requests themselves are not in the data:
a workload with the log's rates and mean lengths stands for them.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from trimtab.engine_bridge.errors import TableError
from trimtab.training.calibration.cards import find_card, scaled_engine
from trimtab.training.calibration.measured import Measured, open_text
from trimtab.training.calibration.models import find_model
from trimtab.training.calibration.published import Case, described, engine_spec
from trimtab.training.calibration.replayed import Setting, trace_of
from trimtab.training.calibration.step_fit import fit_step_log
from trimtab.training.calibration.step_log import (
    SAMPLED_COLUMNS,
    StepLog,
    joined,
    read_step_log,
)

_BUDGET: Final = 2048
_VERSION: Final = "0.15.1"
"""As the data's description says; the logs themselves do not."""
_NEEDED: Final = (*SAMPLED_COLUMNS, "batch.decode_tokens", "batch.num_finished")
_BLOCK: Final = 16
_BATCHES: Final = (32, 64, 96, 128, 256)
_TWO_STAGES: Final = 2


@dataclass(frozen=True, kw_only=True)
class _Log:
    path: Path
    model: str
    tp: int
    log: StepLog
    means: dict[str, float]


def find_step_runs(root: Path) -> list[Path]:
    """CSV files with sampled steps."""
    return sorted(path for path in root.rglob("*.csv*") if _is_log(path))


def steps_case(root: Path, path: Path) -> Case:
    """One run's means, predicted on the steps of the other logs of its model.

    Raises:
        TableError: a file is broken, there is no other log of the model, or no measured mean.
    """
    own = _read(path)
    others = [
        log
        for log in (_read(other) for other in find_step_runs(path.parent) if other != path)
        if find_model(log.model) == find_model(own.model) and log.tp == own.tp
    ]
    if not others:
        raise TableError(
            str(path), value="the only log of its model", bound="another one to calibrate on"
        )
    if not own.means:
        raise TableError(str(path), value="no measured mean", bound="a row in measured-means.csv")
    shape, card = find_model(own.model), find_card(str(path.relative_to(root.parent)))
    fitted = joined([other.log for other in others])
    coef = fit_step_log(fitted.table, scaled_engine(shape, card, own.tp))
    table = pd.read_csv(path)
    seqs = _batch_cap(float(table["queue.running_depth"].max()))
    spec, note = engine_spec(
        shape,
        card,
        coef,
        tp=own.tp,
        version=_VERSION,
        max_num_seqs=seqs,
        max_num_batched_tokens=_BUDGET,
        num_gpu_blocks=own.log.num_gpu_blocks,
    )
    requests, prefixes = _workload(table, own.means)
    names = ", ".join(other.path.name for other in others)
    return Case(
        name=str(path.relative_to(root)),
        engine=described(
            {shape.name: card.name, "TP": own.tp, "vLLM": _VERSION, "seqs": seqs}
            | {"budget": _BUDGET}
        ),
        calibrated_on=f"{len(fitted.table)} steps of {names}",
        requests=requests,
        trace=trace_of(requests, prefixes),
        setting=Setting(spec=spec, asynchronous=True),
        judged=np.arange(len(requests)),
        means_only=True,
        notes=tuple(text for text in (note, "means only, of a made-up workload") if text),
    )


def _is_log(path: Path) -> bool:
    if not path.name.endswith((".csv", ".csv.gz")):
        return False
    header = next(iter(open_text(path)), "").strip().split(",")
    return set(_NEEDED) <= set(header)


def _read(path: Path) -> _Log:
    with_suffixes = path.name.removesuffix(".gz").removesuffix(".csv")
    tp = re.search(r"tp(\d+)", with_suffixes)
    return _Log(
        path=path,
        model=with_suffixes,
        tp=int(tp[1]) if tp else 1,
        log=read_step_log(path),
        means=_means(path.parent, with_suffixes),
    )


def _means(folder: Path, run: str) -> dict[str, float]:
    """The run's row of `measured-means.csv`, numbers only."""
    for path in sorted(folder.glob("measured-means.csv*")):
        for row in csv.DictReader(open_text(path)):
            if row.get("experiment") == run:
                return {
                    key: float(value)
                    for key, value in row.items()
                    if key.startswith("gt_") and value
                }
    return {}


def _batch_cap(peak: float) -> int:
    return next((size for size in _BATCHES if peak <= size), int(peak))


def _workload(table: pd.DataFrame, means: dict[str, float]) -> tuple[Measured, list[list[int]]]:
    """Requests with the log's rates in two halves, its mean lengths and its cached share.

    Output tokens a request follow from decode tokens over requests, its context from the KV in use
    a running request; new prompt tokens from prefill tokens over requests, the rest is cached.
    Arrivals are Poisson with a fixed seed.
    """
    count = int(means["gt_requests"])
    table = table.sort_values("step.id")
    steps = float(table["step.id"].max() - table["step.id"].min() + 1)
    share = steps / len(table)
    output = max(1, round(float(table["batch.decode_tokens"].sum()) * share / count) + 1)
    running = table["queue.running_depth"].clip(lower=1)
    used = table["kv.usage_gpu_ratio"] * table["kv.blocks_total_gpu"] * _BLOCK
    context = float((used / running)[table["queue.running_depth"] > 0].median())
    prompt = max(1, round(context - 0.5 * output))
    fresh = min(prompt, max(1, round(float(table["batch.prefill_tokens"].sum()) * share / count)))
    start = _arrivals(table, count)
    n = len(start)
    ids = list(range((prompt - fresh) // _BLOCK))
    requests = Measured(
        row=np.arange(n),
        start_s=start,
        prompt_tokens=np.full(n, float(prompt)),
        output_tokens=np.full(n, float(output)),
        ttft_s=np.full(n, means["gt_ttft_ms"] * 1e-3),
        e2e_s=np.full(n, means["gt_e2e_ms"] * 1e-3),
        decode_s=np.full(n, (means["gt_e2e_ms"] - means["gt_ttft_ms"]) * 1e-3),
        prefill_s=np.full(n, np.nan),
        host_s=np.full(n, np.nan),
    )
    return requests, [ids] * n


def _arrivals(table: pd.DataFrame, count: int) -> npt.NDArray[np.float64]:
    """Poisson arrivals: in each half of the run as many as it finished."""
    clock = (table["step.ts_start_ns"] - table["step.ts_start_ns"].min()) * 1e-9
    span_s = float(clock.max())
    second = clock > 0.5 * span_s
    finished = np.array(
        [
            table.loc[~second, "batch.num_finished"].sum(),
            table.loc[second, "batch.num_finished"].sum(),
        ]
    )
    numbers = np.round(count * finished / max(1, finished.sum())).astype(int)
    rng = np.random.default_rng(0)
    half = span_s / _TWO_STAGES
    parts = [
        np.sort(rng.uniform(i * half, (i + 1) * half, number)) for i, number in enumerate(numbers)
    ]
    return np.concatenate(parts)
