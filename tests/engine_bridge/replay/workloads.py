"""Small random workloads for tests of the replay: sessions, shared prefixes, media."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.engine_bridge.encoder_spec import EncoderSpec
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.media import IMAGE, MediaItems
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.trace import NO_SESSION, Trace

TIERS = ("T0", "T1", "T2", "T3")


def small_engine(
    *, blocks: int = 600, seqs: int = 16, tokens: int = 2048, caching: bool = True
) -> EngineSpec:
    """The 8B engine with a cache and a batch small enough to be fought over."""
    return get_engine_spec("h100:llama-3.1-8b-tp1").with_limits(
        num_gpu_blocks=blocks,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        enable_prefix_caching=caching,
    )


def aging_plan() -> Plan:
    """The shipped plan with ageing at both levels, strong enough to change the order."""
    return with_values(
        load_plan(None),
        {
            "aging.tier_window_ms": 400.0,
            "aging.tenant_window_ms": 2000.0,
            "aging.interactive_bonus": 0.5,
            "aging.full_after_s": 1.5,
            "aging.due_every": 2,
            "tiers.T1.interactive": True,
            "tenants.b": {"tier": "T2", "interactive": True},
        },
    )


def random_trace(
    seed: int, *, requests: int = 120, rate: float = 20.0, group_tokens: int = 64
) -> Trace:
    """Requests of four tiers; some in closed-loop sessions, with growing and shared prefixes."""
    rng = np.random.default_rng(seed)
    arrival, rows = np.cumsum(rng.exponential(1.0 / rate, requests)), []
    next_id = 8
    for number in range(requests):
        turns = int(rng.integers(1, 5)) if rng.random() < 0.3 else 1
        tier = int(rng.integers(0, 4))
        shared = rng.random() < 0.3
        ids: list[int] = list(range(int(rng.integers(1, 8)))) if shared else []
        prompt = len(ids) * group_tokens
        for turn in range(turns):
            prompt += int(rng.integers(1, 900))
            output = int(rng.integers(1, 120))
            while len(ids) < (prompt + output) // group_tokens:
                ids.append(next_id)
                next_id += 1
            rows.append(
                {
                    "arrival_s": arrival[number],
                    "tier": tier,
                    "tenant": int(rng.integers(0, 3)),
                    "prompt_tokens": prompt,
                    "output_tokens": output,
                    "session": number if turns > 1 else NO_SESSION,
                    "turn": turn,
                    "think_s": float(rng.exponential(0.5)) if turn else 0.0,
                    "ids": list(ids),
                    "cancel_after_s": float(rng.exponential(2.0)) + 1e-3
                    if rng.random() < 0.1
                    else np.inf,
                    "stop_reason": int(rng.integers(0, 2)),
                }
            )
            prompt += output
    lengths = [len(r["ids"]) for r in rows]
    columns = {
        name: np.array([r[name] for r in rows])
        for name in rows[0]
        if name not in ("ids", "session", "turn", "stop_reason")
    }
    return Trace.build(
        **columns,
        tier_names=TIERS,
        tenant_names=("a", "b", "c"),
        session=np.array([r["session"] for r in rows], np.int32),
        turn=np.array([r["turn"] for r in rows], np.int32),
        stop_reason=np.array([r["stop_reason"] for r in rows], np.int32),
        stop_names=("", "tool_use"),
        prefix_offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        prefix_ids=np.array([i for r in rows for i in r["ids"]], np.int32),
        prefix_block_tokens=np.full(len(rows), group_tokens, np.int32),
    )


def encoding_engine(
    spec: EngineSpec,
    *,
    budget_tokens: int = 400,
    cache_tokens: int = 500,
    item_ms: float = 0.0,
    us_per_token: float = 100.0,
) -> EngineSpec:
    """The engine with an encoder that costs the same for every kind."""
    encoder = EncoderSpec(
        budget_tokens=budget_tokens,
        cache_tokens=cache_tokens,
        kinds=((item_ms, us_per_token, 0.0),) * 3,
    )
    return replace(spec, encoder=encoder)


def with_media(trace: Trace, seed: int, *, contents: int = 12, largest: int = 400) -> Trace:
    """The trace with media in most prompts, often several in a row, often of the same content."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(20, largest, contents)
    offsets, items = [0], []
    for prompt in trace.prompt_tokens:
        start = int(rng.integers(0, 50))
        while rng.random() < 0.6:
            content = int(rng.integers(0, contents))
            if start + sizes[content] > prompt:
                break
            items.append((content % 3, start, sizes[content], content))
            start += int(sizes[content]) + int(rng.integers(0, 2) * rng.integers(0, 100))
        offsets.append(len(items))
    kind, starts, tokens, content = np.array(items, np.int32).reshape(-1, 4).T
    media = MediaItems(
        offsets=np.array(offsets), kind=kind, start_tokens=starts, tokens=tokens, content=content
    )
    media.check(trace.prompt_tokens)
    return replace(trace, media=media)


def prompts(
    *rows: tuple[float, int, int, int, list[tuple[int, int, int]]], **columns: Any
) -> Trace:
    """Requests from arrival, tier, prompt, output and items (start, tokens, content)."""
    items = [item for row in rows for item in row[4]]
    start, tokens, content = np.array(items, np.int32).reshape(-1, 3).T
    return Trace.build(
        arrival_s=np.array([row[0] for row in rows]),
        tier=np.array([row[1] for row in rows]),
        prompt_tokens=np.array([row[2] for row in rows]),
        output_tokens=np.array([row[3] for row in rows]),
        tenant=np.arange(len(rows)),
        tenant_names=tuple(f"tenant-{row}" for row in range(len(rows))),
        tier_names=("T0", "T1", "T2", "T3"),
        media=MediaItems(
            offsets=np.cumsum([0, *(len(row[4]) for row in rows)]),
            kind=np.full(len(items), IMAGE, np.int32),
            start_tokens=start,
            tokens=tokens,
            content=content,
        ),
        **columns,
    )
