"""Chosen draft lengths against the best fixed one, by batch, acceptance, tier and draft model.

    python benchmarks/speculation.py [--quick] [--json F]

Decode-only batches of one tier and of three mixed ones, on the replay of the shipped 8B engine. A
fixed length is stock rules' (every request verifies that many drafts); the chosen ones are rule
9's. Tokens a second are counted over 200 steps, from 100 after the last chunk of a prompt on.

Then mixed traffic with prompts, from light load to beyond the engine's capacity: weighted
attainment with prefill tokens weighed in the choice (as it is) and without.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import numpy as np

from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.rules.speculation import PREFILL_WORTH
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace
from trimtab.envs import score
from trimtab.training.whatif import metrics

TIERS = ("T0", "T1", "T2", "T3")
MOST = 4
FIXED = (0, 1, 2, 3, 4)
BATCHES = (1, 8, 32, 64, 128, 256)
ACCEPTANCE = (0.1, 0.3, 0.4, 0.6, 0.75, 0.9)
MIXED = {"T0": 0.75, "T2": 0.40, "T3": 0.30}
DRAFTERS = {
    "n-grams": DraftSpec(tokens=MOST),
    "small model": DraftSpec(tokens=MOST, us_per_token=10.0, pass_ms=0.3),
    "falling": DraftSpec(tokens=MOST, us_per_token=2.0, pass_ms=0.1, kept=0.85),
}
"""Drafts for nothing; a draft model of one eighth of the target's step; a head like EAGLE's, whose
later drafts are accepted less often."""
PROMPT, OUTPUT = 64, 4000
SETTLING, STEPS = 100, 200
STREAMS = ((4.0, 800, 250), (2.0, 2500, 250), (1.2, 8000, 200), (1.2, 600, 400))
"""By tier: requests a second at a load of 1, and medians of prompt and answer."""
TRAFFIC_ACCEPTANCE = ((0.75, 0.7, 0.4, 0.3), (0.4, 0.4, 0.4, 0.3))
TRAFFIC_S, DRAIN_S = 120.0, 120.0


def traffic(tiers: list[str], acceptance: list[float]) -> Trace:
    """All requests at once."""
    return Trace.build(
        arrival_s=np.zeros(len(tiers)),
        prompt_tokens=np.full(len(tiers), PROMPT),
        output_tokens=np.full(len(tiers), OUTPUT),
        tier=np.array([TIERS.index(tier) for tier in tiers]),
        tier_names=TIERS,
        acceptance=np.array(acceptance),
    )


def tokens_per_s(
    trace: Trace, spec: EngineSpec, rules: RuleSet
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Of the whole batch, by tier, and each tier's mean length, over the steps that count."""
    never = {f"tiers.{tier}.shed.mode": "never" for tier in TIERS}
    lengths = {f"tiers.{tier}.draft_tokens": MOST for tier in TIERS}
    engine = ReplayEngine(trace, with_values(load_plan(), never | lengths), spec, rules=rules)
    tokens, seconds, before = np.zeros(len(TIERS)), 0.0, ()
    steps = (engine.advance(engine.now_s - engine.due_s + 1e-9) for _ in iter(int, 1))
    for step in islice(_settled(steps), STEPS):
        before = before or engine.result().drafts
        tokens += [tier.decode_tokens for tier in step.tiers]
        seconds += step.interval_s
    by_tier = {name: float(n) / seconds for name, n in zip(TIERS, tokens, strict=True) if n}
    length = (
        {
            name: (new.drafts - old.drafts) / (new.steps - old.steps)
            for name, old, new in zip(TIERS, before, engine.result().drafts, strict=True)
            if name in by_tier
        }
        if before
        else {}
    )
    return float(tokens.sum()) / seconds, by_tier, length


def _settled(steps: Iterator[Telemetry]) -> Iterator[Telemetry]:
    """The steps after the last chunk of a prompt and the choices that follow it."""
    quiet = 0
    for step in steps:
        if quiet >= SETTLING:
            yield step
        decodes = sum(tier.prefill_tokens + tier.queue_length for tier in step.tiers) == 0
        quiet = quiet + 1 if decodes else 0


def compare(tiers: list[str], acceptance: list[float], drafter: str) -> dict:
    """One batch under every fixed length and under the chosen ones."""
    trace = traffic(tiers, acceptance)
    spec = get_engine_spec("h100:llama-3.1-8b-tp1").with_limits(max_num_seqs=256)
    fixed = {}
    for length in FIXED:
        draft = replace(DRAFTERS[drafter], tokens=length) if length else None
        fixed[length] = tokens_per_s(trace, replace(spec, draft=draft), "fcfs")[0]
    rate, by_tier, mean = tokens_per_s(trace, replace(spec, draft=DRAFTERS[drafter]), "fair")
    best = max(fixed, key=lambda length: fixed[length])
    return {
        "drafter": drafter,
        "batch": len(tiers),
        "fixed_tokens_per_s": fixed,
        "best_fixed": best,
        "chosen_tokens_per_s": rate,
        "chosen_by_tier": by_tier,
        "mean_length": mean,
        "against_best": rate / fixed[best],
        "against_longest": rate / fixed[MOST],
        "against_none": rate / fixed[0],
    }


def mixed_traffic(seed: int, load: float, acceptance: tuple[float, ...]) -> Trace:
    """Two minutes of four tiers; at a load of 1 the engine is busy less than half of the time."""
    rng = np.random.default_rng(seed)
    rows = [
        (at, tier, rng.lognormal(np.log(prompt), 0.7), rng.lognormal(np.log(output), 0.6))
        for tier, (rate, prompt, output) in enumerate(STREAMS)
        for at in rng.uniform(0.0, TRAFFIC_S, rng.poisson(rate * load * TRAFFIC_S))
    ]
    table = np.array(sorted(rows))
    tier = table[:, 1].astype(int)
    return Trace.build(
        arrival_s=table[:, 0],
        tier=tier,
        prompt_tokens=np.maximum(1, table[:, 2]).astype(int),
        output_tokens=np.maximum(2, table[:, 3]).astype(int),
        tier_names=TIERS,
        acceptance=np.array(acceptance)[tier],
    )


def attainment(trace: Trace, draft: DraftSpec, prefill_worth: float) -> float:
    """Weighted attainment under rule 9 with that worth of a prefill token."""
    plan = with_values(load_plan(), {f"tiers.{tier}.draft_tokens": MOST for tier in TIERS})
    spec = replace(get_engine_spec("h100:llama-3.1-8b-tp1"), draft=draft)
    engine = ReplayEngine(trace, plan, spec)
    engine._state.draft_cost[2] = prefill_worth
    engine.run(interval_s=2.0, until_s=trace.duration_s + DRAIN_S)
    by = metrics.yardstick(trace, plan)
    met = metrics.judge(engine.result(), by).met.every
    return float(score.weighted_attainment(by.demand, met))


def weigh_prefill(*, quick: bool) -> list[dict]:
    """Weighted attainment with and without, by drafter, acceptance and load, paired by seed."""
    rows = []
    loads, seeds = ((2.4,), 2) if quick else ((0.6, 1.4, 2.0, 2.4), 6)
    for drafter, shares, load in product(("n-grams", "small model"), TRAFFIC_ACCEPTANCE, loads):
        pairs = [
            [attainment(trace, DRAFTERS[drafter], worth) for worth in (0.0, PREFILL_WORTH)]
            for trace in (mixed_traffic(seed, load, shares) for seed in range(seeds))
        ]
        without, weighed = np.mean(pairs, axis=0)
        rows.append(
            {
                "drafter": drafter,
                "acceptance": shares,
                "load": load,
                "without": float(without),
                "weighed": float(weighed),
                "seeds_better": sum(b > a for a, b in pairs),
                "seeds_worse": sum(b < a for a, b in pairs),
            }
        )
        print(
            f"{drafter:12} {shares} load {load}: {without:.4f}, weighed {weighed:.4f}", flush=True
        )
    return rows


def main() -> None:
    """Run the grid, print it, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a part of the grid")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = (1, 32, 128) if args.quick else BATCHES
    shares = (0.3, 0.75) if args.quick else ACCEPTANCE
    rows = []
    for drafter, batch in product(DRAFTERS, batches):
        for share in shares:
            row = compare(["T0"] * batch, [share] * batch, drafter)
            rows.append({"tiers": "T0", "acceptance": share, **row})
            _print(rows[-1])
        if batch >= len(MIXED):
            tiers = list(MIXED) * (batch // len(MIXED))
            row = compare(tiers, [MIXED[tier] for tier in tiers], drafter)
            rows.append({"tiers": "+".join(MIXED), "acceptance": MIXED, **row})
            _print(rows[-1])
    ratios = [row["against_best"] for row in rows]
    result = {
        "rows": rows,
        "prefill_worth": weigh_prefill(quick=args.quick),
        "least_against_best": min(ratios),
        "median_against_best": float(np.median(ratios)),
        "best_against_longest": max(row["against_longest"] for row in rows),
        "best_against_none": max(row["against_none"] for row in rows),
    }
    print(
        json.dumps({name: value for name, value in result.items() if name not in _TABLES}, indent=2)
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


_TABLES = ("rows", "prefill_worth")


def _print(row: dict) -> None:
    lengths = " ".join(f"{tier}:{length:.1f}" for tier, length in row["mean_length"].items())
    print(
        f"{row['drafter']:12} {row['tiers']:9} batch {row['batch']:3} acceptance "
        f"{row['acceptance']}: best fixed {row['best_fixed']} chosen {lengths} "
        f"{row['against_best']:.3f} of the best, {row['against_none']:.2f} of none",
        flush=True,
    )


if __name__ == "__main__":
    main()
