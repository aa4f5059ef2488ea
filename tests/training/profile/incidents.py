"""Real traffic with a known cause put into its last two minutes, served, and logged by an engine.

The replay serves it; the log is written by the engine's own writer, as requests end.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from trimtab.agents.registry import make_policy
from trimtab.controller.cli.app import main
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.traffic_log import TrafficLog
from trimtab.training.traces import read_trace
from trimtab.training.traces.merge import merge
from trimtab.training.whatif.run import drive

ENGINE: Final = "h100:llama-3.1-8b-tp1"
ORIGIN_UNIX_S: Final = 1_790_000_000.0
BEGINS_S: Final = 600.0
ENDS_S: Final = 720.0
OUTCOMES: Final = ("failed", "finished", "refused", "shed", "cancelled")


def composed(shared: Path, out: Path, *, load: float = 0.7, seed: int = 5) -> Trace:
    """Twelve minutes of chat, agents whose turns share long prefixes, and code completion."""
    traces = shared / "traces"
    words = [
        "trace", "compose", "--out", str(out), "--engine", ENGINE, "--load", str(load),
        "--tier", f"T0={traces / 'azure-2023/AzureLLMInferenceTrace_conv.csv.gz'}",
        "--tier", f"T1={traces / 'kv-cache-tester'}", "--share", "T1=0.45", "--share", "T0=0.25",
        "--tier", f"T2={traces / 'azure-2023/AzureLLMInferenceTrace_code.csv.gz'}",
        "--duration-s", str(ENDS_S), "--seed", str(seed),
    ]  # fmt: skip
    assert main(words) == 0
    return read_trace(out, rng=np.random.default_rng(0))


def heaviest(trace: Trace, tier: str, *, rank: int = 0) -> str:
    """The tenant with the most requests of a tier, or one of the next."""
    mine = trace.tenant[trace.tier == trace.tier_names.index(tier)]
    order = np.argsort(-np.bincount(mine, minlength=len(trace.tenant_names)), kind="stable")
    return trace.tenant_names[order[rank]]


def late(trace: Trace, tenant: str) -> np.ndarray[Any, Any]:
    """Rows of a tenant from the incident's begin on."""
    mine = trace.tenant == trace.tenant_names.index(tenant)
    return np.flatnonzero(mine & (trace.arrival_s >= BEGINS_S))


def with_burst(trace: Trace, tenant: str, *, times: int) -> Trace:
    """One tenant sends so many times as many requests."""
    rows = np.repeat(late(trace, tenant), times - 1)
    more = trace.take(rows)
    shift_s = np.random.default_rng(1).uniform(0.0, ENDS_S - BEGINS_S, len(rows))
    arrival_s = BEGINS_S + (more.arrival_s - BEGINS_S + shift_s) % (ENDS_S - BEGINS_S)
    order = np.argsort(arrival_s, kind="stable")
    return merge([trace, replace(more.take(order), arrival_s=arrival_s[order])])


def with_long_prompts(trace: Trace, tenant: str, *, times: int) -> Trace:
    """One tenant's prompts become so many times as long."""
    rows = late(trace, tenant)
    prompt = trace.prompt_tokens.copy()
    prompt[rows] = np.minimum(prompt[rows] * times, 100_000)
    return replace(trace, prompt_tokens=prompt)


def with_fresh_prefixes(trace: Trace, tier: str) -> Trace:
    """A tier's prompts begin with something that is never the same: no block is shared any more."""
    mine = (trace.tier == trace.tier_names.index(tier)) & (trace.arrival_s >= BEGINS_S)
    per_id = np.repeat(mine, np.diff(trace.prefix_offsets))
    ids = trace.prefix_ids.copy()
    ids[per_id] = int(ids.max()) + 1 + np.arange(int(per_id.sum()), dtype=np.int32)
    return replace(trace, prefix_ids=np.unique(ids, return_inverse=True)[1].astype(np.int32))


def write_log(trace: Trace, folder: Path) -> None:
    """Serve the trace under the static plan and log it as the engine does."""
    plan = load_plan()
    spec = get_engine_spec(ENGINE)
    done = drive(trace, make_policy("static"), plan, spec, seed=0, drain_s=600.0).requests
    log = TrafficLog(
        folder,
        engine=ENGINE,
        plan_digest=plan.digest,
        origin_unix_s=ORIGIN_UNIX_S,
        pause=lambda seconds: None,
    )
    ends_s = np.where(np.isnan(done["last_token_s"]), done["arrival_s"] + 5.0, done["last_token_s"])
    for number, row in enumerate(np.argsort(ends_s, kind="stable")):
        if number % 1000 == 999:
            # A real engine is slower than its writer.
            while log.written_rows < log.flush_counted()["handed_over_rows"]:
                pass
        ids = trace.prefix_ids[trace.prefix_offsets[row] : trace.prefix_offsets[row + 1]]
        first_s = float(done["first_token_s"][row])
        arrival_s = float(done["arrival_s"][row])
        log.add(
            arrival_s=arrival_s,
            tenant=trace.tenant_names[trace.tenant[row]],
            tier=trace.tier_names[trace.tier[row]],
            prompt_tokens=int(trace.prompt_tokens[row]),
            output_tokens=int(done["generated_tokens"][row]),
            block_hashes=[int(block).to_bytes(8, "big") for block in ids],
            prefix_block_tokens=int(trace.prefix_block_tokens[row]),
            cached_tokens=int(done["cached_tokens"][row]),
            ttft_s=None if np.isnan(first_s) else first_s - arrival_s,
            e2e_s=float(ends_s[row]) - arrival_s,
            outcome=OUTCOMES[int(done["outcome"][row])],
            preemptions=int(done["preemptions"][row]),
        )
    log.close()
