"""Incident C: a draft model made for chat drafts for everybody.

Stock vLLM has one draft length for all requests. What the draft model guesses for batch is mostly
wrong, but is verified all the same: each wrong token is one more token of the step.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.training.incidents.incident import (
    AFTER,
    BEFORE,
    PRIORITY,
    Bound,
    Figure,
    Incident,
    IncidentRun,
    Runs,
)
from trimtab.training.incidents.script import Call, poisson_s, trace_of
from trimtab.training.incidents.served import Serve

ENGINE = "h100:llama-3.1-70b-tp4"
MOST_RUNNING = 128
DRAFT = DraftSpec(label="chat", tokens=6, us_per_token=10.0, pass_ms=2.0)
"""A model of eight billion parameters beside one of seventy: each pass reads its weights."""
CHAT_ACCEPTANCE, BATCH_ACCEPTANCE = 0.93, 0.64
"""Of a first draft token, and of each later one if the one before it was right. For chat that is
0.78 of all that is drafted, six at a time."""
CHAT, BATCH = "T0", "T2"
CHAT_RATE, LAST_S = 4.0, 30.0
CHAT_PROMPT, CHAT_OUTPUT = (200, 1200), (150, 350)
BATCH_CALLS, BATCH_PROMPT, BATCH_OUTPUT = 300, (200, 800), (200, 600)
ALONE: Final = "before, chat alone"
STOCK_WITHOUT: Final = "before, without drafts"
WITHOUT: Final = "after, without drafts"


def traffic(seed: int, *, batch: bool = True) -> list[Call]:
    """Chat at random times, and a heap of batch at the start."""
    rng = np.random.default_rng(seed)
    calls = [
        Call(
            arrival_s=at_s,
            tier=CHAT,
            tenant="chat",
            prompt_tokens=int(rng.integers(*CHAT_PROMPT)),
            output_tokens=int(rng.integers(*CHAT_OUTPUT)),
            acceptance=CHAT_ACCEPTANCE,
        )
        for at_s in poisson_s(rng, CHAT_RATE, 0.0, LAST_S)
    ]
    if batch:
        calls += [
            Call(
                arrival_s=float(at_s),
                tier=BATCH,
                tenant="batch",
                prompt_tokens=int(rng.integers(*BATCH_PROMPT)),
                output_tokens=int(rng.integers(*BATCH_OUTPUT)),
                acceptance=BATCH_ACCEPTANCE,
            )
            for at_s in rng.uniform(0.0, 1.0, BATCH_CALLS)
        ]
    return calls


def _run(
    serve: Serve, seed: int, rules: RuleSet, *, drafts: bool = True, batch: bool = True
) -> IncidentRun:
    trace = trace_of(traffic(seed, batch=batch))
    spec: EngineSpec = get_engine_spec(ENGINE).with_limits(max_num_seqs=MOST_RUNNING)
    plan = load_plan()
    if drafts:
        spec = replace(spec, draft=DRAFT)
        plan = with_values(plan, {f"tiers.{t}.draft_tokens": DRAFT.tokens for t in (CHAT, BATCH)})
    served = serve(trace, plan, spec, rules)
    return IncidentRun(rules=rules, trace=trace, plan=plan, spec=spec, served=served)


def stage(serve: Serve, seed: int) -> Runs:
    """Stock and ours, with drafts and without; and chat before batch came."""
    return {
        ALONE: _run(serve, seed, "fcfs", batch=False),
        BEFORE: _run(serve, seed, "fcfs"),
        STOCK_WITHOUT: _run(serve, seed, "fcfs", drafts=False),
        AFTER: _run(serve, seed, "fair"),
        WITHOUT: _run(serve, seed, "fair", drafts=False),
    }


def beside(serve: Serve, seed: int) -> Runs:
    """And as vLLM serves it by priority."""
    return {PRIORITY: _run(serve, seed, "priority")}


def _accepted(run: IncidentRun, tier: str | None = None) -> float:
    """Share of the draft tokens that were right, of a tier or of the engine as a whole."""
    places = range(len(run.served.drafts)) if tier is None else [run.plan.tier_index(tier)]
    counts = [run.served.drafts[place] for place in places]
    drafts = sum(count.drafts for count in counts)
    return sum(count.accepted for count in counts) / drafts if drafts else math.nan


def _tokens_per_s(run: IncidentRun, tier: str | None = None) -> float:
    """Tokens generated over the time until the last of them."""
    q = run.served.requests
    mine = np.ones(len(run.trace), np.bool_)
    if tier is not None:
        mine = run.trace.tier == run.trace.tier_names.index(tier)
    return float(q["generated_tokens"][mine].sum() / np.nanmax(q["last_token_s"][mine]))


def _over(runs: Runs, label: str, without: str, tier: str | None = None) -> float:
    return _tokens_per_s(runs[label], tier) / _tokens_per_s(runs[without], tier)


INCIDENT = Incident(
    key="C",
    title="A draft model that does not fit the traffic",
    symptom="Acceptance falls from 0.78 to 0.41 over mixed traffic, and throughput by 18 %.",
    stage=stage,
    beside=beside,
    figures=(
        Figure(
            name="chat_alone_acceptance",
            words="Draft tokens accepted while chat is alone",
            unit="share",
            before=lambda runs: _accepted(runs[ALONE]),
            reproduced=Bound(low=0.74, high=0.82),
            why="The published 0.78.",
        ),
        Figure(
            name="acceptance",
            words="Draft tokens accepted, of the whole engine",
            unit="share",
            before=lambda runs: _accepted(runs[BEFORE]),
            after=lambda runs: _accepted(runs[AFTER]),
            reproduced=Bound(low=0.3, high=0.5),
            why="Near the published 0.41.",
        ),
        Figure(
            name="chat_acceptance",
            words="Chat's draft tokens accepted",
            unit="share",
            before=lambda runs: _accepted(runs[BEFORE], CHAT),
            after=lambda runs: _accepted(runs[AFTER], CHAT),
            cured=Bound(low=0.74),
            why="What was asked for.",
        ),
        Figure(
            name="throughput_over_without",
            words="Tokens/s over those without drafts",
            unit="times",
            before=lambda runs: _over(runs, BEFORE, STOCK_WITHOUT),
            after=lambda runs: _over(runs, AFTER, WITHOUT),
            reproduced=Bound(high=0.91),
            cured=Bound(low=1.0),
            why="At least half the published loss of 18 %.",
        ),
        Figure(
            name="chat_throughput_over_without",
            words="Chat's tokens/s over those without drafts",
            unit="times",
            before=lambda runs: _over(runs, BEFORE, STOCK_WITHOUT, CHAT),
            after=lambda runs: _over(runs, AFTER, WITHOUT, CHAT),
            cured=Bound(low=1.0),
            why="What was asked for: no tier loses by drafts, its own or others'.",
        ),
        Figure(
            name="batch_throughput_over_without",
            words="Batch's tokens/s over those without drafts",
            unit="times",
            before=lambda runs: _over(runs, BEFORE, STOCK_WITHOUT, BATCH),
            after=lambda runs: _over(runs, AFTER, WITHOUT, BATCH),
            cured=Bound(low=1.0),
            why="As above.",
        ),
    ),
    traffic=(
        f"Chat (T0): {CHAT_RATE:g} requests/s for {LAST_S:g} s, drafts accepted with "
        f"{CHAT_ACCEPTANCE:g} a place. Batch (T2): {BATCH_CALLS} requests in the first second, "
        f"{BATCH_ACCEPTANCE:g} a place. The draft model is the chat's and drafts "
        f"{DRAFT.tokens} tokens."
    ),
    remedy="Each tier verifies as many draft tokens as pay in the running batch, none where they "
    "are a loss (rule 9).",
)
