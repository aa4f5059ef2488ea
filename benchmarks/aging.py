"""What ageing is worth: waits and attainment by tier under a few settings of the plan's `aging`.

    python benchmarks/aging.py [--case ENGINE=TRACE ...] [--json F] [--markdown F]

Without cases: the built-in hour, and a crowd of ever new tenants that keeps one long prompt of
their tier waiting. Figures of a tier: attainment by the shipped plan's targets, P99 and longest
time to first token of the requests that got one. `docs/ablation.md` holds a run.
"""

from __future__ import annotations

import argparse
import json
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

SMALL_ENGINE = "h100:llama-3.1-8b-tp1"
PATIENT = "patient"
NO_SHED = {"rules.late_shedding": False}
EQUAL = {f"tiers.{name}.weight": 1.0 for name in ("T0", "T1", "T2", "T3")}


def tenants(full_after_s: float, due_every: int) -> dict[str, object]:
    """Ageing between the tenants of a tier, as far as the shipped plan's rule 14 reaches."""
    return {
        "aging.tenant_window_ms": 1500.0,
        "aging.full_after_s": full_after_s,
        "aging.due_every": due_every,
    }


def tiers(window_ms: float, bonus: float = 0.0) -> dict[str, object]:
    """Ageing between tiers, after 10 s; a bonus is T0's."""
    return {
        "aging.tier_window_ms": window_ms,
        "aging.interactive_bonus": bonus,
        "tiers.T0.interactive": True,
    }


SETTINGS: dict[str, dict[str, object]] = {
    "shipped plan": {},
    "tenants, 10 s, 1 in 8": tenants(10.0, 8),
    "tenants, 2 s, 1 in 8": tenants(2.0, 8),
    "tenants, 2 s, always": tenants(2.0, 1),
    "tiers, 50 ms": tiers(50.0),
    "tiers, 1,500 ms, T0 bonus 0.25": tiers(1500.0, 0.25),
    "no shedding": NO_SHED,
    "no shedding; tenants, 10 s, 1 in 8": NO_SHED | tenants(10.0, 8),
    "no shedding; tiers, 50 ms": NO_SHED | tiers(50.0),
    "equal weights": dict(EQUAL),
    "equal weights; tiers, 1,500 ms, T0 bonus 1": EQUAL | tiers(1500.0, 1.0),
}
CROWD_SETTINGS: dict[str, dict[str, object]] = {
    "no shedding": NO_SHED,
    **{
        f"no shedding; tenants, 5 s, {'always' if every == 1 else f'1 in {every}'}": NO_SHED
        | tenants(5.0, every)
        for every in (1, 2, 8, 16)
    },
}


def crowd_trace(per_s: float = 24.0, lasts_s: float = 60.0) -> Trace:
    """A crowd that is 5 % too large for the 8B engine, and one prompt of 30,000 tokens, all in T0.

    Each of the crowd is a tenant of its own; the long prompt's is the last one.
    """
    count = int(per_s * lasts_s)
    arrival_s = np.append(np.arange(count) / per_s, 2.0)
    order = np.argsort(arrival_s, kind="stable")
    return Trace.build(
        arrival_s=arrival_s[order],
        tier=np.zeros(count + 1, int),
        tenant=np.arange(count + 1)[order],
        prompt_tokens=np.append(np.full(count, 2000), 30_000)[order],
        output_tokens=np.full(count + 1, 8),
        tier_names=("T0",),
        tenant_names=(*(f"new-{n}" for n in range(count)), PATIENT),
    )


def measure(trace: Trace, spec: EngineSpec, shipped: Plan, changes: dict[str, object]) -> dict:
    """One run: weighted attainment, each tier's figures; of the crowd the long prompt's wait."""
    engine = ReplayEngine(trace, with_values(shipped, changes), spec)
    engine.run(interval_s=60.0, until_s=trace.duration_s + default_drain_s(shipped))
    result = engine.result()
    by = metrics.yardstick(trace, shipped)
    met = metrics.judge(result, by).met.every
    q = result.requests
    wait_s = q["first_token_s"] - q["arrival_s"]
    figures: dict = {
        "weighted_attainment": float(weighted_attainment(by.demand, met)),
        "service_gap_ms": result.service_gap_ms,
        "service_gap_bound_ms": result.service_gap_bound_ms,
        "tiers": {},
    }
    for name in trace.tier_names:
        rows = by.tier == shipped.tier_index(name)
        if not rows.any():
            continue
        figures["tiers"][name] = {
            "attainment": float(met[rows].mean()),
            "p99_ttft_s": float(np.nanpercentile(wait_s[rows], 99)),
            "longest_ttft_s": float(np.nanmax(wait_s[rows])),
        }
    if trace.tenant_names[-1] == PATIENT:
        patient = trace.tenant == len(trace.tenant_names) - 1
        figures["patient_ttft_s"] = float(wait_s[patient][0])
    return figures


def markdown(case: str, rows: dict[str, dict]) -> str:
    """A table, one line a setting."""
    first = next(iter(rows.values()))
    names = list(first["tiers"])
    patient = "patient_ttft_s" in first
    head = [case, "weighted", *names, *(["long prompt, s"] if patient else [])]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, row in rows.items():
        cells = [name, f"{row['weighted_attainment']:.1%}"]
        for tier in row["tiers"].values():
            waits = f"{tier['p99_ttft_s']:.2f} / {tier['longest_ttft_s']:.1f}"
            cells.append(f"{tier['attainment']:.1%}, {waits}")
        if patient:
            cells.append(f"{row['patient_ttft_s']:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run every case under every setting and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", help="ENGINE=TRACE", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    shipped = load_plan(None)
    cases = []
    for text in args.case:
        engine, _, path = text.rpartition("=")
        trace = read_trace(Path(path), rng=np.random.default_rng(0))
        cases.append((Path(path).stem, get_engine_spec(engine), trace, SETTINGS))
    if not cases:
        spec = get_engine_spec(SMALL_ENGINE)
        cases = [
            ("built-in hour", spec, demo_trace(0), SETTINGS),
            ("crowd", spec, crowd_trace(), CROWD_SETTINGS),
        ]
    results, tables = {}, []
    for case, spec, trace, settings in cases:
        results[case] = {n: measure(trace, spec, shipped, c) for n, c in settings.items()}
        tables.append(markdown(case, results[case]))
        print(tables[-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    if args.markdown:
        args.markdown.write_text("\n".join(tables))


if __name__ == "__main__":
    main()
