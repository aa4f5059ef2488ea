"""The tables of the report: the overview, the figures of each tier, the differences.

Best figures carry a star and bold type, broken promises a cross, so that no colour is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from trimtab.training.report import svg, words
from trimtab.training.whatif.schema import (
    Difference,
    Quantiles,
    RunResult,
    TierDrafts,
    TierFacts,
    TierMedia,
    TierMetrics,
    WhatIfResult,
)

STAR, KEPT, MISSED = "★", "✓", "✗"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure: its text, what it is ranked by (NaN = not), and whether it breaks a promise."""

    text: str
    rank: float = float("nan")
    """Higher is better."""
    missed: bool | None = None
    """None where nothing is promised."""


def overview(result: WhatIfResult) -> str:
    """Contenders by row: weighted attainment, each tier's attainment, the engine's figures."""
    tiers = [tier for tier in result.tiers if _present(result, tier.name)]
    heads = ["Contender", "All tiers<small>weighted attainment</small>"]
    for tier in tiers:
        promised = math.isfinite(tier.target)
        terms = f"promised: {words.percent(tier.target)}" if promised else "best effort"
        heads.append(f"{escape(tier.name)}<small>{terms}</small>")
    heads += ["Output<small>tokens/s</small>", "Busy<small>utilisation</small>"]
    columns = [[_share(words.weighted(result, p)) for p in result.policies]]
    for tier in tiers:
        columns.append(
            [_share(words.attained(result, p, tier.name), tier.target) for p in result.policies]
        )
    columns.append([_engine(result, p, lambda r: r.engine.tokens_per_s) for p in result.policies])
    columns.append(
        [
            Cell(text=words.percent(words.over_seeds(result, p, lambda r: r.engine.utilization)))
            for p in result.policies
        ]
    )
    marked = [_marked(column) for column in columns]
    rows = [
        f'<tr><th scope="row">{escape(policy)}</th>{"".join(column[i] for column in marked)}</tr>'
        for i, policy in enumerate(result.policies)
    ]
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    return box(f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>")


def details(result: WhatIfResult) -> str:
    """Every figure: rows by tier and metric, contenders by column."""
    head = "".join(f'<th scope="col">{escape(policy)}</th>' for policy in result.policies)
    groups = []
    for tier in result.tiers:
        if _present(result, tier.name):
            caption = f"{escape(tier.name)}<small>{escape(_terms(result, tier))}</small>"
            rows = [row(name, cells) for name, cells in _tier_rows(result, tier)]
            groups.append(group(caption, rows, len(result.policies)))
    rows = [row(name, cells) for name, cells in _engine_rows(result)]
    groups.append(group("Engine", rows, len(result.policies)))
    return box(f'<thead><tr><th scope="col">Figure</th>{head}</tr></thead>{"".join(groups)}')


def difference_table(result: WhatIfResult) -> str:
    """The paired differences with their intervals, as numbers and as strips."""
    body = []
    for policy in dict.fromkeys(d.policy for d in result.differences):
        rows = []
        for gap in (d for d in result.differences if d.policy == policy):
            peers = [d for d in result.differences if d.metric == gap.metric]
            reach = max([abs(x) for d in peers for x in d.ci95 if math.isfinite(x)] or [1.0])
            rows.append(_difference_row(gap, reach or 1.0))
        against = next(d.against for d in result.differences if d.policy == policy)
        body.append(group(f"{escape(policy)} minus {escape(against)}", rows, 4))
    head = "".join(
        f'<th scope="col">{text}</th>'
        for text in ("Metric", "Difference", "95 % interval", "Better or worse", "Around zero")
    )
    return box(f"<thead><tr>{head}</tr></thead>{''.join(body)}")


def _tier_rows(result: WhatIfResult, tier: TierFacts) -> list[tuple[str, list[Cell]]]:
    view = _TierView(result, tier.name)
    return [
        (
            "Within all targets",
            [
                _share(words.attained(result, policy, tier.name), tier.target)
                for policy in result.policies
            ],
        ),
        (
            "Within TTFT / TPOT / E2E",
            view.plain(
                lambda m: m.attainment_ttft,
                lambda m: m.attainment_tpot,
                lambda m: m.attainment_e2e,
                text=words.percent,
            ),
        ),
        ("TTFT P50 / P90 / P99, s", view.latency(lambda m: m.ttft_ms, unit_ms=1e3)),
        ("TPOT P50 / P90 / P99, ms", view.latency(lambda m: m.tpot_ms, unit_ms=1.0)),
        ("E2E P50 / P90 / P99, s", view.latency(lambda m: m.e2e_ms, unit_ms=1e3)),
        (
            "Finished / refused / unfinished / cancelled",
            view.plain(
                lambda m: m.finished,
                lambda m: m.refused,
                lambda m: m.unfinished,
                lambda m: m.cancelled,
            ),
        ),
        *_resource_rows(view),
        *(_draft_rows(view) if result.draft is not None else ()),
        *(_media_rows(view) if any(run.media for run in result.results) else ()),
    ]


def _draft_rows(view: _TierView) -> list[tuple[str, list[Cell]]]:
    def each(figure: Callable[[TierDrafts], float]) -> list[float]:
        return view.of_runs(
            lambda run: figure(run.speculation[view.tier]) if run.speculation else float("nan")
        )

    accepted = each(lambda drafts: drafts.acceptance)
    rest = zip(
        each(lambda drafts: drafts.mean_draft_tokens),
        each(lambda drafts: drafts.tokens_per_step),
        strict=True,
    )
    return [
        ("Draft tokens accepted", [Cell(text=words.percent(share)) for share in accepted]),
        (
            "Drafts verified / tokens given, a request and step",
            [Cell(text=f"{words.number(a)} / {words.number(b)}") for a, b in rest],
        ),
    ]


def _media_rows(view: _TierView) -> list[tuple[str, list[Cell]]]:
    def each(figure: Callable[[TierMedia], float]) -> list[float]:
        return view.of_runs(lambda run: figure(run.media[view.tier]) if run.media else float("nan"))

    both = zip(
        each(lambda media: media.media_tokens),
        each(lambda media: media.encode_ms / 1e3),
        strict=True,
    )
    return [
        (
            "Media tokens of its prompts / encoding them, s",
            [Cell(text=f"{words.number(tokens)} / {words.number(s)}") for tokens, s in both],
        )
    ]


def _resource_rows(view: _TierView) -> list[tuple[str, list[Cell]]]:
    return [
        ("Goodput, output tokens/s", view.ranked(lambda m: m.goodput_tokens_per_s, sign=1)),
        (
            "Preemptions / tokens recomputed",
            view.plain(lambda m: m.preemptions, lambda m: m.recomputed_tokens),
        ),
        ("Prompt tokens from the cache", view.plain(_cached_share, text=words.percent)),
        (
            "KV blocks of its pool: held / lent out, mean",
            view.plain(lambda m: m.kv_blocks_held, lambda m: m.kv_blocks_lent),
        ),
        ("Share of engine time", view.plain(lambda m: m.service_share, text=words.percent)),
        (
            "Evenness between tenants (Jain)",
            [
                Cell(text=words.number(index, 3))
                for index in view.of_runs(lambda run: run.fairness.jain[view.tier])
            ],
        ),
    ]


@dataclass(frozen=True)
class _TierView:
    """Cells of one tier, one a contender."""

    result: WhatIfResult
    tier: str

    def of_runs(self, figure: Callable[[RunResult], float]) -> list[float]:
        return [words.over_seeds(self.result, p, figure) for p in self.result.policies]

    def means(self, figure: Callable[[TierMetrics], float]) -> list[float]:
        return self.of_runs(lambda run: figure(run.tiers[self.tier]))

    def plain(
        self,
        *figures: Callable[[TierMetrics], float],
        text: Callable[[float], str] = words.number,
    ) -> list[Cell]:
        columns = [self.means(figure) for figure in figures]
        return [Cell(text=" / ".join(map(text, row))) for row in zip(*columns, strict=True)]

    def ranked(
        self,
        figure: Callable[[TierMetrics], float],
        *,
        sign: int,
        text: Callable[[float], str] = words.number,
    ) -> list[Cell]:
        return [Cell(text=text(value), rank=sign * value) for value in self.means(figure)]

    def latency(self, pick: Callable[[TierMetrics], Quantiles], *, unit_ms: float) -> list[Cell]:
        """Three quantiles in the unit; ranked by the last."""
        columns = (
            self.means(lambda m: pick(m).p50 / unit_ms),
            self.means(lambda m: pick(m).p90 / unit_ms),
            self.means(lambda m: pick(m).p99 / unit_ms),
        )
        return [
            Cell(text=" / ".join(map(words.figures, row)), rank=-row[2])
            for row in zip(*columns, strict=True)
        ]


def _engine_rows(result: WhatIfResult) -> list[tuple[str, list[Cell]]]:
    def each(make: Callable[[str], Cell]) -> list[Cell]:
        return [make(policy) for policy in result.policies]

    def gap(policy: str) -> Cell:
        size, bound = (
            words.over_seeds(result, policy, figure)
            for figure in (
                lambda r: r.fairness.service_gap_ms,
                lambda r: r.fairness.service_gap_bound_ms,
            )
        )
        if not math.isfinite(bound):
            return Cell(text=words.milliseconds(size))
        text = f"{words.milliseconds(size)} of {words.milliseconds(bound)}"
        return Cell(text=text, missed=size > bound)

    return [
        ("Weighted attainment", each(lambda p: _share(words.weighted(result, p)))),
        (
            "Weighted goodput",
            each(lambda p: _engine(result, p, lambda r: r.engine.weighted_goodput)),
        ),
        ("Output tokens/s", each(lambda p: _engine(result, p, lambda r: r.engine.tokens_per_s))),
        (
            "Utilisation while the trace arrived",
            each(
                lambda p: Cell(
                    text=words.percent(words.over_seeds(result, p, lambda r: r.engine.utilization))
                )
            ),
        ),
        (
            "Last request ended after",
            each(
                lambda p: Cell(
                    text=words.duration(words.over_seeds(result, p, lambda r: r.engine.end_s))
                )
            ),
        ),
        ("Largest service gap between tiers, of its bound", each(gap)),
    ]


def _difference_row(gap: Difference, reach: float) -> str:
    low, high = gap.ci95
    metric = _metric_words(gap.metric)
    if not math.isfinite(gap.mean):
        return f'<tr><th scope="row">{escape(metric)}</th><td colspan="4">{words.NONE}</td></tr>'
    # A longer wait is worse, so its strip is mirrored: right is always better.
    sign = -1 if _unit(gap) == "ms" else 1
    better = "within chance" if low < high else "the same"
    if gap.settled:
        better = "better" if gap.mean * sign > 0 else "worse"
    ends = sorted((low * sign, high * sign))
    numbers, least, most = _in_unit(gap)
    interval = f"{least} to {most}"
    strip = svg.interval_bar(
        low=ends[0],
        mean=gap.mean * sign,
        high=ends[1],
        reach=reach,
        label=f"{metric}: {numbers}, interval {interval}",
    )
    mark = {"better": "kept", "worse": "miss"}.get(better, "soft")
    return (
        f'<tr><th scope="row">{escape(metric)}</th><td>{numbers}</td><td>{interval}</td>'
        f'<td class="{mark}">{better}</td><td>{strip}</td></tr>'
    )


def _in_unit(gap: Difference) -> tuple[str, str, str]:
    """The difference with its unit, and the two ends of its interval."""
    kind = _unit(gap)
    scale, unit = 1.0, ""
    if kind == "share":
        scale, unit = 100.0, " points"
    elif kind == "ms":
        long = max(abs(gap.mean), *map(abs, gap.ci95)) >= 10_000
        scale, unit = (1e-3, " s") if long else (1.0, " ms")
    digits = 2 if abs(gap.mean * scale) < 1 else 1
    mean, low, high = (words.signed(x * scale, digits) for x in (gap.mean, *gap.ci95))
    return f"{mean}{unit}", low, high


def _metric_words(metric: str) -> str:
    if metric.endswith(".attainment"):
        return f"{metric.removesuffix('.attainment')} within targets"
    if metric.endswith(".ttft_p99_ms"):
        return f"{metric.removesuffix('.ttft_p99_ms')} P99 TTFT"
    if metric == "weighted_goodput":
        return "Weighted goodput, tokens/s"
    return metric.replace("_", " ").capitalize()


def _unit(gap: Difference) -> str:
    if gap.metric.endswith("_ms"):
        return "ms"
    return "share" if gap.metric.endswith("attainment") else "rate"


def _terms(result: WhatIfResult, tier: TierFacts) -> str:
    requests = words.of_tier(result, result.policies[0], tier.name, lambda m: m.requests)
    target = (
        f"promised to {words.percent(tier.target)}" if math.isfinite(tier.target) else "best effort"
    )
    return (
        f"{words.promise(tier)}; {target}; value {tier.value:g}; {words.number(requests)} requests"
    )


def _share(share: float, target: float = float("nan")) -> Cell:
    promised = math.isfinite(target) and math.isfinite(share)
    return Cell(
        text=words.percent_against(share, target),
        rank=share,
        missed=share < target if promised else None,
    )


def _engine(result: WhatIfResult, policy: str, figure: Callable[[RunResult], float]) -> Cell:
    value = words.over_seeds(result, policy, figure)
    return Cell(text=words.number(value), rank=value)


def _cached_share(metrics: TierMetrics) -> float:
    return metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else float("nan")


def _present(result: WhatIfResult, tier: str) -> bool:
    return any(run.tiers[tier].requests for run in result.results)


def _marked(cells: Sequence[Cell]) -> list[str]:
    """Table cells with their marks; a best figure shared by all is no one's merit."""
    known = [cell.rank for cell in cells if math.isfinite(cell.rank)]
    best = max(known, default=float("nan"))
    shown_best = {cell.text for cell in cells if cell.rank == best}
    contest = len({cell.text for cell in cells if math.isfinite(cell.rank)}) > 1
    marked = []
    for cell in cells:
        wins = contest and math.isfinite(cell.rank) and cell.text in shown_best
        text = escape(cell.text)
        if cell.missed is not None:
            css, sign, spoken = (
                ("miss", MISSED, "missed") if cell.missed else ("kept", KEPT, "kept")
            )
            text += f' <span class="{css}" role="img" aria-label="{spoken}">{sign}</span>'
        if wins:
            text = f'<span role="img" aria-label="best">{STAR}</span> {text}'
        marked.append(f"<td{' class=best' if wins else ''}>{text}</td>")
    return marked


def row(name: str, cells: Sequence[Cell]) -> str:
    """One figure: its name, and a cell a contender."""
    return f'<tr><th scope="row">{escape(name)}</th>{"".join(_marked(cells))}</tr>'


def group(caption: str, rows: Sequence[str], columns: int) -> str:
    """Rows under a caption over all columns."""
    return (
        f'<tbody><tr class="group"><th scope="rowgroup" colspan="{columns + 1}">'
        f"<span>{caption}</span></th></tr>{''.join(rows)}</tbody>"
    )


def box(table: str) -> str:
    """A table that scrolls sideways where it is too wide."""
    return f'<div class="box" tabindex="0"><table>{table}</table></div>'
