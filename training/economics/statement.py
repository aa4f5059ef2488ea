"""The account of one run: what each tier cost, took in, and would have to be sold for.

Frozen values and their making; how the cost is split is in `costs`. USD throughout; a figure that
would be divided by nothing is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge import pricing
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.trace import Trace
from trimtab.envs import score
from trimtab.training.economics.costs import split_cost
from trimtab.training.economics.meter import read_meter

if TYPE_CHECKING:
    from trimtab.engine_bridge.replay.report import ReplayResult

FloatArray = npt.NDArray[np.float64]
_NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one tier, or the engine, cost and took in over the window."""

    cost_usd: float
    compute_usd: float
    """Of the cost: the engine time that its tokens asked for."""
    kv_held_usd: float
    """Of the cost: spare time, for the KV blocks that its requests held."""
    idle_reserve_usd: float
    """Of the cost: spare time, for the KV blocks that were kept for it and lay idle."""
    calls: int
    """Finished requests."""
    tokens: int
    """Prompt tokens of requests that got a first token, and output tokens."""
    output_tokens: int
    """Output tokens that were generated, also of requests that did not finish."""
    good_tokens: int
    """Output tokens of requests within all of their tier's targets."""
    usd_per_1k_calls: float
    usd_per_1m_tokens: float
    usd_per_1m_output_tokens: float
    usd_per_1m_good_tokens: float
    price_per_1m_tokens: float
    """The plan's price of a million output tokens; NaN where it states none, and for the engine."""
    revenue_usd: float
    """At that price for output tokens, a third of it for fresh prompt tokens and a thirtieth for
    repeated ones, as admission counts a budget. The engine's: NaN unless each tier has a price."""
    margin_usd: float
    """Revenue less cost."""
    break_even_price_per_1m_tokens: float
    """The price of a million output tokens at which revenue would be the cost."""


@dataclass(frozen=True, kw_only=True)
class Economics:
    """The account of one run. The tiers' costs sum to the engine's."""

    window_s: float
    """Time that is paid for: from the trace's start until its last arrival or the run's end."""
    usd_per_hour: float
    """What the engine costs for an hour: the plan's price, else the engine's."""
    tiers: dict[str, Account]
    engine: Account


def state_account(
    result: ReplayResult,
    *,
    trace: Trace,
    tier: npt.NDArray[np.int64],
    met: npt.NDArray[np.bool_],
    by: Plan,
    plan: Plan,
    spec: EngineSpec,
) -> Economics:
    """The account of one run.

    Args:
        result: the run.
        trace: the traffic that it replayed.
        tier: index of each request's tier, shape (n,).
        met: whether each request met all targets of its tier, shape (n,).
        by: whose prices count, the same for all contenders.
        plan: that the run was under.
        spec: the engine.
    """
    price = by.engine.cost_per_hour
    usd_per_hour = spec.cost_per_hour if price is None else price
    meter = read_meter(result, plan=plan, spec=spec, duration_s=trace.duration_s)
    split = split_cost(meter, usd_per_hour / 3600)
    sums = {
        name: np.bincount(tier, weights=column, minlength=len(by.tiers))
        for name, column in _delivered(result, trace, met).items()
    }
    prices = [
        _NAN if t.price_per_1m_tokens is None else float(t.price_per_1m_tokens)
        for t in by.tiers.values()
    ]
    accounts = {
        name: _account(
            cost_usd=(split.compute_usd[i], split.kv_held_usd[i], split.idle_reserve_usd[i]),
            sums={key: float(column[i]) for key, column in sums.items()},
            price=prices[i],
        )
        for i, name in enumerate(by.tiers)
    }
    whole = _account(
        cost_usd=(
            float(split.compute_usd.sum()),
            float(split.kv_held_usd.sum()),
            float(split.idle_reserve_usd.sum()),
        ),
        sums={key: float(column.sum()) for key, column in sums.items()},
        price=_NAN,
        revenue_usd=sum(account.revenue_usd for account in accounts.values()),
    )
    return Economics(
        window_s=float(meter.length_s.sum()),
        usd_per_hour=usd_per_hour,
        tiers=accounts,
        engine=whole,
    )


def _delivered(
    result: ReplayResult, trace: Trace, met: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[np.generic]]:
    """What each request got, by what it is counted in."""
    rows = result.requests
    began = np.isfinite(np.asarray(rows["first_token_s"], np.float64))
    output = np.minimum(np.asarray(rows["generated_tokens"], np.int64), trace.output_tokens)
    prompt = np.where(began, pricing.priced_prompt_tokens(trace), 0.0)
    return {
        "calls": np.asarray(rows["outcome"], np.int64) == score.FINISHED,
        "tokens": np.where(began, trace.prompt_tokens, 0) + output,
        "output": output,
        "good": np.where(met, trace.output_tokens, 0),
        "priced": prompt + pricing.OUTPUT_PRICE * output,
    }


def _account(
    *,
    cost_usd: tuple[float, float, float],
    sums: dict[str, float],
    price: float,
    revenue_usd: float | None = None,
) -> Account:
    compute, held, idle = map(float, cost_usd)
    cost = math.fsum((compute, held, idle))
    # Priced tokens count an output token as 3, so a million output tokens are 3 million of them.
    sold = sums["priced"] / pricing.OUTPUT_PRICE
    revenue = price * sold / 1e6 if revenue_usd is None else revenue_usd
    return Account(
        cost_usd=cost,
        compute_usd=compute,
        kv_held_usd=held,
        idle_reserve_usd=idle,
        calls=round(sums["calls"]),
        tokens=round(sums["tokens"]),
        output_tokens=round(sums["output"]),
        good_tokens=round(sums["good"]),
        usd_per_1k_calls=_per(1e3, cost, sums["calls"]),
        usd_per_1m_tokens=_per(1e6, cost, sums["tokens"]),
        usd_per_1m_output_tokens=_per(1e6, cost, sums["output"]),
        usd_per_1m_good_tokens=_per(1e6, cost, sums["good"]),
        price_per_1m_tokens=price,
        revenue_usd=revenue,
        margin_usd=revenue - cost,
        break_even_price_per_1m_tokens=_per(1e6, cost, sold),
    )


def _per(size: float, cost_usd: float, count: float) -> float:
    return size * cost_usd / count if count > 0 else _NAN
