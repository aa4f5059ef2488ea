"""The report's section on money: what each tier cost, and what it would have to be sold for."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from trimtab.training.economics.statement import Account
from trimtab.training.report import tables, words
from trimtab.training.whatif.schema import RunResult, WhatIfResult

_NOTE = (
    "The tiers' parts sum to what the engine cost, from the start of the trace until the last "
    "request had ended. Compute: the engine time that its tokens asked for. KV held and idle "
    "reserve: the time that no token asked for, paid by KV blocks, whether requests held them or "
    "they were kept for the tier and lay idle; what was lent is paid by who borrowed it. Prices "
    "are for a million output tokens, of which fresh prompt tokens cost a third and repeated ones "
    "a thirtieth; sold at the break-even price, a tier would bring in what it cost."
)
Figure = Callable[[Account], float]


def section(result: WhatIfResult) -> str:
    """The paragraph and the table, tiers by group and contenders by column."""
    head = "".join(f'<th scope="col">{escape(policy)}</th>' for policy in result.policies)
    columns = len(result.policies)
    groups = []
    for tier in result.tiers:
        view = _View(result, tier.name)
        if any(run.economics.tiers[tier.name].cost_usd for run in result.results):
            price = result.results[0].economics.tiers[tier.name].price_per_1m_tokens
            terms = f"priced at {words.dollars(price)}" if math.isfinite(price) else "no price"
            groups.append(
                tables.group(f"{escape(tier.name)}<small>{terms}</small>", view.rows(), columns)
            )
    hourly = words.dollars(result.results[0].economics.usd_per_hour)
    groups.append(
        tables.group(f"Engine<small>{hourly} an hour</small>", _View(result, None).rows(), columns)
    )
    table = f'<thead><tr><th scope="col">USD</th>{head}</tr></thead>{"".join(groups)}'
    return f'<p class="soft">{_NOTE}</p>{tables.box(table)}'


class _View:
    """Rows of one tier, or of the engine as a whole."""

    def __init__(self, result: WhatIfResult, tier: str | None) -> None:
        self._result, self._tier = result, tier

    def rows(self) -> list[str]:
        named = [
            ("Cost an hour", self._hourly(lambda a: a.cost_usd)),
            (
                "Of it compute / KV held / idle reserve",
                self._hourly(
                    lambda a: a.compute_usd, lambda a: a.kv_held_usd, lambda a: a.idle_reserve_usd
                ),
            ),
            ("1,000 finished calls", self._ranked(lambda a: a.usd_per_1k_calls)),
            ("1M tokens, in and out", self._ranked(lambda a: a.usd_per_1m_tokens)),
            ("1M output tokens", self._ranked(lambda a: a.usd_per_1m_output_tokens)),
            (
                "1M output tokens within targets",
                self._ranked(lambda a: a.usd_per_1m_good_tokens),
            ),
            ("Break-even price", self._ranked(lambda a: a.break_even_price_per_1m_tokens)),
        ]
        if any(math.isfinite(self._account(run).revenue_usd) for run in self._result.results):
            money = self._hourly(lambda a: a.revenue_usd, lambda a: a.margin_usd)
            named.append(("Revenue / margin an hour", money))
        return [tables.row(name, cells) for name, cells in named]

    def _account(self, run: RunResult) -> Account:
        money = run.economics
        return money.engine if self._tier is None else money.tiers[self._tier]

    def _means(self, figure: Callable[[RunResult], float]) -> list[float]:
        return [words.over_seeds(self._result, p, figure) for p in self._result.policies]

    def _hourly(self, *figures: Figure) -> list[tables.Cell]:
        columns = [
            self._means(lambda r, f=f: f(self._account(r)) / r.economics.window_s * 3600)  # type: ignore[misc]
            for f in figures
        ]
        return [
            tables.Cell(text=" / ".join(map(words.signed_dollars, row)))
            for row in zip(*columns, strict=True)
        ]

    def _ranked(self, figure: Figure) -> list[tables.Cell]:
        return [
            tables.Cell(text=words.dollars(value), rank=-value)
            for value in self._means(lambda r: figure(self._account(r)))
        ]
