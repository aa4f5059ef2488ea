"""Incident D behind a gateway that reads the poison in slices, as its tier's plan says.

Runs and figures only; the traffic is `poison_traffic`'s, how a request becomes slices
`whatif.slicing`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.training.incidents.incident import SLICED_BEFORE, Bound, Figure, IncidentRun, Runs
from trimtab.training.incidents.poison_traffic import (
    AGENTS,
    BATCH,
    CHAT,
    ENGINE,
    LATENCIES,
    MOST_MOVED,
    NAMES,
    WITHOUT,
    moved,
    p99,
    slowest_poison_s,
    traffic,
    ttft_s,
    unserved,
)
from trimtab.training.incidents.script import trace_of
from trimtab.training.incidents.served import Serve
from trimtab.training.whatif.slicing import in_slices

SLICED: Final = "after, in slices as batch"
AMONG_AGENTS: Final = "after, in slices as an agent"
WHOLE_AMONG_AGENTS: Final = "after, whole as an agent"
BATCH_SLICE, AGENTS_SLICE = 8192, 2048
"""`slice_tokens` of the poison's tier. Agents wait for a slice of it, so theirs are short."""
AGENTS_TTFT_S = 4.0
"""What the shipped plan promises agents."""


def _run(
    serve: Serve, seed: int, tier: str, slice_tokens: int | None, rules: RuleSet
) -> IncidentRun:
    """The poison under a key of that tier, admitted whatever its length."""
    plan, spec = load_plan(), get_engine_spec(ENGINE)
    if slice_tokens is not None:
        plan = with_values(plan, {f"tiers.{tier}.slice_tokens": slice_tokens})
    trace = trace_of(traffic(seed, tier))
    sliced = in_slices(trace, plan, spec)
    served = serve(sliced.trace, plan, spec, rules)
    served = replace(served, requests=sliced.fold(served.requests))
    return IncidentRun(rules=rules, trace=trace, plan=plan, spec=spec, served=served)


def stage(serve: Serve, seed: int) -> Runs:
    """Under the shipped plan with slices for batch, and for agents."""
    return {
        SLICED: _run(serve, seed, BATCH, BATCH_SLICE, "fair"),
        **among_agents(serve, seed),
    }


def among_agents(serve: Serve, seed: int) -> Runs:
    """Under the shipped plan with slices for agents."""
    return {AMONG_AGENTS: _run(serve, seed, AGENTS, AGENTS_SLICE, "fair")}


def beside(serve: Serve, seed: int) -> Runs:
    """Whole among agents, and in slices before an engine with stock rules."""
    return {
        SLICED_BEFORE: _run(serve, seed, AGENTS, AGENTS_SLICE, "fcfs"),
        WHOLE_AMONG_AGENTS: _run(serve, seed, AGENTS, None, "fair"),
    }


def _more_unserved(runs: Runs, label: str) -> float:
    return math.nan if label not in runs else unserved(runs[label]) - unserved(runs[WITHOUT])


def figures() -> Iterator[Figure]:
    """In a tier of its own, then among agents."""
    for tier, (name, whose) in NAMES.items():
        for short, word, latency in LATENCIES[:2]:
            yield Figure(
                name=f"sliced_{name}_{short}_p99_over_without",
                words=f"In slices as batch: {whose.lower()} P99 {word} over that without it",
                unit="times",
                after=partial(moved, label=SLICED, without=WITHOUT, tier=tier, latency=latency),
                cured=Bound(high=MOST_MOVED),
                why="A tenth, as where it is let in whole.",
            )
    yield _unserved_figure("sliced", "In slices as batch", SLICED, bounded=True)
    yield Figure(
        name="sliced_poison_slowest_s",
        words="In slices as batch: its own slowest answer",
        unit="s",
        after=lambda runs: slowest_poison_s(runs[SLICED]),
        cured=Bound(high=240.0),
        why="Batch is promised 240 s, and this is batch.",
    )
    yield from _among_agents()


def _among_agents() -> Iterator[Figure]:
    where = "In slices as an agent"
    for short, word, latency in LATENCIES[:2]:
        yield Figure(
            name=f"agent_sliced_chat_{short}_p99_over_without",
            words=f"{where}: chat's P99 {word} over that without it",
            unit="times",
            after=partial(moved, label=AMONG_AGENTS, without=WITHOUT, tier=CHAT, latency=latency),
            cured=Bound(high=MOST_MOVED),
            why="A tenth, as above.",
        )
    yield Figure(
        name="agent_sliced_agents_ttft_p99_s",
        words=f"{where}: the other agents' P99 TTFT",
        unit="s",
        after=lambda runs: p99(runs[AMONG_AGENTS], AGENTS, ttft_s),
        cured=Bound(high=AGENTS_TTFT_S),
        why="What agents are promised; a tenth is out of reach for who shares a tier with it.",
    )
    yield Figure(
        name="agent_sliced_agents_ttft_p99_over_without",
        words=f"{where}: the other agents' P99 TTFT over that without it",
        unit="times",
        after=partial(moved, label=AMONG_AGENTS, without=WITHOUT, tier=AGENTS, latency=ttft_s),
        why="No bound: they wait for a slice of it each time.",
    )
    yield _unserved_figure("agent_sliced", where, AMONG_AGENTS, bounded=True)
    yield _unserved_figure("agent_whole", "Whole as an agent", WHOLE_AMONG_AGENTS, bounded=False)


def _unserved_figure(name: str, where: str, label: str, *, bounded: bool) -> Figure:
    return Figure(
        name=f"{name}_others_unserved",
        words=f"{where}: chat's and agents' requests without an answer, more than without it",
        unit="count",
        after=lambda runs: _more_unserved(runs, label),
        cured=Bound(high=0.0) if bounded else None,
        why="As where it is let in whole." if bounded else "No bound: what slices are for.",
    )
