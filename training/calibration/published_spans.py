"""Runs in the layout of inference-sim: a folder with `traces.json` and `exp-config.yaml`.

The load tool first sends requests one at a time; these calibrate, together with those of other runs
of the same model in the same folder. What comes after them is judged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import yaml

from trimtab.engine_bridge.errors import TableError
from trimtab.training.calibration.capacity_guess import logged_blocks, logged_version
from trimtab.training.calibration.cards import find_card, scaled_engine
from trimtab.training.calibration.isolated import Isolated, fit_isolated
from trimtab.training.calibration.measured import Measured, json_lines, open_text, read_spans
from trimtab.training.calibration.models import ModelShape, find_model
from trimtab.training.calibration.published import (
    Case,
    default_limits,
    described,
    engine_spec,
    is_asynchronous,
)
from trimtab.training.calibration.replayed import Setting, trace_of

_BLOCK: Final = 16
_LIMITS: Final = (256, 8192)
_ARGUMENT: Final = r"'?{}'?[=:]\s*'?([\w.\-/]+)"


@dataclass(frozen=True, kw_only=True)
class _Run:
    folder: Path
    model: str
    tp: int
    seqs: int
    budget: int
    version: str
    blocks: int
    requests: Measured
    phase: npt.NDArray[np.int64]
    prefix_tokens: int

    @property
    def opening(self) -> int:
        """Requests at the start that ran one at a time."""
        return self.requests.opening()


def find_span_runs(root: Path) -> list[Path]:
    """Folders with spans and the engine's settings."""
    found = {path.parent for path in root.rglob("traces.json*")}
    return sorted(folder for folder in found if (folder / "exp-config.yaml").is_file())


def spans_case(root: Path, folder: Path) -> Case:
    """One run, calibrated on requests that ran alone.

    Raises:
        TableError: a file is broken, the card or model is not known, or too few ran alone.
    """
    run = _read(folder)
    shape, card = find_model(run.model), find_card(str(folder.relative_to(root.parent)))
    alike = [run]
    for other in find_span_runs(folder.parent):
        if other != folder:
            candidate = _try(other)
            if candidate is not None and _same(candidate, run):
                alike.append(candidate)
    isolated, hosts = _isolated(alike)
    base = scaled_engine(shape, card, run.tp)
    coef, prompt_s = fit_isolated(base, isolated, max_num_batched_tokens=run.budget)
    spec, note = engine_spec(
        shape,
        card,
        coef,
        tp=run.tp,
        version=run.version,
        max_num_seqs=run.seqs,
        max_num_batched_tokens=run.budget,
        num_gpu_blocks=run.blocks,
    )
    return Case(
        name=str(folder.relative_to(root)),
        engine=described(
            {shape.name: card.name, "TP": run.tp, "vLLM": run.version}
            | {"seqs": run.seqs, "budget": run.budget}
        ),
        calibrated_on=f"{len(isolated)} requests one at a time, of {len(alike)} run(s)",
        requests=run.requests,
        trace=trace_of(run.requests, _prefixes(run)),
        setting=Setting(
            spec=spec,
            asynchronous=is_asynchronous(run.version),
            host_s=float(np.median(hosts)) + prompt_s,
        ),
        judged=np.arange(run.opening, len(run.requests)),
        notes=(note,) if note else (),
    )


def isolated_requests(folder: Path) -> tuple[Isolated, ModelShape, int, int]:
    """The requests of a run that ran alone, its model, tensor-parallel size and budget.

    Raises:
        TableError: as `spans_case`.
    """
    run = _read(folder)
    return _isolated([run])[0], find_model(run.model), run.tp, run.budget


def _read(folder: Path) -> _Run:
    config = _yaml(folder / "exp-config.yaml")
    log = next(iter(sorted(folder.glob("vllm.log*"))), None)
    arguments = _logged_arguments(log) if log else ""
    model = str(config.get("model") or _argument(arguments, "model") or folder.name)
    tp = int(config.get("tensor_parallelism") or config.get("tensor_parallel_size") or 1)
    version = logged_version(log) if log else ""
    seqs, budget = _default_limits(folder, version)
    load = _yaml(folder / "profile.yaml") if (folder / "profile.yaml").is_file() else {}
    data = load.get("data")
    prefix = int((data if isinstance(data, dict) else {}).get("prefix_tokens") or 0)
    requests = read_spans(next(folder.glob("traces.json*")))
    return _Run(
        folder=folder,
        model=model,
        tp=int(_argument(arguments, "tensor_parallel_size") or tp),
        seqs=int(config.get("max_num_seqs") or _argument(arguments, "max_num_seqs") or seqs),
        budget=int(
            config.get("max_num_batched_tokens")
            or _argument(arguments, "max_num_batched_tokens")
            or budget
        ),
        version=version,
        blocks=logged_blocks(log) if log else 0,
        requests=requests,
        phase=_phases(folder, requests, int(load.get("max-requests") or 0)),
        prefix_tokens=prefix,
    )


def _default_limits(folder: Path, version: str) -> tuple[int, int]:
    try:
        return default_limits(find_card(str(folder)), version)
    except TableError:
        return _LIMITS


def _try(folder: Path) -> _Run | None:
    try:
        return _read(folder)
    except TableError:
        return None


def _same(one: _Run, other: _Run) -> bool:
    names = find_model(one.model), find_model(other.model)
    return names[0] == names[1] and (one.tp, one.version) == (other.tp, other.version)


def _isolated(runs: list[_Run]) -> tuple[Isolated, npt.NDArray[np.float64]]:
    parts, cached = [], []
    for run in runs:
        count = run.opening
        parts.append(run.requests.take(np.arange(count)))
        hit = np.full(count, float(run.prefix_tokens // _BLOCK * _BLOCK))
        hit[:1] = 0.0
        cached.append(np.minimum(hit, np.maximum(parts[-1].prompt_tokens - 1, 0)))
    hits = np.concatenate(cached)
    prompts = np.concatenate([part.prompt_tokens for part in parts])
    isolated = Isolated(
        prompt_tokens=prompts - hits,
        cached_tokens=hits,
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
        prefill_s=np.concatenate([part.prefill_s for part in parts]),
        tpot_s=np.concatenate([part.tpot_s for part in parts]),
    )
    return isolated, np.concatenate([part.host_s for part in parts])


def _phases(folder: Path, requests: Measured, most: int) -> npt.NDArray[np.int64]:
    """The load tool's phase of each request: from its own log, else by the requests a phase."""
    for path in sorted(folder.glob("client-requests.jsonl*")):
        known = {
            f"{item.get('response_id')}-0": int(item.get("phase") or 0) for item in json_lines(path)
        }
        if requests.names and any(name in known for name in requests.names):
            return np.array([known.get(name, -1) for name in requests.names], np.int64)
    return np.arange(len(requests)) // most if most else np.zeros(len(requests), np.int64)


def _prefixes(run: _Run) -> list[list[int]]:
    """Ids of the blocks that the requests of a phase have in common."""
    count = run.prefix_tokens // _BLOCK
    if not count:
        return []
    return [
        [int(phase) * count + block for block in range(min(count, int(prompt) // _BLOCK))]
        for phase, prompt in zip(
            run.phase - run.phase.min(), run.requests.prompt_tokens, strict=True
        )
    ]


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load("\n".join(open_text(path)))
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())[:80]
        raise TableError(str(path), value=reason, bound="YAML") from None
    if not isinstance(content, dict):
        raise TableError(str(path), value=type(content).__name__, bound="a mapping")
    return content


def _logged_arguments(log: Path) -> str:
    found = [line for line in open_text(log) if "non-default args" in line]
    return found[-1] if found else ""


def _argument(line: str, name: str) -> str:
    found = re.search(_ARGUMENT.format(name), line)
    return found[1] if found else ""
