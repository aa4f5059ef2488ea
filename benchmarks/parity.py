"""Does the replay decide as vLLM does? The same random traffic through both, step by step.

    python benchmarks/parity.py [--workloads 200] [--steps 500] [--seed 0] [--json F]
        [--rules fcfs,priority,fair] [--caching on,off] [--aging] [--chunks] [--drafts]
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
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.draft_spec import DraftFile, DraftSpec
from trimtab.engine_bridge.engine_file import EngineFile, write_engine_file
from trimtab.engine_bridge.engine_spec import EngineSpec, find_engine_file, get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.plan.load import with_values
from trimtab.engine_bridge.plan.schema import Rules
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.trace import NO_SESSION, Trace
from trimtab.engine_bridge.vllm.virtual_time import VirtualClock, VirtualVllm

TIERS = ("T0", "T1", "T2", "T3")
TENANTS = ("a", "b", "c", "d", "e", "f", "g")
SHOWN = 10
CHANGE_STEPS = 40
NO_INTERVAL_S = 3600.0
"""The replay is stepped without telemetry intervals, at whose ends both sides settle accounts."""
LONGEST_PROMPTS, LONGEST_OUTPUT = (200, 1000, 4000), 300
SWITCHES = tuple(f"rules.{name}" for name in Rules.model_fields)


@dataclass
class Draft:
    """Requests of a workload under construction, one dictionary a row."""

    rng: np.random.Generator
    id_tokens: int
    block_size: int
    longest_prompt: int
    tenants: int
    ids: int = 0
    rows: list[dict] = field(default_factory=list)

    def new_ids(self, count: int) -> list[int]:
        """Prefix ids that nobody has yet."""
        self.ids += count
        return list(range(self.ids - count, self.ids))

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


def workload(rng: np.random.Generator, spec: EngineSpec, requests: int) -> Trace:
    """Random traffic for that engine."""
    id_tokens = spec.block_size * int(rng.choice([1, 1, 1, 4])) // int(rng.choice([1, 1, 1, 2]))
    tenants = int(rng.integers(1, len(TENANTS) + 1))
    draft = Draft(rng, id_tokens, spec.block_size, int(rng.choice(LONGEST_PROMPTS)), tenants)
    prefixes = [draft.new_ids(int(rng.integers(1, 1200 // id_tokens))) for _ in range(5)]
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
    for _ in range(int(rng.integers(3, 12))):
        _request(
            draft,
            arrival_s=at_s,
            tier=int(rng.integers(0, len(TIERS))),
            prompt_tokens=len(ids) * draft.id_tokens + draft.length(100),
            output_tokens=int(rng.integers(1, 50)),
            ids=ids,
        )


def _request(draft: Draft, **values: object) -> None:
    """Append a request; what is not given is as for a single one."""
    rng = draft.rng
    row: dict = {"session": NO_SESSION, "turn": 0, "think_s": 0.0} | values
    row["tenant"] = int(rng.integers(0, draft.tenants))
    gone = rng.random() < 0.1
    row["cancel_after_s"] = float(rng.exponential(3.0)) + 1e-3 if gone else np.inf
    draft.rows.append(row)


def _conversation(draft: Draft, at_s: float, prefixes: list[list[int]]) -> None:
    """One request, or several turns that repeat each other's text."""
    rng = draft.rng
    number, tier = len(draft.rows), int(rng.integers(0, len(TIERS)))
    ids: list[int] = []
    if rng.random() < 0.5:
        shared = prefixes[int(rng.integers(0, len(prefixes)))]
        ids = shared[: int(rng.integers(1, len(shared) + 1))]
    turns = int(rng.integers(2, 5)) if rng.random() < 0.3 else 1
    closed = rng.random() < 0.7
    prompt = len(ids) * draft.id_tokens
    for turn in range(turns):
        prompt += draft.length(draft.longest_prompt // (4 if turns > 1 or ids else 1))
        if rng.random() < 0.1 and ids:
            prompt = len(ids) * draft.id_tokens
        elif rng.random() < 0.1:
            # Just full blocks, or one token more.
            prompt += -prompt % draft.block_size + int(rng.integers(0, 2))
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
    )


def random_plan(rng: np.random.Generator) -> Plan:
    """The shipped plan, or one with other switches, pools, targets and eviction."""
    plan = load_plan(None)
    if rng.random() < 0.3:
        return plan
    changes: dict[str, object] = {name: bool(rng.random() < 0.85) for name in SWITCHES}
    changes["retention.eviction"] = str(
        rng.choice(["scaled_age", "scaled_age", "lru", "tier_order", "fixed_quota"])
    )
    changes["retention.learn_reuse"] = bool(rng.random() < 0.5)
    if rng.random() < 0.5:
        changes["retention.classes"] = {}
    changes["backoff.per_waiting_ms"] = float(rng.uniform(0.0, 30.0))
    changes["feasible.window_ms"] = float(rng.choice([0.0, 300.0, 1500.0]))
    changes["prefill.budget_tokens"] = int(rng.integers(256, 2000))
    changes["prediction.initial_output_tokens"] = int(rng.integers(16, 400))
    for name in TIERS:
        changes[f"tiers.{name}.weight"] = float(rng.choice([1.0, 4.0, 4.0, 60.0, 3000.0]))
        changes[f"tiers.{name}.pool"] = str(rng.choice(list(plan.pools)))
        changes[f"tiers.{name}.backoff"] = bool(rng.random() < 0.5)
        changes[f"tiers.{name}.max_running"] = (
            int(rng.integers(1, 12)) if rng.random() < 0.2 else None
        )
        changes[f"tiers.{name}.targets.ttft_ms"] = float(rng.uniform(100.0, 4000.0))
        changes[f"tiers.{name}.shed.mode"] = str(rng.choice(["never", "refuse", "demote"]))
    for name, pool in zip(TIERS, plan.pools, strict=False):
        # Each pool belongs to a tier.
        changes[f"tiers.{name}.pool"] = pool
    if rng.random() < 0.3:
        changes["isolation.longest_step_ms"] = float(rng.uniform(6.0, 40.0))
    return with_values(plan, changes)


def chunked(plan: Plan, seed: int) -> Plan:
    """The plan with rule 14 for running prefills too, and a random order."""
    rng = np.random.default_rng([seed, 8])
    factor = float(rng.choice([0.0, 1.0, 5.0])) if rng.random() < 0.8 else None
    return with_values(plan, {"feasible.chunks": True, "feasible.prefill_factor": factor})


def aged(plan: Plan, seed: int) -> Plan:
    """The plan with random ageing: windows, interactive tiers, a tenant that is an exception."""
    rng = np.random.default_rng([seed, 6])
    changes: dict[str, object] = {
        "aging.tier_window_ms": float(rng.choice([0.0, 20.0, 1500.0])),
        "aging.tenant_window_ms": float(rng.choice([0.0, 300.0, 3000.0])),
        "aging.interactive_bonus": float(rng.uniform(0.0, 1.0)),
        "aging.full_after_s": float(rng.choice([0.3, 3.0, 20.0])),
        "aging.due_every": int(rng.choice([1, 2, 8])),
        "tenants.a": {"tier": TIERS[0], "interactive": bool(rng.random() < 0.5)},
    }
    for name in TIERS:
        changes[f"tiers.{name}.interactive"] = bool(rng.random() < 0.5)
    return with_values(plan, changes)


def real_engine(trace: Trace, plan: Plan, spec: EngineSpec, rules: str) -> VirtualVllm:
    """The real scheduler: under its own rules, or the fair one."""
    if rules != "fair":
        return VirtualVllm(trace, plan, spec, policy=rules)
    from trimtab.engine_bridge.vllm import FairScheduler

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        # JSON is YAML.
        path.write_text(plan.model_dump_json())
        engine = spec.name
        if spec.draft is not None:
            engine = str(Path(folder) / "engine.yaml")
            write_engine_file(_with_draft(spec), Path(engine))
        return VirtualVllm(
            trace,
            plan,
            spec,
            scheduler_class=FairScheduler,
            policy="priority",
            additional_config={
                "trimtab": {
                    "engine": engine,
                    "plan": str(path),
                    "interval_s": NO_INTERVAL_S,
                }
            },
            prepare=lambda scheduler, now: scheduler.use_clock(VirtualClock(now)),
        )


def _with_draft(spec: EngineSpec) -> EngineFile:
    """The shipped engine's file with the draft model of `spec`."""
    assert spec.draft is not None
    values = asdict(spec.draft)
    values["acceptance"] = dict(spec.draft.acceptance)
    return find_engine_file(spec.name).model_copy(update={"draft": DraftFile(**values)})


def random_allocation(rng: np.random.Generator, before: Allocation, plan: Plan) -> Allocation:
    """A wish for other weights, fractions, budgets and caps; the engines hold it to the bounds."""
    fractions = np.array(before.kv_fractions) * rng.uniform(0.7, 1.4, len(before.kv_fractions))
    shares = np.array(before.prefill_shares) * rng.uniform(0.7, 1.4, len(before.prefill_shares))
    return replace(
        before,
        weights=tuple(float(w * rng.uniform(0.5, 2.0)) for w in before.weights),
        kv_fractions=tuple(map(float, fractions / fractions.sum())),
        prefill_shares=tuple(map(float, shares / shares.sum())),
        prefill_budget_tokens=int(before.prefill_budget_tokens * rng.uniform(0.6, 1.6)),
        retention=tuple(float(f * rng.uniform(0.5, 2.0)) for f in before.retention),
        shed_at=tuple(float(f * rng.uniform(0.9, 1.1)) for f in before.shed_at),
        slack_fraction=float(rng.random()),
        low_tier_chunk_share=float(rng.random()),
        max_num_seqs=int(rng.integers(4, 65)),
        version=before.version + 1,
    )


def compare(
    job: tuple[int, int, str, bool],
    *,
    aging: bool = False,
    chunks: bool = False,
    drafts: bool = False,
) -> dict:
    """One workload under one rule set: steps, identical ones, the first difference."""
    seed, steps, rules, caching = job
    rng = np.random.default_rng([seed, caching])
    spec = engine(rng, caching=caching)
    trace = workload(rng, spec, requests=60 + steps // 3)
    plan = random_plan(rng) if rules == "fair" else load_plan(None)
    if aging:
        plan = aged(plan, seed)
    if chunks:
        plan = chunked(plan, seed)
    if drafts:
        spec = drafting(rng, spec)
        most = {f"tiers.{name}.draft_tokens": int(rng.integers(0, 6)) for name in TIERS}
        plan = with_values(plan, most)
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
    work = functools.partial(compare, aging=args.aging, chunks=args.chunks, drafts=args.drafts)
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
