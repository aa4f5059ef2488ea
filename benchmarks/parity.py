"""Does the replay decide as vLLM does? The same random traffic through both, step by step.

    python benchmarks/parity.py [--workloads 200] [--steps 500] [--seed 0] [--json F]
        [--rules fcfs,priority,fair] [--caching on,off] [--aging] [--chunks] [--drafts] [--media]
        [--processes 2]

vLLM's real scheduler and KV cache manager run in virtual time, without a model
(`trimtab.engine_bridge.vllm.virtual_time`). Compared are each step's map of requests to scheduled
tokens, and its end time bit for bit. Nothing is put right after a difference: what follows from it
counts as different too. The random workloads mix tiers, tenants, sessions, shared prefixes, bursts
of equal prompts, cancellations and equal arrival times, on engines whose token budget and KV cache
are small enough for chunking and preemption. Under the fair rules most of them run on a random plan
(switches, pools, shedding, back-off, eviction order), and the allocation changes every so often.
With `--aging` every such plan ages too, with `--chunks` rule 14 orders running prefills as well.
With --drafts the engines have draft models of random lengths, costs and acceptance.
With --media prompts hold images, audio and video, and most engines have random encoders.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from parity_media import MOST_ITEMS, Gallery, Item, columns, encoding, end_of
from parity_plans import TIERS, aged, chunked, random_allocation, random_plan

from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.plan.load import with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.trace import NO_SESSION, Trace
from trimtab.engine_bridge.vllm.virtual_time import VirtualClock, VirtualVllm

TENANTS = ("a", "b", "c", "d", "e", "f", "g")
SHOWN = 10
CHANGE_STEPS = 40
NO_INTERVAL_S = 3600.0
"""The replay is stepped without telemetry intervals, at whose ends both sides settle accounts."""
LONGEST_PROMPTS, LONGEST_OUTPUT = (200, 1000, 4000), 300


@dataclass
class Draft:
    """Requests of a workload under construction, one dictionary a row."""

    rng: np.random.Generator
    id_tokens: int
    block_size: int
    longest_prompt: int
    tenants: int
    gallery: Gallery | None = None
    ids: int = 0
    rows: list[dict] = field(default_factory=list)

    def new_ids(self, count: int) -> list[int]:
        """Prefix ids that nobody has yet."""
        self.ids += count
        return list(range(self.ids - count, self.ids))

    def media(self, first: int, last: int) -> list[Item]:
        """Items of the text between two places of a prompt; see `Gallery.place`."""
        return [] if self.gallery is None else self.gallery.place(first, last)

    def length(self, most: int) -> int:
        """Mostly short, sometimes long: log-uniform from 1 to `most`."""
        return int(np.exp(self.rng.uniform(0.0, np.log(most + 1))))


def engine(rng: np.random.Generator, *, caching: bool) -> EngineSpec:
    """A small engine; some of the longest prompts do not fit it and are refused at the door."""
    seqs = int(rng.integers(4, 65))
    return get_engine_spec("h100:llama-3.1-8b-tp1").with_limits(
        block_size=int(rng.choice([16, 16, 16, 32])),
        num_gpu_blocks=int(np.exp(rng.uniform(np.log(120), np.log(900)))),
        max_num_seqs=seqs,
        max_num_batched_tokens=int(rng.integers(max(64, seqs), 1500)),
        enable_prefix_caching=caching,
    )


def drafting(rng: np.random.Generator, spec: EngineSpec) -> EngineSpec:
    """The same engine with a random draft model."""
    tokens = int(rng.integers(1, 6))
    return replace(
        spec.with_limits(
            max_num_batched_tokens=max(
                spec.max_num_batched_tokens, spec.max_num_seqs * (1 + tokens)
            )
        ),
        draft=DraftSpec(
            tokens=tokens,
            us_per_token=float(rng.choice([0.0, 20.0])),
            pass_ms=float(rng.choice([0.0, 0.3])),
            acceptance=tuple((name, float(rng.uniform(0.1, 0.95))) for name in TIERS),
            kept=float(rng.choice([1.0, 0.8])),
        ),
    )


def workload(
    rng: np.random.Generator, spec: EngineSpec, requests: int, gallery: Gallery | None = None
) -> Trace:
    """Random traffic for that engine; with a gallery its prompts hold media."""
    id_tokens = spec.block_size * int(rng.choice([1, 1, 1, 4])) // int(rng.choice([1, 1, 1, 2]))
    tenants = int(rng.integers(1, len(TENANTS) + 1))
    longest = int(rng.choice(LONGEST_PROMPTS))
    draft = Draft(rng, id_tokens, spec.block_size, longest, tenants, gallery)
    ids = [draft.new_ids(int(rng.integers(1, 1200 // id_tokens))) for _ in range(5)]
    prefixes = [(some, draft.media(0, len(some) * id_tokens)) for some in ids]
    rate = np.exp(rng.uniform(np.log(4.0), np.log(80.0)))
    at_s = 0.0
    while len(draft.rows) < requests:
        if rng.random() > 0.1:
            at_s += float(rng.exponential(1.0 / rate))
        if rng.random() < 0.03:
            _burst(draft, at_s)
        else:
            _conversation(draft, at_s, prefixes)
    return _trace(draft)


def _burst(draft: Draft, at_s: float) -> None:
    """Several requests at once with the same new prefix, each with an end of its own."""
    rng = draft.rng
    ids = draft.new_ids(int(rng.integers(1, 20)))
    items = draft.media(0, len(ids) * draft.id_tokens)
    for _ in range(int(rng.integers(3, 12))):
        _request(
            draft,
            arrival_s=at_s,
            tier=int(rng.integers(0, len(TIERS))),
            prompt_tokens=max(len(ids) * draft.id_tokens, end_of(items)) + draft.length(100),
            output_tokens=int(rng.integers(1, 50)),
            ids=ids,
            items=items,
        )


def _request(draft: Draft, **values: object) -> None:
    """Append a request; what is not given is as for a single one."""
    rng = draft.rng
    row: dict = {"session": NO_SESSION, "turn": 0, "think_s": 0.0} | values
    row["tenant"] = int(rng.integers(0, draft.tenants))
    gone = rng.random() < 0.1
    row["cancel_after_s"] = float(rng.exponential(3.0)) + 1e-3 if gone else np.inf
    draft.rows.append(row)


def _conversation(draft: Draft, at_s: float, prefixes: list[tuple[list[int], list[Item]]]) -> None:
    """One request, or several turns that repeat each other's text."""
    rng = draft.rng
    number, tier = len(draft.rows), int(rng.integers(0, len(TIERS)))
    ids: list[int] = []
    items: list[Item] = []
    if rng.random() < 0.5:
        shared, shown = prefixes[int(rng.integers(0, len(prefixes)))]
        ids = shared[: int(rng.integers(1, len(shared) + 1))]
        # Of an item that the shared part ends in, the rest follows.
        items = [item for item in shown if item.start < len(ids) * draft.id_tokens]
    turns = int(rng.integers(2, 5)) if rng.random() < 0.3 else 1
    closed = rng.random() < 0.7
    prompt = max(len(ids) * draft.id_tokens, end_of(items))
    for turn in range(turns):
        before = prompt
        prompt += draft.length(draft.longest_prompt // (4 if turns > 1 or ids else 1))
        if rng.random() < 0.1 and ids:
            prompt = len(ids) * draft.id_tokens
        elif rng.random() < 0.1:
            # Just full blocks, or one token more.
            prompt += -prompt % draft.block_size + int(rng.integers(0, 2))
        items = (items + draft.media(before, prompt))[:MOST_ITEMS]
        prompt = max(prompt, end_of(items))
        output = 1 if rng.random() < 0.1 else int(rng.integers(1, LONGEST_OUTPUT + 1))
        if turns > 1:
            ids = ids + draft.new_ids(max(0, (prompt + output) // draft.id_tokens - len(ids)))
        _request(
            draft,
            arrival_s=at_s if closed else at_s + turn * float(rng.exponential(1.0)),
            tier=tier,
            prompt_tokens=max(1, prompt),
            output_tokens=output,
            session=number if closed and turns > 1 else NO_SESSION,
            turn=turn if closed else 0,
            think_s=float(rng.exponential(0.3)) if turn and closed else 0.0,
            ids=ids,
            items=items,
        )
        prompt += output


def _trace(draft: Draft) -> Trace:
    rows = sorted(draft.rows, key=lambda r: r["arrival_s"])
    plain = ("arrival_s", "tier", "tenant", "prompt_tokens", "output_tokens", "think_s")
    return Trace.build(
        **{name: np.array([r[name] for r in rows]) for name in plain},
        cancel_after_s=np.array([r["cancel_after_s"] for r in rows]),
        tier_names=TIERS,
        tenant_names=TENANTS,
        session=np.array([r["session"] for r in rows], np.int32),
        turn=np.array([r["turn"] for r in rows], np.int32),
        prefix_offsets=np.concatenate(([0], np.cumsum([len(r["ids"]) for r in rows]))),
        prefix_ids=np.array([i for r in rows for i in r["ids"]], np.int32),
        prefix_block_tokens=np.full(len(rows), draft.id_tokens, np.int32),
        media=columns([r["items"] for r in rows]),
    )


def real_engine(trace: Trace, plan: Plan, spec: EngineSpec, rules: str) -> VirtualVllm:
    """The real scheduler: under its own rules, or the fair one."""
    if rules != "fair":
        return VirtualVllm(trace, plan, spec, policy=rules)
    from trimtab.engine_bridge.vllm import FairScheduler
    from trimtab.engine_bridge.vllm.virtual_record import engine_of

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        # JSON is YAML.
        path.write_text(plan.model_dump_json())
        return VirtualVllm(
            trace,
            plan,
            spec,
            scheduler_class=FairScheduler,
            policy="priority",
            additional_config={
                "trimtab": {
                    "engine": engine_of(spec),
                    "plan": str(path),
                    "interval_s": NO_INTERVAL_S,
                }
            },
            prepare=lambda scheduler, now: scheduler.use_clock(VirtualClock(now)),
        )


def compare(
    job: tuple[int, int, str, bool],
    *,
    aging: bool = False,
    chunks: bool = False,
    drafts: bool = False,
    media: bool = False,
) -> dict:
    """One workload under one rule set: steps, identical ones, the first difference."""
    seed, steps, rules, caching = job
    rng = np.random.default_rng([seed, caching])
    spec = engine(rng, caching=caching)
    pictures = np.random.default_rng([seed, 9]) if media else None
    gallery = None if pictures is None else Gallery(pictures)
    trace = workload(rng, spec, 60 + steps // 3, gallery)
    plan = random_plan(rng) if rules == "fair" else load_plan(None)
    if aging:
        plan = aged(plan, seed)
    if chunks:
        plan = chunked(plan, seed)
    if drafts:
        spec = drafting(rng, spec)
        most = {f"tiers.{name}.draft_tokens": int(rng.integers(0, 6)) for name in TIERS}
        plan = with_values(plan, most)
    if pictures is not None:
        spec = encoding(pictures, spec)
    replay = ReplayEngine(trace, plan, spec, rules=rules, record_steps=True)
    vllm = real_engine(trace, plan, spec, rules)
    same, at, first, preempted = 0, 0, None, 0
    while at < steps:
        if rules == "fair" and at % CHANGE_STEPS == CHANGE_STEPS - 1:
            wish = random_allocation(rng, replay.allocation, plan)
            vllm.scheduler.apply(replay.apply(wish, ttl_s=np.inf))
        mine, real = replay.step(), vllm.step()
        if not mine and real is None:
            break
        theirs = {} if real is None else real.tokens
        if mine == theirs and replay.now_s == vllm.now_s:
            same += 1
        elif first is None:
            first = _explain(seed, rules, caching, at, mine, theirs, replay, vllm)
        at += 1
    preempted = int(replay.result().requests["preemptions"].sum())
    return {
        "steps": at,
        "same": same,
        "first": first,
        "preemptions": preempted,
        "encoded_items": vllm.encoded_items,
        "end_s": replay.now_s,
    }


def _explain(
    seed: int,
    rules: str,
    caching: bool,
    at: int,
    mine: dict[int, int],
    theirs: dict[int, int],
    replay: ReplayEngine,
    vllm: VirtualVllm,
) -> dict:
    rows = sorted(set(mine.items()) ^ set(theirs.items()))
    state = replay._state.engine[0]
    return {
        "seed": seed,
        "rules": rules,
        "caching": caching,
        "step": at,
        "requests": {
            row: {"replay": mine.get(row, 0), "vllm": theirs.get(row, 0)} for row, _ in rows[:8]
        },
        "replay": {
            "end_s": replay.now_s,
            "free_blocks": int(state.empty_blocks + state.cached_blocks),
            "cached_blocks": int(state.cached_blocks),
            "running": int(state.running),
            "waiting": int(state.waiting),
        },
        "vllm": {
            "end_s": vllm.now_s,
            "free_blocks": vllm.free_blocks(),
            "cached_blocks": vllm.cached_blocks(),
            "running": len(vllm.running),
            "waiting": len(vllm.waiting),
        },
    }


def main() -> None:
    """Compare, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rules", default="fcfs,priority,fair")
    parser.add_argument("--caching", default="on,off")
    parser.add_argument("--aging", action="store_true")
    parser.add_argument("--chunks", action="store_true")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--media", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sets = [
        (rules, caching == "on")
        for rules in args.rules.split(",")
        for caching in args.caching.split(",")
    ]
    jobs = [
        (args.seed + number, args.steps, rules, caching)
        for rules, caching in sets
        for number in range(args.workloads)
    ]
    work = functools.partial(
        compare, aging=args.aging, chunks=args.chunks, drafts=args.drafts, media=args.media
    )
    if args.processes > 1:
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            done = pool.map(work, jobs, chunksize=4)
    else:
        done = [work(job) for job in jobs]
    result = []
    for number, (rules, caching) in enumerate(sets):
        part = done[number * args.workloads : (number + 1) * args.workloads]
        steps = sum(one["steps"] for one in part)
        differences = [one["first"] for one in part if one["first"] is not None]
        result.append(
            {
                "rules": rules,
                "caching": caching,
                "workloads": len(part),
                "steps": steps,
                "fewest_steps": min(one["steps"] for one in part),
                "preemptions": sum(one["preemptions"] for one in part),
                "encoded_items": sum(one["encoded_items"] for one in part),
                "identical_share": sum(one["same"] for one in part) / steps,
                "workloads_that_differ": len(differences),
                "differences": differences[:SHOWN],
            }
        )
    steps = sum(part["steps"] for part in result)
    whole = {
        "steps": steps,
        "identical_share": sum(p["steps"] * p["identical_share"] for p in result) / steps,
        "differences": [one for part in result for one in part["differences"]][:SHOWN],
        "by_rules": result,
    }
    print(json.dumps(whole, indent=2))
    if args.json:
        args.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
