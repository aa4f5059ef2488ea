"""Incident B: a batch wave fills the KV cache, and the requests in it throw each other out.

Stock vLLM admits whatever prompt fits. As the answers grow, running requests are preempted, come
back, recompute and are preempted again; meanwhile the paying conversations between two turns hold
no block, so what they had cached goes first, and their next turn reads everything anew.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.training.incidents.incident import (
    AFTER,
    BEFORE,
    PRIORITY,
    SHIPPED,
    Bound,
    Figure,
    Incident,
    IncidentRun,
    Runs,
)
from trimtab.training.incidents.script import Call, Conversation, Names, trace_of
from trimtab.training.incidents.served import BoolArray, Serve, quantile

BLOCKS = 12_000
ENGINE = "h100:llama-3.1-70b-tp4"
CONVERSATIONS, TURNS, LAST_PROMPT = 5, 12, 18_000
CALM_TURNS, STORM_TURNS = range(4, 9), range(9, 12)
"""Turns from 0: the fifth to ninth, and the tenth to twelfth."""
THINK_S, ANSWER = 6.0, 150
BATCH_PROMPT, BATCH_OUTPUT = (1000, 3000), (1500, 2500)
CALM_CALLS, WAVE_CALLS, WAVE_S, WAVE_LASTS_S = 8, 75, 75.0, 30.0
CHAT_TIER, BATCH_TIER = "T0", "T2"
MOST_BATCH = 32
"""Batch requests that run at once after: an eighth of the engine's places, so that decoding them
leaves room in each step for the prompts of others."""


def traffic(seed: int) -> list[Call]:
    """Conversations of twelve turns, and a batch wave when they reach the tenth."""
    rng, names = np.random.default_rng(seed), Names()
    calls: list[Call] = []
    for number in range(CONVERSATIONS):
        talk = Conversation(
            number=number,
            tier=CHAT_TIER,
            tenant=f"customer-{number}",
            names=names,
            start_s=float(rng.uniform(0.0, THINK_S)),
        )
        for turn in range(TURNS):
            think_s = THINK_S * float(rng.uniform(0.7, 1.3))
            talk.turn(LAST_PROMPT * (turn + 1) // TURNS, ANSWER, think_s)
        calls += talk.calls
    times = [*rng.uniform(0.0, WAVE_S, CALM_CALLS)]
    times += [*(WAVE_S + rng.uniform(0.0, WAVE_LASTS_S, WAVE_CALLS))]
    return calls + [
        Call(
            arrival_s=float(at_s),
            tier=BATCH_TIER,
            tenant="batch",
            prompt_tokens=int(rng.integers(*BATCH_PROMPT)),
            output_tokens=int(rng.integers(*BATCH_OUTPUT)),
        )
        for at_s in times
    ]


def _run(serve: Serve, seed: int, rules: RuleSet, plan: Plan) -> IncidentRun:
    trace = trace_of(traffic(seed))
    spec = get_engine_spec(ENGINE).with_limits(num_gpu_blocks=BLOCKS)
    served = serve(trace, plan, spec, rules)
    return IncidentRun(rules=rules, trace=trace, plan=plan, spec=spec, served=served)


def stage(serve: Serve, seed: int) -> Runs:
    """The same traffic as vLLM serves it by itself, and with a limit on batch under our rules."""
    limited = with_values(load_plan(), {f"tiers.{BATCH_TIER}.max_running": MOST_BATCH})
    return {
        BEFORE: _run(serve, seed, "fcfs", load_plan()),
        AFTER: _run(serve, seed, "fair", limited),
    }


def beside(serve: Serve, seed: int) -> Runs:
    """And as vLLM serves it by priority, and under the shipped plan as it is."""
    return {
        PRIORITY: _run(serve, seed, "priority", load_plan()),
        SHIPPED: _run(serve, seed, "fair", load_plan()),
    }


def _turns(run: IncidentRun, turns: range) -> BoolArray:
    mine = run.trace.tier == run.trace.tier_names.index(CHAT_TIER)
    return np.asarray(mine & np.isin(run.trace.turn, list(turns)))


def _batch(run: IncidentRun) -> BoolArray:
    return np.asarray(run.trace.tier == run.trace.tier_names.index(BATCH_TIER))


def _p99_s(run: IncidentRun, turns: range) -> float:
    return quantile(run.served.ttft_s[_turns(run, turns)], 0.99)


def _reused(run: IncidentRun) -> float:
    """Of what the last turn left in the cache, the part that this one found there."""
    rows = _turns(run, STORM_TURNS)
    grown = LAST_PROMPT // TURNS
    left = run.trace.prompt_tokens[rows] - grown + ANSWER
    return float(run.served.requests["cached_tokens"][rows].sum() / left.sum())


def _evicted_again(run: IncidentRun) -> float:
    """Batch requests that were evicted, recomputed and evicted again."""
    return float(np.sum(run.served.requests["preemptions"][_batch(run)] >= 2))


def _recomputed(run: IncidentRun) -> float:
    """Batch tokens computed again, over those that were served."""
    q, rows = run.served.requests, _batch(run)
    served = (q["prompt_tokens"] + q["generated_tokens"])[rows].sum()
    return float(q["recomputed_tokens"][rows].sum() / served)


def _finished(run: IncidentRun) -> float:
    return float(run.served.finished[_batch(run)].mean())


INCIDENT = Incident(
    key="B",
    title="A batch wave starts an avalanche in the KV cache",
    symptom="Tenth to twelfth turn of an 18K conversation: P99 from 0.7 to 4 s for 30 s, while "
    "batch requests are evicted, recomputed and evicted again.",
    stage=stage,
    beside=beside,
    figures=(
        Figure(
            name="calm_ttft_p99_s",
            words="Conversations' P99 TTFT, turns 5 to 9",
            unit="s",
            before=lambda runs: _p99_s(runs[BEFORE], CALM_TURNS),
            after=lambda runs: _p99_s(runs[AFTER], CALM_TURNS),
            reproduced=Bound(high=1.4),
            why="At most twice the published 0.7 s.",
        ),
        Figure(
            name="storm_ttft_p99_s",
            words="Conversations' P99 TTFT, turns 10 to 12",
            unit="s",
            before=lambda runs: _p99_s(runs[BEFORE], STORM_TURNS),
            after=lambda runs: _p99_s(runs[AFTER], STORM_TURNS),
            reproduced=Bound(low=2.0),
            cured=Bound(high=0.8),
            why="At least half the published 4 s; cured is what paid chat is promised, 0.8 s.",
        ),
        Figure(
            name="batch_evicted_again",
            words="Batch requests evicted, recomputed and evicted again",
            unit="count",
            before=lambda runs: _evicted_again(runs[BEFORE]),
            after=lambda runs: _evicted_again(runs[AFTER]),
            reproduced=Bound(low=3.0),
            cured=Bound(high=0.0),
            why="An eviction that is followed by another of the same request is the oscillation.",
        ),
        Figure(
            name="prefix_reused",
            words="Conversations' cached prefix that survives, turns 10 to 12",
            unit="share",
            before=lambda runs: _reused(runs[BEFORE]),
            after=lambda runs: _reused(runs[AFTER]),
            reproduced=Bound(high=0.75),
            cured=Bound(low=0.9),
            why="Nine tenths of what the turn before has left.",
        ),
        Figure(
            name="batch_recomputed",
            words="Batch tokens computed again, over those served",
            unit="share",
            before=lambda runs: _recomputed(runs[BEFORE]),
            after=lambda runs: _recomputed(runs[AFTER]),
            reproduced=Bound(low=0.02),
            cured=Bound(high=0.02),
            why="Cured is less than what is the least for the incident to be there.",
        ),
        Figure(
            name="batch_finished",
            words="Batch requests finished",
            unit="share",
            before=lambda runs: _finished(runs[BEFORE]),
            after=lambda runs: _finished(runs[AFTER]),
            cured=Bound(low=0.9),
            why="The share of batch that the plan promises within 240 s.",
        ),
    ),
    traffic=(
        f"Chat (T0): {CONVERSATIONS} conversations of {TURNS} turns up to {LAST_PROMPT:,} tokens, "
        f"{THINK_S:g} s of thought between them. Batch (T2): {CALM_CALLS} requests of "
        f"{BATCH_PROMPT[0]:,} to {BATCH_PROMPT[1]:,} tokens with answers of {BATCH_OUTPUT[0]:,} to "
        f"{BATCH_OUTPUT[1]:,}; after {WAVE_S:g} s, when the conversations reach their tenth turn, "
        f"{WAVE_CALLS} more within {WAVE_LASTS_S:g} s. "
        f"{BLOCKS:,} KV blocks."
    ),
    remedy="Pools keep part of the KV cache for chat (rules 5 and 6), cached blocks go by scaled "
    f"age, those of batch first (rule 7), and `tiers.{BATCH_TIER}.max_running: {MOST_BATCH}` "
    "leaves room in each step.",
)
