"""Steady made-up tenants, of which one changes something when the window begins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.training.profile import incidents
from trimtab.engine_bridge.vllm.traffic_log import TrafficLog

BLOCK_TOKENS = 160


@dataclass
class Sender:
    """Steady requests of one tenant, before the window and in it."""

    tenant: str
    tier: str = "T0"
    per_s: tuple[float, float] = (1.0, 1.0)
    prompt: tuple[int, int] = (1600, 1600)
    output: tuple[int, int] = (100, 100)
    cached: tuple[float, float] = (0.0, 0.0)
    shared: tuple[float, float] = (0.0, 0.0)
    """Part of the prompt's blocks that all its requests have in common."""


def log(folder: Path, senders: Iterable[Sender], *, begins_s: float = 600.0) -> None:
    out = TrafficLog(
        folder,
        engine="x",
        plan_digest="y",
        origin_unix_s=incidents.ORIGIN_UNIX_S,
        rows_per_file=10**6,
        longest_s=1e9,
        pause=lambda seconds: None,
    )
    number = 0
    for which, sender in enumerate(senders):
        spans = ((0, 0.0, begins_s), (1, begins_s, begins_s + 120.0))
        for side, start_s, end_s in spans:
            count = round(sender.per_s[side] * (end_s - start_s))
            for at_s in np.linspace(start_s, end_s, count, endpoint=False):
                number += 1
                blocks = sender.prompt[side] // BLOCK_TOKENS
                common = int(blocks * sender.shared[side])
                hashes = [b"%03d-common-%06d" % (which, depth) for depth in range(common)]
                hashes += [b"%07d-own-%06d" % (number, d)[:17] for d in range(blocks - common)]
                out.add(
                    arrival_s=float(at_s), tenant=sender.tenant, tier=sender.tier,
                    prompt_tokens=sender.prompt[side], output_tokens=sender.output[side],
                    block_hashes=[block.ljust(18) for block in hashes],
                    prefix_block_tokens=BLOCK_TOKENS,
                    cached_tokens=int(sender.cached[side] * sender.prompt[side]),
                    ttft_s=0.2, e2e_s=1.0,
                )  # fmt: skip
    out.close()


STEADY = [Sender(f"steady-{n}", tier) for n, tier in enumerate(("T0", "T0", "T1", "T2", "T3"))]
