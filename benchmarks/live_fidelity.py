"""Whether the replay is true of a live engine: the emulated server in real time beside the replay.

    python benchmarks/live_fidelity.py [--minutes 10] [--trace FILE] [--load 0.1] [--json F]

Starts `trimtab serve --emulate`, sends it a trace as clients would (open loop; a session's next
turn after its answer), and replays the same trace under the same plan, engine and KV blocks. It
prints P50 and P99 of TTFT and TPOT by tier: as the clients measured them, as the server did from a
request's arrival there, and as the replay says, with its error against both. The replay is a model
of the engine. What the API server does before (reading and tokenising a prompt, handing it over) is
measured beforehand, on requests that are alone, as a time and a time for each prompt token, and
added to the replay's TTFT. The clients are `live_clients`'. Clients, server and engine share this
machine: run it alone, at a load that it can carry.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from live_clients import WARM_UP, Clients, Seen, server, sessions

from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.formats import read_trace
from trimtab.training.traces.generate import generate

ENGINE: Final = "h100:llama-3.1-70b-tp8"
LONGEST_TOKENS: Final = 60_000
LEAST_MINUTES: Final = 60.0
QUANTITIES: Final = ("ttft_ms", "tpot_ms")
PERCENTILES: Final = (50, 99)
MEASURED: Final = ("clients", "server")
COLD_WARM_UPS: Final = 3
Table = dict[str, dict[str, float]]
FloatArray = npt.NDArray[np.float64]


def traffic(flags: argparse.Namespace, spec: EngineSpec) -> Trace:
    """The trace: what arrives in the given minutes, without what would only measure the machine."""
    if flags.trace is not None:
        trace = read_trace(flags.trace, rng=np.random.default_rng(flags.seed))
    else:
        # The load is a mean: a few minutes cannot be held to it.
        hours = max(flags.minutes, LEAST_MINUTES) / 60.0
        trace = generate(
            hours=hours, seed=flags.seed, preset=flags.preset, load=flags.load, spec=spec
        )
    size = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    kept = (_earliest_s(trace) < 60.0 * flags.minutes) & (size <= LONGEST_TOKENS)
    for rows in sessions(trace):
        # A turn that is left out would keep the later ones waiting for ever.
        kept[rows] = np.logical_and.accumulate(kept[rows])
    chosen = trace.take(np.flatnonzero(kept))
    return replace(chosen, cancel_after_s=np.full(len(chosen), np.inf))


def _earliest_s(trace: Trace) -> npt.NDArray[np.float64]:
    """When each row would arrive if every answer took no time, shape (n,)."""
    earliest = trace.arrival_s.astype(np.float64)
    for rows in sessions(trace):
        earliest[rows] = trace.arrival_s[rows[0]] + np.cumsum([0.0, *trace.think_s[rows[1:]]])
    return earliest


def replayed(
    trace: Trace, plan: str | None, spec: EngineSpec, frontend: Callable[[FloatArray], FloatArray]
) -> Table:
    """What the replay says with the API server's part before it, milliseconds by tier."""
    engine = ReplayEngine(trace, load_plan(plan), spec)
    engine.run(interval_s=5.0)
    columns = engine.result().requests
    requests = {name: np.asarray(column, np.float64) for name, column in columns.items()}
    later = np.maximum(trace.output_tokens - 1, 1)
    ttft = requests["first_token_s"] - requests["arrival_s"]
    ttft = ttft + frontend(trace.prompt_tokens.astype(np.float64))
    tpot = (requests["last_token_s"] - requests["first_token_s"]) / later
    return table(trace.tier_names, trace.tier, ttft, tpot, trace.output_tokens)


def measured(trace: Trace, seen: dict[int, Seen]) -> Table:
    """What the clients saw, milliseconds by tier."""
    rows = np.array(sorted(seen))
    ttft = np.array([seen[row].first_s - seen[row].sent_s for row in rows])
    span = np.array([seen[row].last_s - seen[row].first_s for row in rows])
    tokens = trace.output_tokens[rows]
    tpot = span / np.maximum(tokens - 1, 1)
    return table(trace.tier_names, trace.tier[rows], ttft, tpot, tokens)


def logged(folder: Path) -> list[dict[str, Any]]:
    """The rows of the traffic log in the order of arrival."""
    rows = [
        row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]
    return sorted(rows, key=lambda row: row["arrival_s"])


def served(trace: Trace, rows: list[dict[str, Any]]) -> Table:
    """What the log says of the trace's requests, milliseconds by tier."""
    rows = [row for row in rows if row["tenant"] != WARM_UP and row["outcome"] == "finished"]
    tier = np.array([trace.tier_names.index(row["tier"]) for row in rows])
    ttft = np.array([row["ttft_s"] for row in rows])
    tokens = np.array([row["output_tokens"] for row in rows])
    span = np.array([row["e2e_s"] for row in rows]) - ttft
    return table(trace.tier_names, tier, ttft, span / np.maximum(tokens - 1, 1), tokens)


def frontend_fit(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Seconds of the API server's part, and seconds a prompt token, from the warm-up alone.

    The engine was idle then: once it runs, a request also waits for the step that is under way
    before the scheduler sees it, which the replay has in it.
    """
    alone = [row for row in rows if row["tenant"] == WARM_UP][COLD_WARM_UPS:]
    tokens = np.array([float(row["prompt_tokens"]) for row in alone])
    seconds = np.array([row["frontend_s"] for row in alone])
    slope = max(0.0, float(np.polyfit(tokens, seconds, 1)[0]))
    return max(0.0, float(np.median(seconds - slope * tokens))), slope


def table(
    names: Sequence[str],
    tier: npt.NDArray[Any],
    ttft_s: npt.NDArray[Any],
    tpot_s: npt.NDArray[Any],
    tokens: npt.NDArray[Any],
) -> Table:
    """Percentiles by tier, milliseconds."""
    found: Table = {}
    for number, name in enumerate(names):
        line: dict[str, float] = {"requests": int(np.sum(tier == number))}
        for quantity, values, mask in (
            ("ttft_ms", ttft_s, tier == number),
            ("tpot_ms", tpot_s, (tier == number) & (tokens > 1)),
        ):
            chosen = values[mask] * 1e3
            for percent in PERCENTILES:
                value = float(np.nanpercentile(chosen, percent)) if len(chosen) else float("nan")
                line[f"{quantity}_p{percent}"] = value
        found[name] = line
    return found


def errors(replay: Table, true: Table) -> Table:
    """The replay's relative errors, fractions."""
    return {
        tier: {
            key: replay[tier][key] / value - 1.0
            for key, value in line.items()
            if key != "requests" and value > 0
        }
        for tier, line in true.items()
    }


def show(report: dict[str, Any]) -> None:
    """Print the tables."""
    keys = [f"{quantity}_p{percent}" for quantity in QUANTITIES for percent in PERCENTILES]
    print(
        f"API server alone: {report['frontend_ms']:.2f} ms"
        f" + {report['frontend_ms_per_1k_tokens']:.2f} ms for 1,000 prompt tokens"
    )
    print(f"{'':14}{'requests':>9}" + "".join(f"{key:>13}" for key in keys))
    for tier in report["replay"]:
        for who in (*MEASURED, "replay"):
            line = report[who][tier]
            cells = "".join(f"{line[key]:13.2f}" for key in keys)
            print(f"{tier:4}{who:10}{line['requests']:9}{cells}")
        for who in MEASURED:
            line = report["errors"][who][tier]
            cells = "".join(f"{100 * line.get(key, float('nan')):+12.1f}%" for key in keys)
            print(f"{'':4}vs {who:16}{cells}")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="arrivals, minutes")
    parser.add_argument("--trace", type=Path, help="traffic to send; default: generated")
    parser.add_argument("--preset", default="steady", help="of the generated traffic")
    parser.add_argument("--load", type=float, default=0.1, help="share of the engine's capacity")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plan", help="plan of both; default: the shipped one")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(argv)
    # The server schedules a step while the one before runs, as vLLM does on GPUs.
    spec = get_engine_spec(ENGINE).with_limits(async_scheduling=True)
    trace = traffic(flags, spec)
    tokens = int(trace.prompt_tokens.sum()), int(trace.output_tokens.sum())
    print(f"{len(trace)} requests, {tokens[0]} prompt and {tokens[1]} output tokens", flush=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        plan = [] if flags.plan is None else ["--plan", flags.plan]
        with server(folder, ENGINE, *plan) as url:
            clients = Clients(url, ENGINE.rpartition(":")[2], trace)
            asyncio.run(clients.run())
        given_up = [f"row {row}: given up" for row, seen in clients.seen.items() if seen.given_up]
        clients.failed += given_up
        rows = logged(folder / "traffic")
        base_s, token_s = frontend_fit(rows)
        report: dict[str, Any] = {
            "engine_name": ENGINE,
            "num_gpu_blocks": spec.num_gpu_blocks,
            "requests": len(trace),
            "minutes": flags.minutes,
            "failed": clients.failed,
            "clients": measured(trace, clients.seen),
            "server": served(trace, rows),
            "frontend_ms": 1e3 * base_s,
            "frontend_ms_per_1k_tokens": 1e6 * token_s,
            "replay": replayed(trace, flags.plan, spec, lambda tokens: base_s + token_s * tokens),
        }
    report["errors"] = {who: errors(report["replay"], report[who]) for who in MEASURED}
    show(report)
    for line in clients.failed[:5]:
        print(line, file=sys.stderr)
    if flags.json is not None:
        flags.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if clients.failed else 0


if __name__ == "__main__":
    sys.exit(main())
