"""The learned policy against static, tuned static, reactive and stock, on traffic it has not seen.

    python benchmarks/learned.py [--bundle DIR] [--tuned PLAN] [--data DIR] [--quick] [--json F]
                                 [--markdown F]

Without `--bundle` the shipped policy plays; without `--tuned` (a plan that `trimtab tune` made of
the training traces) that row is left out. The traffic is drawn here, with seeds of its own; with
`--data`, a folder of public traces, two real mixes are added. Every contender plays every trace at
every speed of the engine, so that all differences are paired. docs/learned.md holds a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.errors import TrimtabError
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.trace import Trace
from trimtab.training.evaluation.paired import Comparison, Evaluation, evaluate
from trimtab.training.traces.compose import compose
from trimtab.training.traces.generate import generate
from trimtab.training.traces.options import ReadOptions
from trimtab.training.traces.part_files import PartChoices, read_parts
from trimtab.training.whatif.run import Contender
from trimtab.training.whatif.schema import jsonable
from trimtab.training.whatif.variation import session_rows

LEARNED, STATIC, TUNED = "learned", "static", "tuned static"
OTHERS = ("reactive", "stock-priority", "stock-fcfs")
FIRST_SEED = 770_001
"""Of the traffic drawn here; training must not draw from these."""
SPEEDS = (1.0, 1.25)
"""True step time over the model's: an engine as calibrated, and one that is a quarter slower."""
REAL_LOAD = 0.9
MOST_CONTEXT_TOKENS = 65_536


@dataclass(frozen=True)
class Family:
    """One kind of synthetic traffic."""

    name: str
    preset: str
    load: float
    day_amplitude: float = 0.0
    """Above 0 a whole day's rise and fall is squeezed into the trace."""


FAMILIES = (
    Family("steady 60 %", "steady", 0.6),
    Family("steady 90 %", "steady", 0.9),
    Family("bursty 85 %", "bursty", 0.85),
    Family("day 80 %", "steady", 0.8, day_amplitude=0.55),
    Family("mix shift 90 %", "mixshift", 0.9),
    Family("overload 130 %", "steady", 1.3),
)
REAL = {
    "real: Azure": {
        "T0": "azure-2023/AzureLLMInferenceTrace_conv.csv.gz",
        "T1": "kv-cache-tester",
        "T2": "azure-2023/AzureLLMInferenceTrace_code.csv.gz",
        "T3": "servegen/data/language/m-large",
    },
    "real: Mooncake": {
        "T0": "azure-2023/AzureLLMInferenceTrace_conv.csv.gz",
        "T1": "mooncake-fast25/conversation_trace.jsonl.gz",
        "T2": "vidur/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz",
        "T3": "servegen/data/language/m-large",
    },
}
"""Mixes of public traces: file by tier."""


def draw(family: Family, spec: EngineSpec, *, hours: float, seed: int) -> Trace:
    """One trace of a family."""
    if not family.day_amplitude:
        return generate(hours=hours, seed=seed, preset=family.preset, load=family.load, spec=spec)
    peak = family.load * (1 + family.day_amplitude)
    full = generate(hours=hours, seed=seed, preset=family.preset, load=peak, spec=spec)
    # Whole sessions are left out, so that what remains is a session's own traffic.
    session = session_rows(full)
    phase = 2 * np.pi * full.arrival_s[session] / full.duration_s
    rate = (1 - family.day_amplitude * np.cos(phase)) / (1 + family.day_amplitude)
    mark = np.random.default_rng([seed, 0xDA]).random(len(full))[session]
    return full.take(np.flatnonzero(mark < rate))


def mix(
    folder: Path, files: Mapping[str, str], spec: EngineSpec, *, duration_s: float, seed: int
) -> Trace:
    """One mix of public traces."""
    rng = np.random.default_rng(seed)
    parts = read_parts(
        [f"{tier}={folder / name}" for tier, name in files.items()],
        PartChoices(),
        rng=rng,
        options=ReadOptions(max_context_tokens=MOST_CONTEXT_TOKENS),
        duration_s=duration_s,
    )
    return compose(parts, load=REAL_LOAD, spec=spec, rng=rng, duration_s=duration_s)


def traffic(
    spec: EngineSpec, data: Path | None, *, each: int, hours: float
) -> tuple[dict[str, Trace], dict[str, str]]:
    """The traces by name, and the family of each."""
    traces: dict[str, Trace] = {}
    families: dict[str, str] = {}
    for place, family in enumerate(FAMILIES):
        for number in range(each):
            name = f"{family.name}, {number + 1}"
            seed = FIRST_SEED + 1000 * place + number
            traces[name] = draw(family, spec, hours=hours, seed=seed)
            families[name] = family.name
    for mixed, files in REAL.items():
        if data is None or not all((data / path).exists() for path in files.values()):
            why = "--data was not given" if data is None else f"{data} lacks its files"
            print(f"left out: {mixed}, because {why}")
            continue
        for number in range(each):
            name = f"{mixed}, {number + 1}"
            seed = FIRST_SEED + number
            traces[name] = mix(data, files, spec, duration_s=3600 * hours, seed=seed)
            families[name] = mixed
    return traces, families


def contenders(args: argparse.Namespace) -> list[Contender]:
    """Who plays; a contender that is not there is left out with the reason."""
    plan = load_plan(args.plan)
    found = [Contender(label=STATIC, policy="static", plan=plan)]
    if args.tuned is not None:
        found.append(Contender(label=TUNED, policy="static", plan=load_plan(args.tuned)))
    else:
        print(f"left out: {TUNED}, because --tuned was not given")
    policy = "learned" if args.bundle is None else f"bundle:{args.bundle}"
    try:
        make_policy(policy).reset(plan, 0)
        found.append(Contender(label=LEARNED, policy=policy, plan=plan))
    except TrimtabError as error:
        print(f"left out: {LEARNED}, because {error}")
    return [*found, *(Contender(label=name, policy=name, plan=plan) for name in OTHERS)]


def pairs(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Which differences the tables show: what was learned or tuned against all else."""
    wanted = [(LEARNED, STATIC), (LEARNED, TUNED), (LEARNED, "reactive"), (TUNED, STATIC)]
    wanted += [("reactive", STATIC), (STATIC, "stock-priority")]
    return [pair for pair in wanted if set(pair) <= set(evaluation.labels)]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was found."""

    evaluation: Evaluation
    families: Mapping[str, str]
    """Family of each trace."""
    digests: Mapping[str, str]
    """Digest of each trace."""
    contenders: Sequence[Contender]

    @property
    def family_names(self) -> list[str]:
        """The families, in order."""
        return list(dict.fromkeys(self.families.values()))

    def of(self, family: str) -> Evaluation:
        """The runs of one family."""
        return self.evaluation.select(traces=[t for t, f in self.families.items() if f == family])

    def difference(self, label: str, against: str, speed: float | None = None) -> Comparison:
        """Over all families, at all speeds or one."""
        chosen = self.evaluation.select(speeds=None if speed is None else [speed])
        return chosen.difference(label, against, families=self.families)

    def content(self) -> dict[str, Any]:
        """All figures, as fractions."""
        every = self.evaluation
        return {
            "speeds": list(every.speeds),
            "traces": [
                {"name": name, "family": family, "digest": self.digests[name]}
                for name, family in self.families.items()
            ],
            "contenders": [
                {
                    "label": contender.label,
                    "policy": contender.policy,
                    "plan": contender.plan.name,
                    "plan_digest": contender.plan.digest,
                }
                for contender in self.contenders
            ],
            "levels": {
                label: {
                    "weighted_attainment": every.mean(label),
                    "families": {name: self.of(name).mean(label) for name in self.family_names},
                    "tiers": every.tier_attainment(label),
                    "fallback_fraction": every.fallback_fraction(label),
                }
                for label in every.labels
            },
            "differences": [
                {
                    **dataclasses.asdict(self.difference(label, against)),
                    "worst_trace": self.difference(label, against).worst_trace,
                    "families": {
                        name: dataclasses.asdict(self.of(name).difference(label, against))
                        for name in self.family_names
                    },
                    "speeds": {
                        str(speed): dataclasses.asdict(self.difference(label, against, speed))
                        for speed in every.speeds
                    },
                }
                for label, against in pairs(every)
            ],
        }


def levels_table(result: Result) -> str:
    """Weighted attainment in % by contender and family, and each tier's attainment."""
    every = result.evaluation
    head = ["contender", "mean", *result.family_names, *every.tiers, "fallen back"]
    rows = []
    for label in every.labels:
        families = [result.of(name).mean(label) for name in result.family_names]
        figures = [every.mean(label), *families, *every.tier_attainment(label).values()]
        back = every.fallback_fraction(label)
        rows.append(
            [label, *(f"{100 * x:.2f}" for x in figures), "" if np.isnan(back) else f"{back:.1%}"]
        )
    return table(head, rows)


def differences_table(result: Result) -> str:
    """Differences of weighted attainment in points, with 95 % intervals, by family and speed."""
    found = {pair: result.difference(*pair) for pair in pairs(result.evaluation)}
    head = ["points", *(f"{label} - {against}" for label, against in found)]
    rows = [["**all**", *(points(c) for c in found.values())]]
    for name in result.family_names:
        rows.append([name, *(points(result.of(name).difference(*pair)) for pair in found)])
    for speed in result.evaluation.speeds:
        row = [points(result.difference(*pair, speed)) for pair in found]
        rows.append([f"step time x {speed:g}", *row])
    for tier in result.evaluation.tiers:
        rows.append([f"attainment of {tier}", *(interval(c.tiers[tier]) for c in found.values())])
    rows.append(["P(improvement)", *(f"{c.attainment.improvement:.2f}" for c in found.values())])
    rows.append(
        ["worst trace", *(f"{100 * c.worst:+.2f}, {c.worst_trace}" for c in found.values())]
    )
    return table(head, rows)


def points(comparison: Comparison) -> str:
    """The difference of weighted attainment and its interval."""
    return interval(comparison.attainment)


def interval(gain: Any) -> str:
    """A gain in points and its interval."""
    low, high = gain.ci95
    return f"{100 * gain.mean:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def main() -> None:
    """Run the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, help="folder of the policy; default the shipped one")
    parser.add_argument("--tuned", help="plan that trimtab tune made of the training traces")
    parser.add_argument("--plan", default="default")
    parser.add_argument("--engine", default="h100:llama-3.1-8b-tp1")
    parser.add_argument("--data", type=Path, help="folder of public traces")
    parser.add_argument("--traces", type=int, default=4, help="of each family")
    parser.add_argument("--hours", type=float, default=0.25, help="length of each trace")
    parser.add_argument("--speeds", type=float, nargs="+", default=SPEEDS)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--quick", action="store_true", help="one short trace of each family")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    each, hours = (1, 0.05) if args.quick else (args.traces, args.hours)
    started_s = time.monotonic()
    spec = get_engine_spec(args.engine)
    traces, families = traffic(spec, args.data, each=each, hours=hours)
    players = contenders(args)
    evaluation = evaluate(
        players, traces, spec=spec, speeds=tuple(args.speeds), processes=args.jobs
    )
    digests = {name: trace.digest() for name, trace in traces.items()}
    result = Result(evaluation=evaluation, families=families, digests=digests, contenders=players)
    text = levels_table(result) + "\n" + differences_table(result)
    print(f"\n{text}\n{time.monotonic() - started_s:.0f} s")
    if args.markdown:
        args.markdown.write_text(text)
    if args.json:
        args.json.write_text(json.dumps(jsonable(result.content()), indent=1))


if __name__ == "__main__":
    try:
        main()
    except TrimtabError as error:
        sys.exit(f"learned.py: {error}")
