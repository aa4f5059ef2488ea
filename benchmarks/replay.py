"""Speed of the replay: requests and steps per CPU-second, and memory of a large trace.

    python benchmarks/replay.py [--json F] [--lengths azure_conv.csv.gz] [--repeats 5]

The workload is the usual one of public simulators: 10,000 requests, Poisson arrivals at 4 a second,
lengths of the Azure conversation trace of 2023 clipped to 8,192 tokens in all, Llama-3.1-8B on one
H100. Without the file the lengths are drawn from that trace's published quantiles. Rules are the
fair ones with four tiers; prefix ids of 16 tokens name every full block of every prompt; telemetry
is taken every 2 s. Times are CPU seconds of this process after compilation, the median of the
repeats. The fastest public simulator known does 2,600 requests a CPU-second on it, the fastest in
Python 118.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces import read_trace

REQUESTS, RATE, SEED, MOST_TOKENS = 10_000, 4.0, 42, 8_192
LARGE = 1_000_000
DAY_S = 86_400.0
BLOCK = 16
PROMPT_QUANTILES = ((0.0, 0.5, 0.9, 0.99, 1.0), (3, 1016, 4075, 4122, 14050))
OUTPUT_QUANTILES = ((0.0, 0.5, 0.9, 0.99, 1.0), (1, 114, 421, 598, 1000))
BESIDE = "shared/traces/azure-2023/AzureLLMInferenceTrace_conv.csv.gz"
TIERS = ("T0", "T1", "T2", "T3")


def lengths(file: Path | None, count: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Prompt and output lengths, clipped so that both fit 8,192 tokens."""
    if file is not None:
        recorded = read_trace(file, rng=rng)
        rows = rng.integers(0, len(recorded), count)
        prompt, output = recorded.prompt_tokens[rows], recorded.output_tokens[rows]
    else:
        prompt = np.interp(rng.random(count), *PROMPT_QUANTILES).astype(np.int32)
        output = np.interp(rng.random(count), *OUTPUT_QUANTILES).astype(np.int32)
    prompt = np.clip(prompt, 1, MOST_TOKENS - 1)
    return prompt, np.clip(output, 1, MOST_TOKENS - prompt)


def workload(file: Path | None, count: int, rate: float, *, prefixes: bool) -> Trace:
    """The trace: four tiers in turn, and with `prefixes` an id for every full block."""
    rng = np.random.default_rng(SEED)
    prompt, output = lengths(file, count, rng)
    optional: dict[str, object] = {}
    if prefixes:
        blocks = prompt.astype(np.int64) // BLOCK
        offsets = np.concatenate(([0], np.cumsum(blocks)))
        optional = {
            "prefix_offsets": offsets,
            "prefix_ids": np.arange(offsets[-1], dtype=np.int32),
            "prefix_block_tokens": np.full(count, BLOCK, np.int32),
        }
    return Trace.build(
        arrival_s=np.cumsum(rng.exponential(1.0 / rate, count)),
        prompt_tokens=prompt,
        output_tokens=output,
        tier=rng.integers(0, len(TIERS), count),
        tier_names=TIERS,
        **optional,
    )


def run(trace: Trace, *, collapse: bool, interval_s: float = 2.0) -> tuple[float, int, float]:
    """CPU seconds of one replay, its steps and its simulated seconds."""
    engine = ReplayEngine(
        trace, load_plan(None), get_engine_spec("h100:llama-3.1-8b-tp1"), collapse=collapse
    )
    started = time.process_time()
    engine.run(interval_s=interval_s)
    spent = time.process_time() - started
    return spent, int(engine.result().steps), engine.now_s


def measure(trace: Trace, repeats: int, *, collapse: bool, interval_s: float = 2.0) -> dict:
    """Median rates over the repeats."""
    runs = [run(trace, collapse=collapse, interval_s=interval_s) for _ in range(repeats)]
    cpu_s = statistics.median(spent for spent, _, _ in runs)
    return {
        "requests": len(trace),
        "cpu_s": round(cpu_s, 4),
        "requests_per_cpu_s": round(len(trace) / cpu_s),
        "steps_per_cpu_s": round(runs[0][1] / cpu_s),
        "simulated_s_per_cpu_s": round(runs[0][2] / cpu_s),
    }


def peak_rss_mb() -> float:
    """Most memory that this process has held, MB (Linux; not inherited, unlike ru_maxrss)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmHWM in /proc/self/status")


def large(file: Path | None) -> dict:
    """A million requests at about 90 % load, in a process of its own that compiles nothing."""
    run(workload(file, 100, 9.0, prefixes=False), collapse=True)
    loaded_mb = peak_rss_mb()
    trace = workload(file, LARGE, 9.0, prefixes=False)
    before_mb = peak_rss_mb()
    spent, steps, simulated_s = run(trace, collapse=True, interval_s=60.0)
    return {
        "requests": LARGE,
        "cpu_s": round(spent, 2),
        "steps": steps,
        "simulated_s": round(simulated_s),
        "cpu_s_per_day": round(spent * DAY_S / simulated_s, 2),
        "rss_of_the_program_mb": round(loaded_mb),
        "rss_with_the_trace_mb": round(before_mb),
        "peak_rss_mb": round(peak_rss_mb()),
    }


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--large", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    beside = Path(__file__).resolve().parents[2] / BESIDE
    file = args.lengths or (beside if beside.is_file() else None)
    if args.large:
        print(json.dumps(large(file)))
        return
    full = workload(file, REQUESTS, RATE, prefixes=True)
    run(full, collapse=True)
    cases = {
        "collapsed": measure(full, args.repeats, collapse=True),
        "every_step": measure(full, args.repeats, collapse=False),
        "collapsed_no_prefix_ids": measure(
            workload(file, REQUESTS, RATE, prefixes=False), args.repeats, collapse=True
        ),
        "collapsed_16_per_s": measure(
            workload(file, REQUESTS, 16.0, prefixes=True), args.repeats, collapse=True
        ),
    }
    here = peak_rss_mb()
    command = [sys.executable, __file__, "--large", *(["--lengths", str(file)] if file else [])]
    million = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    result = {
        "lengths": "Azure conversation 2023" if file else "its published quantiles",
        "requests_per_cpu_s": cases["collapsed"]["requests_per_cpu_s"],
        "steps_per_cpu_s": cases["collapsed"]["steps_per_cpu_s"],
        "peak_rss_mb": round(here),
        "cases": cases,
        "million": million,
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
