"""Fidelity of the replay: its latencies against those that real vLLM was measured with.

    python benchmarks/fidelity.py --data shared/ground-truth [--json F] [--only TEXT]

Finds every measured configuration below the folder by its layout (docs/fidelity.md), calibrates an
engine on data that is not judged, replays the run under the stock rules and prints the relative
error of TTFT, TPOT and end-to-end latency, beside the error that is published of other simulators.
A configuration that cannot be run says why; the others go on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trimtab.engine_bridge.errors import TrimtabError
from trimtab.training.calibration.published import Case
from trimtab.training.calibration.published_bench import bench_case, find_bench_runs
from trimtab.training.calibration.published_client import client_cases, find_client_runs
from trimtab.training.calibration.published_means import find_mean_runs, means_case
from trimtab.training.calibration.published_spans import find_span_runs, spans_case
from trimtab.training.calibration.published_steps import find_step_runs, steps_case
from trimtab.training.calibration.replayed import comparison, predict

QUANTITIES = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p99", "per_request")
Cases = Callable[[Path, Path], Iterator[Case]]


def one(make: Callable[[Path, Path], Case]) -> Cases:
    """A layout with one case a place, as one with several."""

    def cases(root: Path, place: Path) -> Iterator[Case]:
        yield make(root, place)

    return cases


LAYOUTS: tuple[tuple[str, Callable[[Path], list[Path]], Cases], ...] = (
    ("engine benchmark", find_bench_runs, one(bench_case)),
    ("spans", find_span_runs, one(spans_case)),
    ("step log", find_step_runs, one(steps_case)),
    ("client", find_client_runs, client_cases),
    ("means", find_mean_runs, one(means_case)),
)


def results(root: Path, only: str) -> Iterator[dict[str, Any]]:
    """One report a configuration, in the order of the layouts and paths."""
    for layout, find, cases in LAYOUTS:
        for place in find(root):
            name = str(place.relative_to(root))
            if only not in name:
                continue
            try:
                for case in cases(root, place):
                    yield {"layout": layout, **judged(case)}
            except (TrimtabError, OSError, ValueError, KeyError, IndexError) as error:
                reason = " ".join(f"{error}".split()) or type(error).__name__
                yield {"layout": layout, "name": name, "refused": reason}


def judged(case: Case) -> dict[str, Any]:
    """Replay one case and compare."""
    started = time.process_time()
    predicted = predict(case.trace, case.setting)
    spec = case.setting.spec
    return {
        "name": case.name,
        "engine": case.engine,
        "calibrated_on": case.calibrated_on,
        "requests": len(case.judged),
        "errors": comparison(case.requests, predicted, case.judged, means_only=case.means_only),
        "published": case.published,
        "notes": list(case.notes),
        "num_gpu_blocks": spec.num_gpu_blocks,
        "preemptions": predicted.preemptions,
        "steps": predicted.steps,
        "coefficients": list(spec.coefficients),
        "cpu_s": round(time.process_time() - started, 2),
    }


def line(label: str, errors: dict[str, dict[str, float]]) -> str:
    """One row of the table: percent, signed but for the last of each quantity."""
    cells = []
    for quantity in QUANTITIES:
        for statistic in STATISTICS:
            value = errors.get(quantity, {}).get(statistic)
            sign = "" if statistic == "per_request" else "+"
            cells.append(f"{'-':>6}" if value is None else f"{100 * value:{sign}6.1f}")
    return f"  {label:<12}" + " ".join(cells)


def shown(result: dict[str, Any]) -> str:
    """A configuration as text."""
    if "refused" in result:
        return f"{result['name']}\n  not run: {result['refused']}"
    lines = [result["name"], f"  {result['engine']}; on {result['calibrated_on']}"]
    lines += [f"  {note}" for note in result["notes"]]
    lines.append(line("replay", result["errors"]))
    if result["published"]:
        for who, errors in result["published"].items():
            lines.append(line(who[:12], errors))
    return "\n".join(lines)


def header() -> str:
    """The names of the columns."""
    top = " ".join(f"{quantity:<27}" for quantity in QUANTITIES)
    names = {"mean": "mean", "p50": "p50", "p99": "p99", "per_request": "each"}
    below = " ".join(f"{names[statistic]:>6}" for _ in QUANTITIES for statistic in STATISTICS)
    title = "error, percent ('each': mean of the absolute errors of the requests)"
    return f"{title}\n{'':14}{top}\n{'':14}{below}"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if no configuration could be run, 2 for a bad flag."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with measured runs")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument(
        "--only", default="", help="only configurations with this text in their path"
    )
    flags = parser.parse_args(argv)
    if not flags.data.is_dir():
        print(f"--data: {str(flags.data)!r}, must be a folder with measured runs", file=sys.stderr)
        return 2
    print(header())
    report = []
    for result in results(flags.data.resolve(), flags.only):
        report.append(result)
        print(shown(result), flush=True)
    if flags.json:
        flags.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    ran = sum("errors" in result for result in report)
    print(f"{ran} of {len(report)} configurations run")
    return 0 if ran else 1


if __name__ == "__main__":
    sys.exit(main())
