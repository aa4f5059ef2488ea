"""The daemon beside a live engine: attainment by tier with it, and static, under the same load.

    python benchmarks/daemon_live.py [--minutes 15] [--trace FILE | --public DIR] [--json F]

Real processes in real time: `trimtab serve --emulate`, Prometheus that scrapes it, `trimtab run`
with the shipped learned policy, and clients (`live_clients`) that send a trace composed of recorded
ones: Azure conversations (T0), kv-cache-tester's agents in closed loop (T1), Azure code (T2),
ServeGen m-large (T3). Then the same without a daemon, on a fresh server: the static plan. The batch
cap makes the engine saturate at a few requests a second, which two cores can carry. It prints
attainment by tier as the engine judged it and as the clients measured it, how often the allocation
changed, and what `trimtab whatif --audit` makes of the daemon's audit log. Run it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from live_clients import Clients, server, sessions

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.live_parts import DaemonProcess, daemon, prometheus  # noqa: E402
from trimtab.agents.registry import make_policy  # noqa: E402
from trimtab.engine_bridge.engine_spec import get_engine_spec  # noqa: E402
from trimtab.engine_bridge.plan import Plan, load_plan  # noqa: E402
from trimtab.engine_bridge.replay.engine import ReplayEngine  # noqa: E402
from trimtab.engine_bridge.trace import Trace  # noqa: E402
from trimtab.engine_bridge.vllm.control_client import ControlClient  # noqa: E402
from trimtab.training.traces.formats import read_trace  # noqa: E402
from trimtab.training.traces.generate import generate  # noqa: E402

ENGINE: Final = "h100:llama-3.1-70b-tp4"
CONTENDERS: Final = ("daemon", "static")
PARTS: Final = {
    "T0": "azure-2023/AzureLLMInferenceTrace_conv.csv.gz",
    "T1": "kv-cache-tester",
    "T2": "azure-2023/AzureLLMInferenceTrace_code.csv.gz",
    "T3": "servegen/data/language/m-large",
}
"""Below the folder of public traces."""
MOST_CONTEXT_TOKENS: Final = 32_768
TRIMTAB: Final = (sys.executable, "-m", "trimtab.controller.cli.app")
_SAMPLE: Final = re.compile(r"^(trimtab_\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)

Report = dict[str, Any]
Samples = dict[tuple[str, str], float]
"""The engine's metrics by name and labels."""


def traffic(flags: argparse.Namespace, folder: Path) -> Trace:
    """The load of both runs: what would arrive within the minutes if every answer took no time."""
    if flags.trace is not None:
        trace = read_trace(flags.trace, rng=np.random.default_rng(flags.seed))
    elif flags.public.is_dir():
        trace = composed(flags, folder)
    else:
        print(f"no public traces in {flags.public}: synthetic traffic", file=sys.stderr)
        spec = get_engine_spec(ENGINE)
        trace = generate(hours=1.0, seed=flags.seed, preset="bursty", load=flags.load, spec=spec)
    kept = np.zeros(len(trace), np.bool_)
    for rows in sessions(trace):
        arrives_s = trace.arrival_s[rows[0]] + np.cumsum([0.0, *trace.think_s[rows[1:]]])
        kept[rows] = arrives_s < 60.0 * flags.minutes
    chosen = trace.take(np.flatnonzero(kept))
    return replace(chosen, cancel_after_s=np.full(len(chosen), np.inf))


def composed(flags: argparse.Namespace, folder: Path) -> Trace:
    """The public traces as one, at a share of the engine's capacity."""
    out = folder / "traffic.parquet"
    command = [*TRIMTAB, "trace", "compose", "--out", str(out), "--seed", str(flags.seed)]
    for tier, part in PARTS.items():
        command += ["--tier", f"{tier}={flags.public / part}"]
    command += ["--load", str(flags.load), "--engine", ENGINE, "--duration-s", "900"]
    command += ["--max-context-tokens", str(MOST_CONTEXT_TOKENS)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_trace(out, rng=np.random.default_rng(flags.seed))


class Versions(threading.Thread):
    """Looks at the engine's allocation once a second: versions, and how long none was static."""

    def __init__(self, path: Path) -> None:
        """Look at the engine behind a control socket."""
        super().__init__(daemon=True)
        self._path, self._ended = path, threading.Event()
        self.looks = self.leased = self.version = 0
        self.weights: list[dict[str, float]] = []

    def run(self) -> None:
        """Look until `close`."""
        with ControlClient(self._path, timeout_s=5) as control:
            while not self._ended.wait(1.0):
                found = control.get()
                self.looks += 1
                self.leased += found["state"] == "leased"
                self.version = int(found["version"])
                self.weights.append(found["allocation"]["weights"])

    def close(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join(10)


def run(name: str, trace: Trace, flags: argparse.Namespace, folder: Path) -> Report:
    """One run of the load on a fresh server, with the daemon or without."""
    folder.mkdir()
    control = folder / "control.sock"
    (folder / "metrics").mkdir()
    limits = ("--max-num-seqs", str(flags.max_num_seqs), "--control-socket", str(control))
    plan = () if flags.plan is None else ("--plan", str(flags.plan))
    env = {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")}
    with (
        server(folder, ENGINE, *limits, *plan, env=env) as url,
        beside(name, url, control, flags, folder) as started,
    ):
        versions = Versions(control)
        versions.start()
        clients = Clients(url, ENGINE.rpartition(":")[2], trace)
        before: Samples = {}
        asyncio.run(clients.run(lambda: before.update(samples(url))))
        after = samples(url)
        versions.close()
        shown = started.state() if started is not None else {}
    return {
        "took_s": _at_s(after) - _at_s(before),
        "failed": clients.failed,
        "clients": measured(trace, clients, load_plan(flags.plan)),
        "engine": judged(trace.tier_names, before, after),
        "allocation_changes": versions.version,
        "leased_fraction": versions.leased / max(1, versions.looks),
        "weights_from_to": {
            tier: [min(w[tier] for w in versions.weights), max(w[tier] for w in versions.weights)]
            for tier in trace.tier_names
        },
        "guard": shown.get("tally", {}),
    }


@contextmanager
def beside(
    name: str, url: str, control: Path, flags: argparse.Namespace, folder: Path
) -> Iterator[DaemonProcess | None]:
    """Prometheus and, unless the run is static, the daemon; both runs have the scrapes."""
    target = url.removeprefix("http://")
    with prometheus(folder / "prometheus", [target], "1s") as real:
        if name == "static":
            yield None
            return
        engine = {"control": str(control)} | ({"plan": str(flags.plan)} if flags.plan else {})
        settings = {
            "policy": flags.policy,
            "mode": "active",
            "prometheus": {"url": real.url, "match": {"instance": target}},
            "engines": {"engine": engine},
        }
        with daemon(folder / "daemon", settings) as started:
            yield started


def samples(url: str) -> Samples:
    """The engine's metrics now."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {(name, labels): float(value) for name, labels, value in _SAMPLE.findall(text)}


def _at_s(found: Samples) -> float:
    """When they were true, by the engine's clock."""
    return next(v for (name, _), v in found.items() if name == "trimtab_engine_time_seconds")


def judged(tiers: tuple[str, ...], before: Samples, after: Samples) -> Report:
    """Attainment by tier as the engine judged it."""

    def grown(name: str, tier: str) -> float:
        return sum(
            value - before.get((metric, labels), 0.0)
            for (metric, labels), value in after.items()
            if metric == name and f'tier="{tier}"' in labels
        )

    found = {}
    for tier in tiers:
        met, of = grown("trimtab_attained_total", tier), grown("trimtab_judged_total", tier)
        found[tier] = {"judged": of, "attainment": met / of if of else None}
    return found


def measured(trace: Trace, clients: Clients, plan: Plan) -> Report:
    """Attainment by tier as the clients measured it; a request that was given up missed."""
    found = {}
    for number, tier in enumerate(trace.tier_names):
        rows = np.flatnonzero(trace.tier == number).tolist()
        met = [row in clients.seen and attains(clients, row, plan, tier) for row in rows]
        given_up = sum(row in clients.seen and clients.seen[row].given_up for row in rows)
        found[tier] = {
            "requests": len(rows),
            "attainment": sum(met) / len(rows) if rows else None,
            "given_up": given_up,
        }
    return found


def attains(clients: Clients, row: int, plan: Plan, tier: str) -> bool:
    """Whether a request met all targets of its tier at its client."""
    seen, targets = clients.seen[row], plan.tiers[tier].targets
    first_ms, whole_ms = 1e3 * (seen.first_s - seen.sent_s), 1e3 * (seen.last_s - seen.sent_s)
    token_ms = (whole_ms - first_ms) / max(1, seen.tokens - 1)
    pairs = (
        (first_ms, targets.ttft_ms),
        (token_ms, targets.tpot_ms),
        (whole_ms, targets.e2e_ms),
    )
    return all(target is None or value <= target for value, target in pairs)


def replayed(trace: Trace, flags: argparse.Namespace, policy_name: str) -> Report:
    """What the replay says of the same load and limits, by tier: attainment as it judges."""
    spec = get_engine_spec(ENGINE).with_limits(
        async_scheduling=True, max_num_seqs=flags.max_num_seqs
    )
    plan, policy = load_plan(flags.plan), make_policy(policy_name)
    engine, interval_s = ReplayEngine(trace, plan, spec), float(plan.controller.interval_s)
    policy.reset(plan, 0)
    met, of = np.zeros(len(plan.tiers)), np.zeros(len(plan.tiers))
    while not engine.finished:
        telemetry = engine.advance(interval_s)
        for number, tier in enumerate(telemetry.tiers):
            if tier.has_attainment:
                met[number] += tier.attainment * tier.attainment_samples
                of[number] += tier.attainment_samples
        engine.apply(policy.act(telemetry))
    return {
        tier: {"judged": float(n), "attainment": float(m / n) if n else None}
        for tier, m, n in zip(plan.tier_names, met, of, strict=True)
    }


def audited(folder: Path) -> Report:
    """What `trimtab whatif --audit` makes of the daemon's audit log."""
    command = [*TRIMTAB, "whatif", "--audit", str(folder / "daemon" / "state" / "audit")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return {"exit": done.returncode, "says": (done.stdout + done.stderr).strip().splitlines()}


def main(argv: list[str] | None = None) -> int:
    """Run both; 1 if a request was lost, or the audit log replays to other decisions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="arrivals, minutes")
    parser.add_argument("--trace", type=Path, help="load to send, instead of a composed one")
    parser.add_argument("--public", type=Path, default=ROOT.parent / "shared" / "traces")
    parser.add_argument("--load", type=float, default=0.35, help="share of the engine's capacity")
    parser.add_argument("--max-num-seqs", type=int, default=12, help="the engine's batch cap")
    parser.add_argument("--policy", default="learned")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=CONTENDERS, help="one of the two runs")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        trace = traffic(flags, folder)
        tokens = int(trace.prompt_tokens.sum()), int(trace.output_tokens.sum())
        print(
            f"{len(trace)} requests, {tokens[0]} prompt and {tokens[1]} output tokens", flush=True
        )
        report: Report = {
            "schema": 1,
            "engine": ENGINE,
            "max_num_seqs": flags.max_num_seqs,
            "minutes": flags.minutes,
            "load": flags.load,
            "requests": len(trace),
            "replay": {
                "daemon": replayed(trace, flags, flags.policy),
                "static": replayed(trace, flags, "static"),
            },
        }
        for name in CONTENDERS if flags.only is None else (flags.only,):
            report[name] = run(name, trace, flags, folder / name)
            show(name, report)
            if name == "daemon":
                report["audit"] = audited(folder / name)
                print(*report["audit"]["says"], sep="\n", flush=True)
    if flags.json is not None:
        flags.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    lost = [line for name in CONTENDERS for line in report.get(name, {}).get("failed", [])]
    print(*lost[:5], sep="\n", file=sys.stderr)
    return 1 if lost or report.get("audit", {}).get("exit", 0) else 0


def show(name: str, report: Report) -> None:
    """Print a run."""
    found = report[name]
    print(f"{name}: {found['allocation_changes']} changes of the allocation")
    for tier, seen in found["clients"].items():
        engine, replay = found["engine"][tier], report["replay"][name][tier]
        low, high = found["weights_from_to"][tier]
        print(
            f"  {tier}  {seen['requests']:5} requests, {seen['given_up']:4} given up; attainment:"
            f" clients {percent(seen['attainment'])}, engine {percent(engine['attainment'])},"
            f" replay {percent(replay['attainment'])}; weight {low:.4g} to {high:.4g}",
            flush=True,
        )


def percent(share: float | None) -> str:
    """A share for people."""
    return "    -" if share is None else f"{100 * share:5.1f} %"


if __name__ == "__main__":
    sys.exit(main())
