"""Two-stage weighted fair queueing against the ideal: fluid sharing (GPS) with true costs.

Every request's finish on a simulated server under the fair queue is compared with its finish in the
fluid system, which serves all backlogged tenants at once, each at its exact share. It measures how
near the order comes to the ideal; the long-run shares are bounded in docs/fairness.md.

    python benchmarks/fairness.py [--json FILE] [--seed N] [--seeds N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.replay.layout import F8, I4, NONE
from trimtab.engine_bridge.replay.records import (
    ENGINE,
    LIST,
    REQUEST,
    TENANT,
    TIER,
    Records,
    records,
)
from trimtab.engine_bridge.rules import fair_queue
from trimtab.engine_bridge.rules.cost import learn_output

TENANTS = 8
REQUESTS = 20_000
LOADS = (0.9, 1.3, 3.0)
"""Below 1 there is little to share; above it every tenant is backlogged most of the time."""
BATCHES = (1, 32)
QUANTILE = 0.6
_PREFILL_MS, _DECODE_MS = 0.025, 0.4
"""Engine time of a prompt and of an output token in a full batch, about the 8B engine's."""
_FIRST_GUESS_TOKENS = 256.0
_DONE = 1e-9

# Where an estimate comes from.
PERFECT, ONLINE = 0, 1
WAYS = {
    "perfect": (PERFECT, True),
    "online, true-up": (ONLINE, True),
    "online, no true-up": (ONLINE, False),
}
_Raw = argparse.RawDescriptionHelpFormatter


class Traffic(NamedTuple):
    """What arrives, in order of time."""

    arrival_ms: F8
    tenant: I4
    prefill_ms: F8
    output_tokens: F8
    share: F8
    """(tenants,)"""

    @property
    def cost_ms(self) -> F8:
        """True cost of each request."""
        return self.prefill_ms + self.output_tokens * _DECODE_MS


class Queue(NamedTuple):
    """Memory of the fair queue: one tier whose tenants compete."""

    engine: Records
    tiers: Records
    tenants: Records
    req: Records
    lists: Records
    active: I4


def random_traffic(rng: np.random.Generator, load: float) -> Traffic:
    """Bursty tenants with heavy-tailed lengths: log-normal, P99 10 to 30 medians."""
    tenant = rng.integers(0, TENANTS, REQUESTS).astype(np.int32)
    median = np.exp(rng.uniform(np.log(40), np.log(400), TENANTS))
    spread = rng.uniform(1.0, 1.45, TENANTS)
    output = np.ceil(median[tenant] * np.exp(spread[tenant] * rng.standard_normal(REQUESTS)))
    output = np.minimum(output, 8192.0)
    prompt = np.minimum(np.ceil(800.0 * np.exp(rng.standard_normal(REQUESTS))), 32_768.0)
    prefill_ms = prompt * _PREFILL_MS
    mean_ms = float(np.mean(prefill_ms + output * _DECODE_MS))
    gaps = rng.gamma(0.25, 4.0, REQUESTS) * mean_ms / load
    share = 2.0 ** rng.integers(0, 4, TENANTS)
    return Traffic(np.cumsum(gaps), tenant, prefill_ms, output, share)


@compiled
def _first_to_end(head: F8, left: F8, share: F8) -> tuple[int, float, float]:
    """The backlogged tenant whose head ends first, after how long at share 1, and all shares."""
    first, soonest, total = NONE, np.inf, 0.0
    for f in range(len(share)):
        if head[f] != NONE:
            total += share[f]
            if left[f] / share[f] < soonest:
                first, soonest = f, left[f] / share[f]
    return first, soonest, total


@compiled
def fluid_finish_ms(arrival_ms: F8, tenant: I4, cost_ms: F8, share: F8) -> tuple[F8, F8]:
    """Finish of every request under generalized processor sharing (Parekh and Gallager, 1993).

    Returns:
        finish times, and the start of the busy period that each request falls in.
    """
    rows, flows = len(arrival_ms), len(share)
    finish, start = np.zeros(rows), np.zeros(rows)
    following = np.full(rows, NONE, np.int64)
    head, tail = np.full(flows, NONE, np.int64), np.full(flows, NONE, np.int64)
    left = np.zeros(flows)
    now, busy_since, at, done = 0.0, 0.0, 0, 0
    while done < rows:
        first, soonest, total = _first_to_end(head, left, share)
        ends = now + soonest * total if first != NONE else np.inf
        until = min(ends, arrival_ms[at] if at < rows else np.inf)
        if first != NONE:
            left -= (until - now) * share / total
        now = until
        if ends <= until:
            finish[head[first]] = now
            done += 1
            head[first] = following[head[first]]
            left[first] = cost_ms[head[first]] if head[first] != NONE else 0.0
            continue
        if first == NONE:
            busy_since = now
        f = tenant[at]
        if head[f] == NONE:
            head[f], left[f] = at, cost_ms[at]
        else:
            following[tail[f]] = at
        tail[f] = at
        start[at] = busy_since
        at += 1
    return finish, start


@compiled
def _estimate(q: Queue, row: int, cost: float, source: int) -> None:
    r = q.req[row]
    predicted = q.tenants[r.tenant].predicted_output
    r.estimate_ms = cost if source == PERFECT else r.prefill_estimate_ms + predicted * _DECODE_MS


@compiled
def _book(q: Queue, running: I4, count: int, ms: float, source: int, true_up: int) -> None:
    """Book `ms` of service to each running request; one that outlives its estimate gets another."""
    for place in range(count):
        row = running[place]
        r = q.req[row]
        fair_queue.use(q.tiers, q.tenants, q.req, row, r.tenant, ms, true_up)
        if source == ONLINE and r.service_ms >= r.estimate_ms - _DONE:
            fair_queue.expect(
                q.tiers, q.tenants, q.req, row, r.tenant, max(1.0, r.estimate_ms), true_up
            )


@compiled
def _next_change_ms(
    q: Queue, running: I4, count: int, cost_ms: F8, now: float, arrives: float, source: int
) -> float:
    """When the next request ends, outlives its estimate or arrives."""
    until = arrives
    for place in range(count):
        r = q.req[running[place]]
        left = cost_ms[running[place]] - r.service_ms
        if source == ONLINE:
            left = min(left, r.estimate_ms - r.service_ms)
        until = min(until, now + max(0.0, left) * count)
    return until


@compiled
def queue_finish_ms(
    q: Queue, arrival_ms: F8, cost_ms: F8, output: F8, batch: int, source: int, true_up: int
) -> F8:
    """Finish of every request on a server that runs up to `batch` at once, at equal rates."""
    rows = len(arrival_ms)
    finish = np.zeros(rows)
    running = np.zeros(batch, np.int32)
    now, at, done, count = 0.0, 0, 0, 0
    while done < rows:
        while count < batch:
            row = fair_queue.next_by_finish(
                q.engine, q.tiers, q.tenants, q.req, q.lists, q.active, 0
            )
            if row == NONE:
                break
            _estimate(q, row, cost_ms[row], source)
            account = q.req[row].tenant
            fair_queue.dispatch(
                q.engine, q.tiers, q.tenants, q.req, q.lists, q.active, row, account, true_up
            )
            running[count] = row
            count += 1
        arrives = arrival_ms[at] if at < rows else np.inf
        until = _next_change_ms(q, running, count, cost_ms, now, arrives, source)
        if count > 0:
            _book(q, running, count, (until - now) / count, source, true_up)
        now = until
        place = 0
        while place < count:
            row = running[place]
            if q.req[row].service_ms < cost_ms[row] - _DONE:
                place += 1
                continue
            finish[row] = now
            account = q.req[row].tenant
            fair_queue.settle(q.tiers, q.tenants, q.req, row, account, true_up)
            tenant = q.tenants[account]
            tenant.predicted_output = learn_output(
                tenant.predicted_output, tenant.samples, output[row], QUANTILE
            )
            tenant.samples += 1
            count -= 1
            done += 1
            running[place] = running[count]
        while at < rows and arrival_ms[at] <= now:
            _estimate(q, at, cost_ms[at], source)
            fair_queue.enqueue(
                q.engine, q.tiers, q.tenants, q.req, q.lists, q.active, at, q.req[at].tenant
            )
            at += 1
    return finish


def _queue(traffic: Traffic) -> Queue:
    rows, flows = len(traffic.tenant), len(traffic.share)
    q = Queue(
        records(1, ENGINE),
        records(1, TIER),
        records(flows, TENANT),
        records(rows, REQUEST),
        records(flows, LIST),
        np.full(flows, NONE, np.int32),
    )
    q.tiers.weight[:] = 1.0
    q.tenants.share[:] = traffic.share
    q.tenants.active_slot[:] = NONE
    q.tenants.predicted_output[:] = _FIRST_GUESS_TOKENS
    q.req.tenant[:] = traffic.tenant
    q.req.prefill_estimate_ms[:] = traffic.prefill_ms
    q.req.arrived_s[:] = traffic.arrival_ms * 1e-3
    for column in ("head", "tail"):
        q.lists[column][:] = NONE
    for column in ("list", "next", "prev"):
        q.req[column][:] = NONE
    return q


def _percentiles(error: F8) -> dict[str, float]:
    p50, p90, p99 = np.quantile(np.abs(error), (0.5, 0.9, 0.99))
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99)}


def compare(traffic: Traffic, batch: int, source: int, true_up: bool) -> dict[str, Any]:
    """Errors of one server's finish times against the fluid system's.

    `busy_period`: |f - g| / (g - b), with f the finish on the server, g in the fluid system and b
    the start of the fluid system's busy period. Virtual time starts at 0 with a busy period, and
    every tag of weighted fair queueing is a time since then, so this is the error of the finish
    time that the method itself computes. `sojourn`: |f - g| / (g - arrival), much harder, because a
    short request among long ones is served at once by a fluid and waits for a whole request on any
    real server. `late_largest_requests`: (f - g) over the largest request's cost, the unit of the
    theorem f - g <= L_max / r (Parekh and Gallager, 1993).
    """
    cost = traffic.cost_ms
    fluid, busy_ms = fluid_finish_ms(traffic.arrival_ms, traffic.tenant, cost, traffic.share)
    finish = queue_finish_ms(
        _queue(traffic), traffic.arrival_ms, cost, traffic.output_tokens, batch, source, true_up
    )
    late = (finish - fluid) / cost.max()
    return {
        "busy_period": _percentiles((finish - fluid) / (fluid - busy_ms)),
        "sojourn": _percentiles((finish - fluid) / (fluid - traffic.arrival_ms)),
        "late_largest_requests": {
            "p99": float(np.quantile(late, 0.99)),
            "max": float(late.max()),
        },
    }


def _mean(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean over seeds of every figure, and the worst P99 of the headline error."""
    out: dict[str, Any] = {
        key: {name: float(np.mean([run[key][name] for run in runs])) for name in runs[0][key]}
        for key in runs[0]
    }
    out["busy_period"]["p99_worst_seed"] = max(run["busy_period"]["p99"] for run in runs)
    return out


def measure(seed: int, seeds: int) -> list[dict[str, Any]]:
    """All servers, loads and ways of estimating, paired on the same traffic."""
    rows = []
    for load in LOADS:
        traffic = [random_traffic(np.random.default_rng(seed + n), load) for n in range(seeds)]
        for batch in BATCHES:
            for name, (source, true_up) in WAYS.items():
                runs = [compare(t, batch, source, true_up) for t in traffic]
                rows.append({"load": load, "batch": batch, "estimate": name, **_mean(runs)})
    return rows


def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5, help="traffics to average over")
    args = parser.parse_args()
    rows = measure(args.seed, args.seeds)
    print("relative finish-time error against fluid sharing with true costs, percent")
    print(
        f"{'load':>5} {'batch':>5} {'estimate':<18} {'busy P50':>9} {'P99':>7} {'worst':>7}"
        f" {'sojourn P50':>12} {'P99':>7} {'late P99 / L_max':>17}"
    )
    for r in rows:
        busy, sojourn, late = r["busy_period"], r["sojourn"], r["late_largest_requests"]
        print(
            f"{r['load']:5.1f} {r['batch']:5d} {r['estimate']:<18} {100 * busy['p50']:9.2f}"
            f" {100 * busy['p99']:7.2f} {100 * busy['p99_worst_seed']:7.2f}"
            f" {100 * sojourn['p50']:12.1f} {100 * sojourn['p99']:7.0f} {late['p99']:17.2f}"
        )
    if args.json:
        document = {
            "schema": 1,
            "seed": args.seed,
            "seeds": args.seeds,
            "requests": REQUESTS,
            "tenants": TENANTS,
            "output_quantile": QUANTILE,
            "rows": rows,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
