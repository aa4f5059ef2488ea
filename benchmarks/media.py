"""What a wave of images or videos in batch prompts does to paid chat, under three schedulers.

    python benchmarks/media.py [--seeds N] [--json F]

The 8B engine with an encoder, in the replay: steady chats of T0, and for 30 seconds prompts of T2
that show several images each, or one long video. Side by side stock FCFS, stock priority and
Trimtab on the shipped plan: T0's TTFT and TPOT while the wave is served, when T2 is done, and the
longest step. Then Trimtab with an encoder that costs nothing, which is what chats could have at
best.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.engine_bridge.encoder_spec import EncoderSpec
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.media import IMAGE, VIDEO, MediaItems
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.trace import Trace

TIERS = ("T0", "T1", "T2", "T3")
T0, T2 = 0, 2
CHATS_PER_S, LASTS_S = 4.0, 60.0
WAVE_S = (10.0, 40.0)
ENCODER = EncoderSpec(
    budget_tokens=16_384,
    cache_tokens=16_384,
    kinds=((2.0, 60.0, 0.0), (2.0, 20.0, 0.0), (5.0, 60.0, 0.0)),
)
"""A vision tower of some 0.6 billion parameters: 60 us for a prompt token of an image."""


@dataclass(frozen=True)
class Wave:
    """Prompts of T2 that come at once every so often."""

    name: str
    kind: int
    per_s: float
    items: int
    """In each prompt."""
    tokens: int
    """Of each item."""


WAVES = (
    Wave("images", IMAGE, per_s=2.0, items=6, tokens=1_100),
    Wave("videos", VIDEO, per_s=0.5, items=1, tokens=12_000),
)


def traffic(wave: Wave, seed: int) -> Trace:
    """Chats and the wave; the same for every scheduler."""
    rng = np.random.default_rng(seed)
    chats = np.sort(rng.uniform(0.0, LASTS_S, int(CHATS_PER_S * LASTS_S)))
    shows = np.sort(rng.uniform(*WAVE_S, int(wave.per_s * (WAVE_S[1] - WAVE_S[0]))))
    arrival = np.concatenate([chats, shows])
    order = np.argsort(arrival, kind="stable")
    tier = np.repeat([T0, T2], [len(chats), len(shows)])[order]
    shown = (tier == T2) * wave.items
    text = np.where(tier == T0, rng.lognormal(np.log(500), 0.8, len(tier)), 60).astype(int) + 1
    places = 30 + np.arange(wave.items) * wave.tokens
    count = int(shown.sum())
    return Trace.build(
        arrival_s=arrival[order],
        tier=tier,
        tier_names=TIERS,
        prompt_tokens=text + shown * wave.tokens,
        output_tokens=np.where(tier == T0, 250, 60),
        media=MediaItems(
            offsets=np.concatenate(([0], np.cumsum(shown))),
            kind=np.full(count, wave.kind, np.int32),
            start_tokens=np.tile(places, len(shows)).astype(np.int32),
            tokens=np.full(count, wave.tokens, np.int32),
            content=np.arange(count, dtype=np.int32),
        ),
    )


def run(trace: Trace, spec: EngineSpec, rules: RuleSet) -> dict[str, float]:
    """Figures of one run, milliseconds."""
    never = {f"tiers.{tier}.shed.mode": "never" for tier in TIERS}
    engine = ReplayEngine(trace, with_values(load_plan(), never), spec, rules=rules)
    longest_ms = 0.0
    while not engine.finished:
        # An interval of one step, or a millisecond of idling.
        told = engine.advance(max(1e-3, engine.now_s - engine.due_s + 1e-9))
        if told.steps:
            longest_ms = max(longest_ms, told.step_ms_mean)
    got = engine.result()
    columns = {name: np.asarray(column, np.float64) for name, column in got.requests.items()}
    ttft_ms = (columns["first_token_s"] - columns["arrival_s"]) * 1e3
    lasted_ms = (columns["last_token_s"] - columns["first_token_s"]) * 1e3
    tpot_ms = lasted_ms / np.maximum(1, columns["output_tokens"] - 1)
    done_s = float(columns["last_token_s"][trace.tier == T2].max())
    meanwhile = (trace.tier == T0) & (trace.arrival_s >= WAVE_S[0])
    meanwhile &= trace.arrival_s <= max(WAVE_S[1], min(done_s, LASTS_S))
    return {
        "t0_ttft_p50_ms": float(np.median(ttft_ms[meanwhile])),
        "t0_ttft_p99_ms": float(np.quantile(ttft_ms[meanwhile], 0.99)),
        "t0_tpot_p50_ms": float(np.median(tpot_ms[meanwhile])),
        "t0_tpot_p99_ms": float(np.quantile(tpot_ms[meanwhile], 0.99)),
        "longest_step_ms": longest_ms,
        "t2_ttft_p50_ms": float(np.median(ttft_ms[trace.tier == T2])),
        "t2_done_s": done_s,
        "encode_s": float(got.encode_ms.sum()) * 1e-3,
    }


def contenders() -> tuple[tuple[str, RuleSet, EncoderSpec], ...]:
    """Name, rules and encoder of each."""
    free = replace(ENCODER, kinds=((0.0, 0.0, 0.0),) * 3)
    return (
        ("stock FCFS", "fcfs", ENCODER),
        ("stock priority", "priority", ENCODER),
        ("Trimtab", "fair", ENCODER),
        ("Trimtab, encoder for nothing", "fair", free),
    )


def main() -> None:
    """Run all of them, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spec = get_engine_spec("h100:llama-3.1-8b-tp1")
    rows: list[dict[str, Any]] = []
    for wave in WAVES:
        traces = [traffic(wave, seed) for seed in range(args.seeds)]
        for name, rules, encoder in contenders():
            runs = [run(trace, replace(spec, encoder=encoder), rules) for trace in traces]
            mean = {key: float(np.mean([one[key] for one in runs])) for key in runs[0]}
            rows.append({"wave": wave.name, "scheduler": name, **mean})
            _print(rows[-1])
    if args.json:
        facts = {"encoder": asdict(ENCODER), "waves": [asdict(wave) for wave in WAVES]}
        args.json.write_text(json.dumps({"seeds": args.seeds, **facts, "rows": rows}, indent=1))


def _print(row: dict[str, Any]) -> None:
    print(
        f"{row['wave']:7} {row['scheduler']:29} T0 TTFT {row['t0_ttft_p50_ms']:6.0f} / "
        f"{row['t0_ttft_p99_ms']:6.0f} ms, TPOT {row['t0_tpot_p50_ms']:5.1f} / "
        f"{row['t0_tpot_p99_ms']:5.1f} ms (P50 / P99); longest step "
        f"{row['longest_step_ms']:6.0f} ms; T2 TTFT {row['t2_ttft_p50_ms'] / 1e3:5.1f} s, "
        f"done at {row['t2_done_s']:5.1f} s; encoding {row['encode_s']:4.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
