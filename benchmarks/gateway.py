"""What the gateway adds to a request, beside nginx as a bare proxy and LiteLLM's proxy.

    python benchmarks/gateway.py [--quick] [--install] [--peers DIR] [--json F]

One small engine answers at once; the same requests go to it directly and through each proxy, turn
by turn, so that a busy machine harms all alike. Latency: one request at a time, what comes on top
of the direct way. Work: many at a time, requests for each second of the proxy's own CPU time.
Trimtab and LiteLLM check a key and keep quotas of requests, tokens and requests at once; nginx
checks nothing. nginx is unpacked from Debian's package, LiteLLM installed with pip into an
environment of its own (`--install`, and without `--quick` always); what cannot be had is null.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers.proxies import PEERS, Target, all_targets, body, head

from trimtab.engine_bridge.gateway.upstream import Client

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 32
WHOLE_A_TURN = 10
WHOLE_BODY, STREAM_BODY = body(stream=False), body(stream=True)
WHOLE_HEAD, STREAM_HEAD = head(len(WHOLE_BODY)), head(len(STREAM_BODY))


async def ask(client: Client) -> float:
    """Time of a whole answer, seconds."""
    began_s = time.perf_counter()
    answer = await client.send(WHOLE_HEAD, WHOLE_BODY)
    found = await answer.read_all(1 << 20)
    took_s = time.perf_counter() - began_s
    answer.close()
    if answer.status != 200 or b"word" not in found:
        raise SystemExit(f"gateway: status {answer.status}: {found[:200]!r}")
    return took_s


async def stream(client: Client) -> float:
    """Time to the first token of a stream that is read to its end, seconds."""
    began_s = time.perf_counter()
    answer = await client.send(STREAM_HEAD, STREAM_BODY)
    first_s, found = 0.0, b""
    while piece := await answer.read():
        first_s = first_s or time.perf_counter() - began_s
        found = found[-20:] + piece
    answer.close()
    if answer.status != 200 or b"[DONE]" not in found:
        raise SystemExit(f"gateway: status {answer.status}: {found[-200:]!r}")
    return first_s


Ask = Callable[[Client], Awaitable[float]]


async def at_once(client: Client, ask_one: Ask, *, for_s: float) -> int:
    """32 at a time for so long, seconds; how many there were."""
    until_s = time.perf_counter() + for_s
    asked = 0

    async def work() -> None:
        nonlocal asked
        while time.perf_counter() < until_s:
            await ask_one(client)
            asked += 1

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return asked


async def measure(targets: dict[str, Target], *, latency_s: float, work_s: float) -> None:
    """Fill in what every target took.

    Args:
        targets: All ways to the engine.
        latency_s: Time for one request after the other, all targets together, seconds.
        work_s: Time for many at once, each target and kind of request.
    """
    clients = {
        name: Client(f"http://127.0.0.1:{target.port}", connect_s=5, first_byte_s=60, idle_s=60)
        for name, target in targets.items()
    }
    for client in clients.values():
        await at_once(client, ask, for_s=0.3)
        await at_once(client, stream, for_s=0.1)
    until_s = time.perf_counter() + latency_s
    while time.perf_counter() < until_s:
        for name, target in targets.items():
            for _ in range(WHOLE_A_TURN):
                target.whole_s.append(await ask(clients[name]))
            target.first_s.append(await stream(clients[name]))
    for name, target in targets.items():
        if target.process is None:
            continue
        for kind, ask_one in (("requests", ask), ("streams", stream)):
            before_s, began_s = target.cpu_s(), time.perf_counter()
            number = await at_once(clients[name], ask_one, for_s=work_s)
            took_s, cpu_s = time.perf_counter() - began_s, target.cpu_s() - before_s
            target.figures[f"{kind}_per_cpu_s"] = number / cpu_s
            target.figures[f"{kind}_per_s"] = number / took_s
    for client in clients.values():
        client.close()


def summed_up(targets: dict[str, Target]) -> dict[str, Any]:
    """The figures of all, and Trimtab's beside the others'."""
    direct = targets["direct"]
    found: dict[str, Any] = {}
    for name, target in targets.items():
        one = dict(target.figures) | {"samples": len(target.whole_s)}
        for kind, took, base in (
            ("", target.whole_s, direct.whole_s), ("first_token_", target.first_s, direct.first_s),
        ):  # fmt: skip
            for percent in (50, 99):
                value = 1000 * float(np.percentile(took, percent))
                one[f"{kind}p{percent}_ms"] = value
                if target is not direct:
                    added = value - 1000 * float(np.percentile(base, percent))
                    one[f"{kind}added_p{percent}_ms"] = added
        found[name] = {key: round(value, 4) for key, value in one.items()}
    ours = found["trimtab"]

    def ratio(peer: str) -> float | None:
        other = found.get(peer)
        if other is None or other["added_p50_ms"] <= 0:
            return None
        return round(ours["added_p50_ms"] / other["added_p50_ms"], 4)

    return {
        "schema": 1,
        "added_p50_ms": ours["added_p50_ms"],
        "added_p99_ms": ours["added_p99_ms"],
        "added_p50_ratio_litellm": ratio("litellm"),
        "added_p50_ratio_nginx": ratio("nginx"),
        "requests_per_cpu_s": ours["requests_per_cpu_s"],
        "targets": {name: found.get(name) for name in ("direct", *PEERS)},
    }


def print_table(result: dict[str, Any]) -> None:
    """The figures for people."""
    print(f"{'':10}{'added p50':>12}{'added p99':>12}{'first token':>13}{'req/CPU s':>12}"
          f"{'streams/CPU s':>15}")  # fmt: skip
    for name, one in result["targets"].items():
        if one is None:
            print(f"{name:10} not to be had")
        elif name == "direct":
            print(f"{name:10}{one['p50_ms']:9.2f} ms{one['p99_ms']:9.2f} ms"
                  f"{one['first_token_p50_ms']:10.2f} ms   (its own time)")  # fmt: skip
        else:
            print(f"{name:10}{one['added_p50_ms']:9.2f} ms{one['added_p99_ms']:9.2f} ms"
                  f"{one['first_token_added_p50_ms']:10.2f} ms{one['requests_per_cpu_s']:12.0f}"
                  f"{one['streams_per_cpu_s']:15.1f}")  # fmt: skip


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests; within 45 seconds")
    parser.add_argument("--install", action="store_true", help="install LiteLLM with --quick, too")
    parser.add_argument("--peers", default=str(ROOT / "build/peers"), help="folder of the others")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    install = args.install or not args.quick
    with all_targets(Path(args.peers), install=install, hurry=args.quick) as targets:
        if "trimtab" not in targets:
            raise SystemExit("gateway: trimtab gateway did not start; is the extra installed?")
        latency_s, work_s = (7.0, 1.0) if args.quick else (120.0, 10.0)
        asyncio.run(measure(targets, latency_s=latency_s, work_s=work_s))
        result = summed_up(targets)
    print_table(result)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
