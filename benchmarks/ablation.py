"""What each rule is worth: weighted attainment with one rule off at a time, on given traces.

    python benchmarks/ablation.py --case ENGINE=TRACE ... [--json F] [--markdown F]

Every variant runs on every case and is measured by the shipped plan's targets and values. The
table gives each case's weighted attainment in %, their mean, and the mean attainment by tier.
`docs/ablation.md` holds a run and the commands that made its traces.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.trace import Trace
from trimtab.envs.score import weighted_attainment
from trimtab.training.traces import read_trace
from trimtab.training.traces.generate import demo_trace
from trimtab.training.whatif import metrics
from trimtab.training.whatif.run import default_drain_s


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    plan: Plan
    rules: RuleSet = "fair"


@dataclass(frozen=True)
class Case:
    """One column of the table."""

    name: str
    spec: EngineSpec
    trace: Trace


def variants(shipped: Plan) -> list[Variant]:
    """Stock vLLM, the published static plan, the shipped plan, and that with one rule changed."""

    def changed(name: str, values: dict[str, object]) -> Variant:
        return Variant(name, with_values(shipped, values))

    def stock(tokens: int, rules: RuleSet) -> Variant:
        limits = {"engine.max_num_batched_tokens": tokens, "prefill.budget_tokens": tokens}
        plan = with_values(shipped, limits)
        return Variant(f"stock {rules}, {tokens:,} tokens a step", plan, rules)

    return [
        *(stock(tokens, "fcfs") for tokens in (8192, 2048, 1024, 512)),
        *(stock(tokens, "priority") for tokens in (8192, 2048, 1024, 512)),
        Variant("published static (70/20/10, 4,096 tokens)", load_plan("published")),
        Variant("shipped plan", shipped),
        changed("rule 2: no true-up", {"rules.true_up": False}),
        changed("rule 4: no prefill budget", {"rules.prefill_budget": False}),
        changed("rule 4: shares on", {"rules.prefill_shares": True}),
        changed("rule 4: shares off", {"rules.prefill_shares": False}),
        changed("rule 5: no pools", {"rules.kv_pools": False}),
        changed("rule 7: factors only, no learned reuse", {"retention.learn_reuse": False}),
        changed("rule 7: plain LRU", {"retention.eviction": "lru"}),
        changed("rule 7: strict tier order", {"retention.eviction": "tier_order"}),
        changed("rule 7: fixed quotas", {"retention.eviction": "fixed_quota"}),
        changed("rule 8: no back-off", {"rules.backoff": False}),
        changed("rule 13: no slack-sized chunk", {"rules.slack_chunk": False}),
        changed("rule 14: no feasible-first", {"rules.feasible_first": False}),
        changed("rule 14: prefill factor 5", {"feasible.prefill_factor": 5.0}),
        changed("rule 14: running prefills too", {"feasible.chunks": True}),
        changed("rule 14: both", {"feasible.prefill_factor": 5.0, "feasible.chunks": True}),
        changed("ageing between tenants: 1,500 ms after 10 s", {"aging.tenant_window_ms": 1500.0}),
        changed("ageing between tiers: 50 ms after 10 s", {"aging.tier_window_ms": 50.0}),
        changed("rule 15: no late shedding", {"rules.late_shedding": False}),
        changed(
            "rule 15: demote instead of refuse",
            {"tiers.T1.shed.mode": "demote", "tiers.T2.shed.mode": "demote"},
        ),
        *(
            changed(f"rule 16: steps of {ms:g} ms at most", {"isolation.longest_step_ms": ms})
            for ms in (20.0, 30.0)
        ),
        changed("no preemption at the batch cap", {"rules.cap_preemption": False}),
        changed("equal weights", {f"tiers.{name}.weight": 1.0 for name in shipped.tiers}),
    ]


def measure(variant: Variant, case: Case, yardstick: Plan) -> tuple[float, list[float]]:
    """Weighted attainment of one run, and each tier's attainment."""
    engine = ReplayEngine(case.trace, variant.plan, case.spec, rules=variant.rules)
    engine.run(interval_s=60.0, until_s=case.trace.duration_s + default_drain_s(yardstick))
    by = metrics.yardstick(case.trace, yardstick)
    met = metrics.judge(engine.result(), by).met.every
    tiers = [float(met[by.tier == t].mean()) for t in range(len(yardstick.tiers))]
    return weighted_attainment(by.demand, met), tiers


def markdown(rows: list[dict], cases: list[Case], tiers: tuple[str, ...]) -> str:
    """The table, one line a variant."""
    head = ["variant", "mean", *(c.name for c in cases), *tiers]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        figures = [row["mean"], *row["cases"], *row["tiers"]]
        lines.append(f"| {row['variant']} | " + " | ".join(f"{v:.1%}" for v in figures) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", help="ENGINE=TRACE", default=[])
    parser.add_argument("--plan", default="default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    shipped = load_plan(args.plan)
    cases = []
    for text in args.case:
        engine, _, path = text.rpartition("=")
        cases.append(
            Case(Path(path).stem, get_engine_spec(engine), read_trace(Path(path), rng=rng))
        )
    if not cases:
        cases = [Case("demo", get_engine_spec("h100:llama-3.1-8b-tp1"), demo_trace(0))]
    rows = []
    for variant in variants(shipped):
        runs = [measure(variant, case, shipped) for case in cases]
        found = [weighted for weighted, _ in runs]
        tiers = np.nanmean([by_tier for _, by_tier in runs], axis=0).tolist()
        rows.append(
            {
                "variant": variant.name,
                "mean": float(np.mean(found)),
                "cases": found,
                "tiers": tiers,
            }
        )
        print(f"{np.mean(found):7.2%}  {variant.name}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"cases": [c.name for c in cases], "rows": rows}, indent=2))
    if args.markdown:
        args.markdown.write_text(markdown(rows, cases, shipped.tier_names))


if __name__ == "__main__":
    main()
