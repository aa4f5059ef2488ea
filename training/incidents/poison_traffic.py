"""Incident D's traffic, and what is measured of a run of it. What is run, `poison_prompt` says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from trimtab.training.incidents.incident import IncidentRun, Runs
from trimtab.training.incidents.script import Call, poisson_s
from trimtab.training.incidents.served import BoolArray, FloatArray, quantile

ENGINE = "h100:llama-3.1-70b-tp4"
LAST_S = 180.0
CHAT, AGENTS, BATCH = "T0", "T1", "T2"
FLOWS = {
    CHAT: (2.0, (200, 2000), (60, 250)),
    AGENTS: (0.5, (1000, 6000), (60, 200)),
    BATCH: (1.2, (2000, 8000), (200, 600)),
}
"""Requests a second, lengths of prompts, lengths of answers by tier."""
POISON_TENANT = "poison"
POISON_PROMPT, POISON_OUTPUT = 200_000, 150
POISON_TIMES_S = (30.0, 120.0)
STOCK_WITHOUT: Final = "before, without the poison"
WITHOUT: Final = "after, without the poison"
MOST_MOVED: Final = 1.1
"""How far a P99 of others may move, as a factor."""


def traffic(seed: int, poison_tier: str | None, *, batch: bool = True) -> list[Call]:
    """Chat, agents and batch at random times, and the poison under a key of that tier, or none."""
    rng = np.random.default_rng(seed)
    calls = [
        Call(
            arrival_s=at_s,
            tier=tier,
            tenant=f"others-{tier}",
            prompt_tokens=int(rng.integers(*prompt)),
            output_tokens=int(rng.integers(*output)),
        )
        for tier, (rate, prompt, output) in FLOWS.items()
        for at_s in poisson_s(rng, rate, 0.0, LAST_S)
        if batch or tier != BATCH
    ]
    if poison_tier is not None:
        calls += [
            Call(
                arrival_s=at_s,
                tier=poison_tier,
                tenant=POISON_TENANT,
                prompt_tokens=POISON_PROMPT,
                output_tokens=POISON_OUTPUT,
            )
            for at_s in POISON_TIMES_S
        ]
    return calls


def rows_of(run: IncidentRun, tier: str) -> BoolArray:
    """The others' requests of a tier."""
    mine = run.trace.tier == run.trace.tier_names.index(tier)
    return np.asarray(mine & ~poison_rows(run))


def poison_rows(run: IncidentRun) -> BoolArray:
    """The poison."""
    return np.asarray(run.trace.prompt_tokens == POISON_PROMPT)


def ttft_s(run: IncidentRun) -> FloatArray:
    """Time to first token of each request, seconds."""
    return run.served.ttft_s


def tpot_s(run: IncidentRun) -> FloatArray:
    """Time per token after the first, seconds."""
    return run.served.tpot_s


def e2e_s(run: IncidentRun) -> FloatArray:
    """Time to last token, seconds."""
    return run.served.e2e_s


Latency = Callable[[IncidentRun], FloatArray]


def p99(run: IncidentRun, tier: str, latency: Latency) -> float:
    """P99 of the others of a tier, seconds."""
    return quantile(latency(run)[rows_of(run, tier)], 0.99)


def moved(runs: Runs, label: str, without: str, tier: str, latency: Latency) -> float:
    """A tier's P99 over that of the same traffic without the poison."""
    if label not in runs or without not in runs:
        return math.nan
    return p99(runs[label], tier, latency) / p99(runs[without], tier, latency)


def held_s(run: IncidentRun) -> float:
    """Longest time in which somebody waited and nobody but the poison got a first token."""
    q = run.served.requests
    others = ~poison_rows(run)
    first_s = np.sort(q["first_token_s"][others & np.isfinite(q["first_token_s"])])
    arrival_s = np.sort(q["arrival_s"][others])
    # A pause counts from the first arrival in it on.
    following = np.searchsorted(arrival_s, first_s[:-1])
    known = following < len(arrival_s)
    waited_from_s = np.maximum(first_s[:-1][known], arrival_s[following[known]])
    return float(np.max(first_s[1:][known] - waited_from_s))


def unserved(run: IncidentRun) -> float:
    """Requests of others that were promised a first token and got no answer."""
    rows = rows_of(run, CHAT) | rows_of(run, AGENTS)
    return float(np.sum(~run.served.finished[rows]))


def slowest_poison_s(run: IncidentRun) -> float:
    """Time to the last token; endless if one has none."""
    return float(np.nan_to_num(run.served.e2e_s[poison_rows(run)], nan=np.inf).max())


LATENCIES: tuple[tuple[str, str, Latency], ...] = (
    ("ttft", "TTFT", ttft_s),
    ("tpot", "TPOT", tpot_s),
    ("e2e", "E2E", e2e_s),
)
NAMES = {CHAT: ("chat", "Chat's"), AGENTS: ("agents", "Agents'")}
