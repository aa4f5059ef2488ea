"""How the shipped plan was found: a seeded search over a plan's values on given traces.

    python benchmarks/search_plan.py [--case ENGINE=TRACE ...] [--evaluations N] [--json F]

Without a case it searches on the built-in hour. From the plan given it changes a few values at a
time and keeps a change that raises the mean weighted attainment over all cases (a (1+1) evolution
strategy). It writes no plan: the values that it ends with are printed for a person to judge.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.trace import Trace
from trimtab.envs.score import weighted_attainment
from trimtab.training.traces import read_trace
from trimtab.training.traces.generate import demo_trace
from trimtab.training.whatif import metrics
from trimtab.training.whatif.run import default_drain_s

Case = tuple[EngineSpec, Trace]

SCALED = {
    "tiers.T0.weight": (100.0, 10_000.0),
    "tiers.T1.weight": (10.0, 2_000.0),
    "tiers.T2.weight": (1.0, 50.0),
    "prefill.budget_tokens": (512.0, 8_192.0),
    "feasible.window_ms": (50.0, 50_000.0),
    "prefill.min_chunk_tokens": (16.0, 1_024.0),
    "slack.low_tier_chunk_share": (0.02, 1.0),
    "retention.classes.T1-tool_use.factor": (0.05, 1.0),
    "retention.classes.T1.factor": (0.05, 1.0),
    "retention.classes.T2.factor": (0.001, 0.5),
    "retention.classes.T2-reused.factor": (0.001, 0.5),
    "retention.classes.T3.factor": (0.0001, 0.1),
}
"""Values searched in ratios: (least, greatest)."""
LINEAR = {
    "slack.slack_fraction": (0.05, 1.0),
    "slack.tpot_fraction": (0.6, 1.0),
    "prediction.output_quantile": (0.3, 0.9),
    "tiers.T1.shed.at_fraction": (0.5, 1.5),
    "tiers.T2.shed.at_fraction": (0.5, 1.5),
    "tiers.T3.shed.at_fraction": (0.5, 1.0),
}
"""Values searched in differences."""
CHOICES = {
    "tiers.T0.shed.mode": ("never", "demote"),
    "tiers.T1.shed.mode": ("never", "demote", "refuse"),
    "tiers.T2.shed.mode": ("never", "demote", "refuse"),
    "rules.prefill_shares": (True, False),
}
WHOLE = ("prefill.budget_tokens", "prefill.min_chunk_tokens")


def value_of(plan: Plan, key: str) -> object:
    """The value at a dotted key of a plan."""
    found: object = plan
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found


def score(plan: Plan, yardstick: Plan, cases: list[Case]) -> tuple[float, list[float]]:
    """Mean weighted attainment of a plan's static allocation, and each case's."""
    found = []
    for spec, trace in cases:
        by = metrics.yardstick(trace, yardstick)
        engine = ReplayEngine(trace, plan, spec)
        engine.run(interval_s=60.0, until_s=trace.duration_s + default_drain_s(yardstick))
        result = engine.result()
        found.append(weighted_attainment(by.demand, metrics.judge(result, by).met.every))
    return float(np.mean(found)), found


def mutate(values: dict[str, object], rng: np.random.Generator) -> dict[str, object]:
    """Change one to four values by a random step."""
    changed = dict(values)
    for key in rng.choice(list(values), size=int(rng.integers(1, 5)), replace=False):
        if key in SCALED:
            low, high = SCALED[key]
            step = float(np.exp(rng.normal(0.0, 0.5)))
            changed[key] = float(np.clip(float(changed[key]) * step, low, high))  # type: ignore[arg-type]
            if key in WHOLE:
                changed[key] = round(float(changed[key]))  # type: ignore[arg-type]
        elif key in LINEAR:
            low, high = LINEAR[key]
            step = rng.normal(0.0, 0.15 * (high - low))
            changed[key] = float(np.clip(float(changed[key]) + step, low, high))  # type: ignore[arg-type]
        else:
            options = CHOICES[str(key)]
            changed[key] = options[int(rng.integers(len(options)))]
    return changed


def main() -> None:
    """Search and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", default=[], help="ENGINE=TRACE")
    parser.add_argument("--plan", default="default")
    parser.add_argument("--evaluations", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    cases = []
    for case in args.case:
        engine, _, path = case.rpartition("=")
        cases.append((get_engine_spec(engine), read_trace(Path(path), rng=rng)))
    if not cases:
        cases = [(get_engine_spec("h100:llama-3.1-8b-tp1"), demo_trace(0))]
    yardstick = load_plan(args.plan)
    best = {key: value_of(yardstick, key) for key in (*SCALED, *LINEAR, *CHOICES)}
    best_score, each = score(yardstick, yardstick, cases)
    print(f"start {best_score:.4f} {np.round(each, 3)}", flush=True)
    started = time.monotonic()
    for number in range(args.evaluations):
        if time.monotonic() - started > args.seconds:
            break
        trial = mutate(best, rng)
        found, each = score(with_values(yardstick, trial), yardstick, cases)
        if found > best_score:
            changed = {k: v for k, v in trial.items() if v != best[k]}
            best, best_score = trial, found
            print(f"{number:4d} {found:.4f} {np.round(each, 3)} {changed}", flush=True)
    print(json.dumps(best, indent=2))
    if args.json:
        args.json.write_text(json.dumps({"score": best_score, "values": best}, indent=2))


if __name__ == "__main__":
    main()
