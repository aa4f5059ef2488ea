"""Writes small measured runs in every layout, as an engine with a known law would make them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from trimtab.engine_bridge.step_time import CoefArray, step_ms
from trimtab.training.calibration.cards import find_card, scaled_engine
from trimtab.training.calibration.measured import Measured
from trimtab.training.calibration.models import find_model
from trimtab.training.calibration.published import engine_spec
from trimtab.training.calibration.replayed import Predicted, Setting, predict, trace_of

MODEL, CARD = "Llama-3.1-8B", "H100"


def known_law(*, weights: float = 1.2, compute: float = 0.9) -> CoefArray:
    """The H100's engine for the 8B model with other speeds: what a fit has to find."""
    coef = scaled_engine(find_model(MODEL), find_card(CARD), 1)
    coef[[0, 2]] *= weights
    coef[[1, 3, 5, 6]] *= compute
    return coef


def workload(rng: np.random.Generator, rate: float, count: int) -> Measured:
    """Poisson requests without latencies yet."""
    unknown = np.full(count, np.nan)
    return Measured(
        row=np.arange(count),
        start_s=np.cumsum(rng.exponential(1 / rate, count)),
        prompt_tokens=rng.integers(50, 3000, count).astype(float),
        output_tokens=rng.integers(2, 200, count).astype(float),
        ttft_s=unknown,
        e2e_s=unknown,
        decode_s=unknown,
        prefill_s=unknown,
        host_s=unknown,
    )


def served(requests: Measured, coef: CoefArray, **setting: object) -> Predicted:
    """What the engine of this law makes of the requests."""
    spec, _ = engine_spec(
        find_model(MODEL),
        find_card(CARD),
        coef,
        tp=1,
        version="0.11.0",
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        num_gpu_blocks=20_000,
    )
    return predict(trace_of(requests), replace(Setting(spec=spec), **setting))


def one_at_a_time(requests: Measured, coef: CoefArray) -> Measured:
    """The same requests, each sent when the one before it is done."""
    told = served(replace(requests, start_s=100.0 * np.arange(len(requests))), coef)
    start = np.concatenate(([0.0], np.cumsum(told.e2e_s + 0.01)[:-1]))
    return replace(requests, start_s=start)


def write_profile(folder: Path, *, slower: float = 1.0, skew: bool = False) -> None:
    """A layer profile: straight lines in tokens, chunks and context, `slower` times a base."""
    folder.mkdir(parents=True)
    (folder.parent / "meta.yaml").write_text(
        f"gpu: NVIDIA {CARD}\nhardware: {CARD}\nmodel: meta-llama/{MODEL}\n"
    )
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    dense = [
        (name, size, slower * max(base, per * size))
        for name, base, per in (
            ("qkv_proj", 20.0, 0.1),
            ("gate_up_proj", 80.0, 0.4),
            ("down_proj", 40.0, 0.2),
            ("layernorm", 2.0, 0.002),
            ("embedding", 3.0, 0.001),
        )
        for size in sizes
    ]
    _csv(folder / "dense.csv", ("layer", "tokens", "time_us"), dense)
    heads = [("lm_head", size, slower * (300 + 0.1 * size)) for size in sizes[:9]]
    _csv(folder / "per_sequence.csv", ("layer", "sequences", "time_us"), heads)
    contexts = (16, 64, 256, 1024, 4096, 16384)
    rows: list[tuple[float, ...]] = []
    for chunk in (0, 16, 128, 512, 2048):
        for prefix in (0, 1024, 8192) if chunk else (0,):
            for decodes in (0, 1, 8, 64, 256):
                for context in contexts if decodes else (0,):
                    pairs = chunk * (prefix + chunk / 2)
                    reads = decodes * context * (2e-3 if chunk else 1e-3)
                    if chunk or decodes:
                        rows.append((chunk, prefix, decodes, context, 5 + reads + 4e-5 * pairs))
    times = [(*row[:4], slower * row[4]) for row in rows]
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    _csv(folder / "attention.csv", columns, times)
    if skew:
        lines = [
            (regime, n, 0.5, 1024, 100.0, 110.0) for regime in ("pure", "mixed") for n in (2, 64)
        ]
        columns = ("regime", "n", "ratio", "kv_mean", "t_mean_us", "t_skew_us")
        _csv(folder / "skew.csv", columns, lines)


def write_bench(
    folder: Path, requests: Measured, told: Predicted, *, slower: float = 1.0, **meta: object
) -> None:
    """An engine benchmark's run; with `slower` its latencies are as many times the prediction."""
    folder.mkdir(parents=True)
    with (folder / "requests.jsonl").open("w") as file:
        for row in range(len(requests)):
            queued = 50.0 + float(requests.start_s[row])
            item = {
                "request_id": f"bench-{row}",
                "input_toks": int(requests.prompt_tokens[row]),
                "output_toks": int(requests.output_tokens[row]),
                "queued_ts": queued,
                "scheduled_ts": queued,
                "first_token_ts": queued + slower * float(told.ttft_s[row]),
                "last_token_ts": queued + slower * float(told.e2e_s[row]),
            }
            print(json.dumps(item), file=file)
    arguments = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "tensor_parallel_size": 1}
    text = {"model": f"meta-llama/{MODEL}", "vllm_version": "0.19.0", "engine_kwargs": arguments}
    (folder / "meta.json").write_text(json.dumps(text | meta))


def write_spans(folder: Path, requests: Measured, told: Predicted, *, host_s: float) -> None:
    """Spans of a run whose host needs `host_s` before the engine."""
    folder.mkdir(parents=True)
    (folder / "exp-config.yaml").write_text(
        f"model: meta-llama/{MODEL}\ntensor_parallelism: 1\n"
        "max_num_batched_tokens: 2048\nmax_num_seqs: 256\n"
    )
    with gzip.open(folder / "traces.json.gz", "wt") as file:
        for row in range(len(requests)):
            ttft, e2e = float(told.ttft_s[row]), float(told.e2e_s[row])
            values = {
                "gen_ai.usage.prompt_tokens": int(requests.prompt_tokens[row]),
                "gen_ai.usage.completion_tokens": int(requests.output_tokens[row]),
                "gen_ai.latency.time_to_first_token": ttft,
                "gen_ai.latency.e2e": e2e,
                "gen_ai.latency.time_in_queue": 0.0,
                "gen_ai.latency.time_in_model_prefill": ttft - host_s,
                "gen_ai.latency.time_in_model_decode": e2e - ttft,
            }
            span = {
                "name": "llm_request",
                "startTimeUnixNano": str(int((1e9 + float(requests.start_s[row])) * 1e9)),
                "attributes": [{"key": k, "value": {"doubleValue": v}} for k, v in values.items()],
            }
            print(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}), file=file)
    with gzip.open(folder / "vllm.log.gz", "wt") as file:
        print("Initializing a V1 LLM engine (v0.11.0) with config", file=file)
        print("cache_config_info with initialization after num_gpu_blocks is: 20000", file=file)


def write_client(path: Path, requests: Measured, told: Predicted) -> None:
    """One load as a client saw it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    decode = told.e2e_s - told.ttft_s
    columns = (requests.prompt_tokens, requests.output_tokens, told.ttft_s, decode)
    rows = list(zip(*columns, 1.7e9 + requests.start_s, strict=True))
    names = ("prompt_tokens", "generation_tokens", "ttft", "generation_time", "launch_time")
    _csv(path, names, rows)


def write_own_log(path: Path, coef: CoefArray, rng: np.random.Generator, rows: int = 600) -> None:
    """A step log of Trimtab's own in Parquet."""
    decodes = rng.integers(1, 200, rows).astype(float)
    kv_tokens = decodes * rng.integers(200, 2000, rows)
    chunks = rng.integers(0, 2, rows).astype(float)
    chunk_tokens = chunks * rng.integers(16, 2000, rows)
    pairs = 0.5 * chunk_tokens**2
    total = decodes + chunk_tokens
    sizes = (total, decodes + chunks, chunks, chunk_tokens, pairs, decodes, kv_tokens)
    step = [step_ms(coef, *map(float, row)) for row in zip(*sizes, strict=True)]
    pd.DataFrame(
        {
            "time_s": np.cumsum(step) * 1e-3,
            "step_ms": step,
            "decodes": decodes,
            "kv_tokens": kv_tokens,
            "chunks": chunks,
            "chunk_tokens": chunk_tokens,
            "pairs": pairs,
            "running": decodes + chunks,
            "waiting": 0,
            "kv_used_blocks": kv_tokens // 16,
            "preempted": 0,
            "finished": 0,
        }
    ).to_parquet(path)


def write_sampled_log(path: Path, coef: CoefArray, rng: np.random.Generator) -> None:
    """A sample of an instrumented engine's decode steps as CSV, a tenth of 8,000 steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count, clock, rows = 8000, 0.0, []
    blocks = 20_000
    for step in range(count):
        decodes = 20 + 30 * step // count
        used = decodes * 40
        numbers = (decodes, decodes, 0.0, 0.0, 0.0, decodes, used * 16.0)
        if rng.random() < 0.4:
            rows.append(
                (
                    *(step, int(clock * 1e6), decodes, 0, 0, decodes, 0, decodes),
                    *(int(step % 5 == 0), used / blocks, blocks),
                )
            )
        clock += step_ms(coef, *map(float, numbers))
    names = (
        *("step.id", "step.ts_start_ns", "queue.running_depth", "queue.waiting_depth"),
        *("batch.num_prefill_reqs", "batch.num_decode_reqs", "batch.prefill_tokens"),
        *("batch.decode_tokens", "batch.num_finished", "kv.usage_gpu_ratio", "kv.blocks_total_gpu"),
    )
    _csv(path, names, rows)


def _csv(path: Path, columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    pd.DataFrame(rows, columns=list(columns)).to_csv(path, index=False)
