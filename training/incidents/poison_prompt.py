"""Incident D: one agent with a prompt of 200,000 tokens holds the engine, again and again.

Nothing of its prompt is found cached (it begins with something new each time), so all of it is
read. Attention over so long a context makes each step long, and under stock rules the prompt also
takes every step's tokens until it is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from trimtab.engine_bridge.admission.settings import AdmissionSettings, Limits
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.engine_bridge.trace import Trace
from trimtab.training.incidents import poison_slices
from trimtab.training.incidents.door import admit
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
from trimtab.training.incidents.poison_traffic import (
    AGENTS,
    BATCH,
    CHAT,
    ENGINE,
    FLOWS,
    LATENCIES,
    MOST_MOVED,
    NAMES,
    POISON_PROMPT,
    POISON_TIMES_S,
    STOCK_WITHOUT,
    WITHOUT,
    held_s,
    moved,
    slowest_poison_s,
    traffic,
    ttft_s,
    unserved,
)
from trimtab.training.incidents.script import trace_of
from trimtab.training.incidents.served import Serve

MAX_PREFILL_MS = 4000.0
"""The agents' TTFT target: a prompt that takes longer to read alone cannot be answered in time."""
SERVED: Final = "after, let in as batch"
IDLE_SERVED: Final = "after, let in as batch, no other batch"
IDLE_WITHOUT: Final = "after, without the poison, no batch"


def _served(serve: Serve, trace: Trace, rules: RuleSet) -> IncidentRun:
    plan, spec = load_plan(), get_engine_spec(ENGINE)
    served = serve(trace, plan, spec, rules)
    return IncidentRun(rules=rules, trace=trace, plan=plan, spec=spec, served=served)


def _stock(serve: Serve, seed: int, poison_tier: str | None, rules: RuleSet) -> IncidentRun:
    return _served(serve, trace_of(traffic(seed, poison_tier)), rules)


def _admitted(
    serve: Serve, seed: int, poison_tier: str | None, *, batch: bool = True
) -> IncidentRun:
    """Behind admission, under the shipped plan."""
    plan, spec = load_plan(), get_engine_spec(ENGINE)
    limits = AdmissionSettings(tiers={AGENTS: Limits(max_prefill_ms=MAX_PREFILL_MS)})
    asked = trace_of(traffic(seed, poison_tier, batch=batch))
    passed, refusals = admit(asked, limits, plan, spec)
    return replace(_served(serve, passed, "fair"), refusals=refusals)


def stage(serve: Serve, seed: int) -> Runs:
    """Stock and ours with and without the poison; ours also where its tier's rule lets it in.

    There it is read as it comes, or in slices.
    """
    return {
        BEFORE: _stock(serve, seed, AGENTS, "fcfs"),
        STOCK_WITHOUT: _stock(serve, seed, None, "fcfs"),
        AFTER: _admitted(serve, seed, AGENTS),
        WITHOUT: _admitted(serve, seed, None),
        SERVED: _admitted(serve, seed, BATCH),
        **poison_slices.stage(serve, seed),
    }


def beside(serve: Serve, seed: int) -> Runs:
    """As vLLM serves it by priority; and on an engine that has time to spare."""
    return {
        PRIORITY: _stock(serve, seed, AGENTS, "priority"),
        IDLE_SERVED: _admitted(serve, seed, BATCH, batch=False),
        IDLE_WITHOUT: _admitted(serve, seed, None, batch=False),
        **poison_slices.beside(serve, seed),
    }


def _refused(runs: Runs) -> float:
    """Poison prompts that were refused as too long, of all."""
    return sum(
        count for code, count in runs[AFTER].refusals.items() if code.startswith("413")
    ) / len(POISON_TIMES_S)


def _refused_figures() -> Iterator[Figure]:
    for tier, (name, whose) in NAMES.items():
        yield Figure(
            name=f"{name}_ttft_p99_over_without",
            words=f"{whose} P99 TTFT over that without the poison",
            unit="times",
            before=partial(moved, label=BEFORE, without=STOCK_WITHOUT, tier=tier, latency=ttft_s),
            after=partial(moved, label=AFTER, without=WITHOUT, tier=tier, latency=ttft_s),
            reproduced=Bound(low=3.0),
            cured=Bound(high=MOST_MOVED),
            why="Three times is plainly seen; a tenth is what was asked for.",
        )


def _served_figures() -> Iterator[Figure]:
    for tier, (name, whose) in NAMES.items():
        for short, word, latency in LATENCIES:
            yield Figure(
                name=f"served_{name}_{short}_p99_over_without",
                words=f"Let in as batch: {whose.lower()} P99 {word} over that without it",
                unit="times",
                after=partial(moved, label=SERVED, without=WITHOUT, tier=tier, latency=latency),
                cured=Bound(high=MOST_MOVED) if short != "e2e" else None,
                why="As above. The whole time is the sum of the two and has no bound of its own."
                if short == "e2e"
                else "As above, for the pace of answers too.",
            )


def _idle_figures() -> Iterator[Figure]:
    for short, word, latency in LATENCIES[:2]:
        yield Figure(
            name=f"idle_chat_{short}_p99_over_without",
            words=f"The same without other batch: chat's P99 {word} over that without it",
            unit="times",
            after=partial(
                moved, label=IDLE_SERVED, without=IDLE_WITHOUT, tier=CHAT, latency=latency
            ),
            why="No bound: where steps were short, the poison may fill them up to what chat is "
            "promised.",
        )


INCIDENT = Incident(
    key="D",
    title="A poison prompt holds the engine",
    symptom="A 200K-context agent holds the engine for seconds, regularly.",
    stage=stage,
    beside=beside,
    figures=(
        Figure(
            name="engine_held_s",
            words="Longest time in which others waited and none got a first token",
            unit="s",
            before=lambda runs: held_s(runs[BEFORE]),
            after=lambda runs: held_s(runs[AFTER]),
            reproduced=Bound(low=2.0),
            why="Seconds, as published.",
        ),
        *_refused_figures(),
        Figure(
            name="poison_refused",
            words="Poison prompts of agents refused with 413 before the engine",
            unit="share",
            after=_refused,
            cured=Bound(low=1.0),
            why="Reading it alone takes longer than agents may wait: their tier refuses it.",
        ),
        *_served_figures(),
        Figure(
            name="served_others_unserved",
            words="Let in as batch: chat's and agents' requests without an answer, more than "
            "without it",
            unit="count",
            after=lambda runs: unserved(runs[SERVED]) - unserved(runs[WITHOUT]),
            cured=Bound(high=0.0),
            why="A good P99 of those that were not turned away is no cure.",
        ),
        Figure(
            name="served_poison_slowest_s",
            words="Let in as batch: its own slowest answer",
            unit="s",
            after=lambda runs: slowest_poison_s(runs[SERVED]),
            cured=Bound(high=240.0),
            why="Batch is promised 240 s, and this is batch.",
        ),
        *_idle_figures(),
        *poison_slices.figures(),
    ),
    traffic="; ".join(
        f"{tier}: {rate:g} requests/s, prompts of {prompt[0]:,} to {prompt[1]:,} tokens"
        for tier, (rate, prompt, _) in FLOWS.items()
    )
    + f". An agent (T1) sends {POISON_PROMPT:,} tokens after "
    + " and ".join(f"{at_s:g}" for at_s in POISON_TIMES_S)
    + " s.",
    remedy=f"`max_prefill_ms: {MAX_PREFILL_MS:g}` for agents refuses it at the door; under a batch "
    "key it is read in chunks that keep the steps short (rules 4 and 13), and with `slice_tokens` "
    "in slices.",
    shown=(BEFORE, AFTER, SERVED),
)
