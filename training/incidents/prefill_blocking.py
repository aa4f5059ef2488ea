"""Incident A: a long batch prompt that is read in chunks makes everybody else wait for all of it.

vLLM serves what runs before what waits. A prompt that is being read takes the whole token budget of
every step until it is done, so an agent's short call that comes meanwhile gets no token of it.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
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
from trimtab.training.incidents.served import Serve, quantile

ENGINE = "h100:llama-3.1-70b-tp4"
STEP_TOKENS = 512
LAST_S = 240.0
AGENTS, AGENT_RATE = 6, 1.6
AGENT_PROMPT, AGENT_OUTPUT = (800, 2600), (60, 160)
BATCH_PROMPT, BATCH_OUTPUT = 32_768, 200
WAVE_CALLS, WAVE_EVERY_S, FIRST_WAVE_S, LAST_WAVE_S = 3, 60.0, 15.0, 210.0
AGENT_TIER, BATCH_TIER = "T1", "T2"


def traffic(seed: int) -> list[Call]:
    """Agents at random times, and every minute three long batch prompts at once."""
    rng = np.random.default_rng(seed)
    calls = [
        Call(
            arrival_s=at_s,
            tier=AGENT_TIER,
            tenant=f"agent-{rng.integers(AGENTS)}",
            prompt_tokens=int(rng.integers(*AGENT_PROMPT)),
            output_tokens=int(rng.integers(*AGENT_OUTPUT)),
        )
        for at_s in poisson_s(rng, AGENT_RATE, 0.0, LAST_S)
    ]
    for wave_s in np.arange(FIRST_WAVE_S, LAST_WAVE_S, WAVE_EVERY_S):
        calls += [
            Call(
                arrival_s=float(wave_s) + 0.01 * number,
                tier=BATCH_TIER,
                tenant="batch",
                prompt_tokens=BATCH_PROMPT,
                output_tokens=BATCH_OUTPUT,
            )
            for number in range(WAVE_CALLS)
        ]
    return calls


def _run(serve: Serve, seed: int, rules: RuleSet) -> IncidentRun:
    trace, plan = trace_of(traffic(seed)), load_plan()
    spec = get_engine_spec(ENGINE).with_limits(max_num_batched_tokens=STEP_TOKENS)
    served = serve(trace, plan, spec, rules)
    return IncidentRun(rules=rules, trace=trace, plan=plan, spec=spec, served=served)


def stage(serve: Serve, seed: int) -> Runs:
    """The same traffic as vLLM serves it by itself, and under the shipped plan."""
    return {BEFORE: _run(serve, seed, "fcfs"), AFTER: _run(serve, seed, "fair")}


def beside(serve: Serve, seed: int) -> Runs:
    """And as vLLM serves it by priority."""
    return {PRIORITY: _run(serve, seed, "priority")}


def _wait_s(run: IncidentRun, q: float) -> float:
    mine = run.trace.tier == run.trace.tier_names.index(AGENT_TIER)
    return quantile(run.served.ttft_s[mine], q)


def _ratio(run: IncidentRun) -> float:
    return _wait_s(run, 0.99) / _wait_s(run, 0.5)


def _slowest_batch_s(run: IncidentRun) -> float:
    """Of all batch calls the longest time to the last token; endless if one has none."""
    mine = run.trace.tier == run.trace.tier_names.index(BATCH_TIER)
    return float(np.nan_to_num(run.served.e2e_s[mine], nan=np.inf).max())


INCIDENT = Incident(
    key="A",
    title="Chunked prefill starves short requests",
    symptom="Agents' P50 of 200 ms and P99 of 8 s when a 32K batch prompt comes in 512-token "
    "chunks.",
    stage=stage,
    beside=beside,
    figures=(
        Figure(
            name="agents_ttft_p50_s",
            words="Agents' P50 TTFT",
            unit="s",
            before=lambda runs: _wait_s(runs[BEFORE], 0.5),
            after=lambda runs: _wait_s(runs[AFTER], 0.5),
            reproduced=Bound(low=0.1, high=0.4),
            cured=Bound(high=0.4),
            why="Half to twice the published 200 ms; a P99 that is near a slow P50 is no cure.",
        ),
        Figure(
            name="agents_ttft_p99_s",
            words="Agents' P99 TTFT",
            unit="s",
            before=lambda runs: _wait_s(runs[BEFORE], 0.99),
            after=lambda runs: _wait_s(runs[AFTER], 0.99),
            reproduced=Bound(low=4.0, high=16.0),
            why="Half to twice the published 8 s.",
        ),
        Figure(
            name="agents_p99_over_p50",
            words="Agents' P99 over P50",
            unit="times",
            before=lambda runs: _ratio(runs[BEFORE]),
            after=lambda runs: _ratio(runs[AFTER]),
            reproduced=Bound(low=20.0),
            cured=Bound(high=3.0),
            why="Half the published 40 times; three times is what was asked for.",
        ),
        Figure(
            name="batch_slowest_s",
            words="Slowest batch call, to its last token",
            unit="s",
            before=lambda runs: _slowest_batch_s(runs[BEFORE]),
            after=lambda runs: _slowest_batch_s(runs[AFTER]),
            cured=Bound(high=240.0),
            why="Batch is promised 240 s: who waits for agents must not starve.",
        ),
        Figure(
            name="engine_time_over_stock",
            words="Engine time for the same tokens, over stock's",
            unit="times",
            before=lambda runs: 1.0,
            after=lambda runs: runs[AFTER].served.busy_s / runs[BEFORE].served.busy_s,
            cured=Bound(high=1.1),
            why="Fairness may cost a tenth of the throughput at most.",
        ),
    ),
    traffic=(
        f"Agents (T1): {AGENT_RATE:g} calls/s from {AGENTS} tenants, prompts of "
        f"{AGENT_PROMPT[0]:,} to {AGENT_PROMPT[1]:,} tokens. Batch (T2): {WAVE_CALLS} prompts of "
        f"{BATCH_PROMPT:,} tokens every {WAVE_EVERY_S:g} s. {STEP_TOKENS} tokens a step."
    ),
    remedy="Running prefills and newcomers share each step in the order of virtual finishes "
    "(rules 1 and 4); agents weigh 20 times what batch does.",
)
