"""The frontier of a tier's reserve as sentences, for the terminal and the page; and the page.

One HTML file that fetches nothing. It judges nothing: `trimtab.training.economics.frontier` did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from trimtab.training.economics.frontier import Frontier, Point
from trimtab.training.economics.study import ReserveStudy
from trimtab.training.report import scatter, tables, words
from trimtab.training.report.page import document
from trimtab.training.whatif import statistics
from trimtab.training.whatif.statistics import Interval

KNOB_WORDS = {"kv": "KV guarantee", "prefill": "prefill share", "weight": "weight"}
_POINTS = 100


def moved(knobs: Sequence[str]) -> str:
    """The knobs in words: "KV guarantee and prefill share"."""
    named = [KNOB_WORDS[knob] for knob in knobs]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


def reserve(part: float) -> str:
    """A reserve as "70 %"; as many digits as the plan's own needs."""
    return f"{100 * part:.3g} %"


def verdict(frontier: Frontier) -> tuple[str, ...]:
    """What a frontier comes to, in sentences."""
    return (_span(frontier), _bought(frontier), _plan(frontier), _others(frontier))


def _span(frontier: Frontier) -> str:
    what = f"{frontier.tier}'s {moved(frontier.knobs)}"
    if not frontier.matters:
        return (
            f"Moving {what} changes nothing beyond chance, neither {frontier.tier}'s attainment "
            "nor the goodput of all."
        )
    least, most = (pick(frontier.points, key=lambda p: p.attainment.mean) for pick in (min, max))
    low, high = (pick(p.goodput.mean for p in frontier.points) for pick in (min, max))
    return (
        f"Moving {what} takes its attainment from {words.percent(least.attainment.mean, 2)} (at "
        f"{reserve(least.reserve)}) to {words.percent(most.attainment.mean, 2)} (at "
        f"{reserve(most.reserve)}), and the goodput of all lies between {words.number(low)} and "
        f"{words.number(high)} tokens/s."
    )


def _bought(frontier: Frontier) -> str:
    price = frontier.price
    if not price.shown:
        if price.reserve_from == price.reserve_to:
            return (
                f"Attainment costs no goodput here: {reserve(price.reserve_to)} has the most of "
                "both."
            )
        what = (
            "Attainment costs no goodput beyond chance here"
            if price.attainment_points.low > 0
            else "No attainment beyond chance is to be bought here"
        )
        return (
            f"{what}, along the points that none beats: from {reserve(price.reserve_from)} to "
            f"{reserve(price.reserve_to)}, "
            f"{_points(price.attainment_points)} points for {_usd(price.usd_per_hour)} an hour."
        )
    knee = frontier.knee
    bend = f" The frontier bends at {reserve(knee.reserve)}." if knee else ""
    return (
        f"From {reserve(price.reserve_from)} to {reserve(price.reserve_to)} {frontier.tier} gains "
        f"{_points(price.attainment_points)} points, and goodput is lost that costs "
        f"{_usd(price.usd_per_hour)} an hour to make: {_usd(price.usd_per_hour_a_point)} an hour "
        f"for a point, of the engine's {words.dollars(frontier.usd_per_hour)}.{bend}"
    )


def _plan(frontier: Frontier) -> str:
    plan = frontier.plan
    goodput = words.number(plan.goodput.mean)
    figures = f"{words.percent(plan.attainment.mean, 2)}, {goodput} tokens/s"
    if not plan.dominated:
        return f"The static plan ({figures}) is beaten by no point beyond chance."
    better = [
        p
        for p in frontier.points
        if p.attainment.mean >= plan.attainment.mean and p.goodput.mean >= plan.goodput.mean
    ]
    best = max(better, key=lambda p: (not p.dominated, p.goodput.mean))
    return (
        f"The static plan ({figures}) is beaten: {reserve(best.reserve)} reserved gives "
        f"{words.percent(best.attainment.mean, 2)} and {words.number(best.goodput.mean)} tokens/s."
    )


def _others(frontier: Frontier) -> str:
    lost = frontier.opportunity_usd_per_hour
    least = reserve(frontier.points[0].reserve)
    if not lost.settled:
        return (
            f"What the plan's reserve costs the other tiers against {least} is within chance: "
            f"{_usd(lost)} an hour of their goodput."
        )
    if lost.mean < 0:
        gained = Interval(mean=-lost.mean, low=-lost.high, high=-lost.low)
        return (
            f"Against {least}, the plan's reserve gives the other tiers goodput worth "
            f"{_usd(gained)} an hour."
        )
    return (
        f"Against {least}, the plan's reserve takes goodput worth {_usd(lost)} an hour from the "
        "other tiers."
    )


def _points(gain: Interval) -> str:
    digits = 2 if abs(gain.mean) < 1 else 1
    mean, low, high = (words.signed(x, digits) for x in (gain.mean, gain.low, gain.high))
    return f"{mean} ({low} to {high})"


def _usd(paid: Interval) -> str:
    return f"{words.signed_dollars(paid.mean)} ({words.dollars_between(paid.low, paid.high)})"


def marks_of(point: Point) -> tuple[str, ...]:
    """What is to be said of a point, in words."""
    found = (
        ("the plan", point.is_plan),
        ("knee", point.knee),
        ("beaten", point.dominated),
        ("beyond bounds", not point.within_bounds),
    )
    return tuple(text for text, holds in found if holds)


def render(study: ReserveStudy) -> str:
    """The whole page as text."""
    parts = [
        f"<h1>What {escape(study.tier)}'s reserve buys</h1>",
        f'<p class="soft">{study.trace.requests:,} requests over '
        f"{words.duration(study.trace.duration_s)} on {escape(study.engine)} under plan "
        f"{escape(study.plan)}, with more and less of it reserved for {escape(study.tier)}; "
        f"{len(study.seeds)} seed{'s'[: len(study.seeds) > 1]}.</p>",
    ]
    for frontier in study.frontiers:
        sentences = verdict(frontier)
        more = "".join(f"<li>{escape(text)}</li>" for text in sentences[1:])
        parts += [
            f"<h2>{escape(moved(frontier.knobs).capitalize().replace('Kv', 'KV'))}</h2>",
            f'<p class="lead">{escape(sentences[0])}</p><ul>{more}</ul>',
            _chart(frontier),
            _table(frontier),
        ]
    parts += ["<h2>Method</h2>", _method(study)]
    return document(f"Frontier of {study.tier}: {study.plan} on {study.engine}", parts)


def _chart(frontier: Frontier) -> str:
    points = frontier.points
    known = [p for p in points if math.isfinite(p.attainment.mean)]
    if not known:
        return f'<p class="soft">No request of {escape(frontier.tier)}.</p>'

    price = frontier.price
    ends = (price.reserve_from, price.reserve_to)
    marks = [_mark(p, frontier.plan, named=p.reserve in ends or p.knee) for p in known]
    best = [p for p in sorted(known, key=lambda p: p.goodput.mean) if not p.dominated]
    chart = scatter.scatter_chart(
        title=f"{frontier.tier}: attainment against the goodput of all tiers",
        description=f"One point for each reserve of {frontier.tier}, from none to all, with the "
        "95 % interval of its difference from the plan; the line joins the points that none beats.",
        x_axis=scatter.span_axis(np.array([x for m in marks for x in (m.x, *m.x_range)])),
        y_axis=scatter.span_axis(
            np.array([y for m in marks for y in (m.y, *m.y_range)]), percent=True
        ),
        x_label="goodput of all tiers, output tokens/s",
        # The plan's mark is drawn last, on top of the others.
        marks=sorted(marks, key=lambda mark: mark.shape == "square"),
        curves=[
            scatter.Curve(
                x=np.array([p.goodput.mean for p in best]),
                y=np.array([p.attainment.mean for p in best]),
                css="s0",
            )
        ],
    )
    return (
        '<p class="soft">Named are the plan, the knee and the ends, by their reserve. Filled: '
        "beaten by no point beyond chance. Hollow: beaten. Square: the static plan. Whiskers: the "
        "95 % interval of the difference from the plan.</p>"
        f'<figure class="large"><figcaption>{escape(frontier.tier)} within targets '
        f"<small>against the goodput of all</small></figcaption>{chart}</figure>"
    )


def _mark(point: Point, plan: Point, *, named: bool) -> scatter.Mark:
    """A point; those that are told of carry their reserve, so that labels keep apart."""
    shape = "square" if point.is_plan else "ring" if point.dominated else "dot"
    label = "plan" if point.is_plan else reserve(point.reserve)
    if point.knee:
        label += ", knee"
    told = f"{reserve(point.reserve)}: {words.percent(point.attainment.mean, 2)}, "
    return scatter.Mark(
        x=point.goodput.mean,
        y=point.attainment.mean,
        x_range=_around(plan.goodput, point.goodput_gain),
        y_range=_around(plan.attainment, point.attainment_gain),
        css="f1" if point.is_plan else "f7" if point.dominated else "f0",
        shape=shape,
        label=label if named or point.is_plan else "",
        title=told + f"{words.number(point.goodput.mean)} tokens/s",
    )


def _around(plan: Interval, gain: Interval) -> tuple[float, float]:
    return plan.mean + gain.low, plan.mean + gain.high


def _table(frontier: Frontier) -> str:
    heads = (
        "Reserve",
        "Marks",
        f"{escape(frontier.tier)} within targets<small>95 % interval</small>",
        "Goodput of all<small>tokens/s</small>",
        "Others' goodput<small>tokens/s</small>",
        "Goodput by value",
        "1M good tokens<small>USD</small>",
        "Goodput forgone<small>USD/h, 95 % interval</small>",
        f"{escape(frontier.tier)} pays<small>USD/h</small>",
    )
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    body = "".join(_table_row(point) for point in frontier.points)
    return tables.box(f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>")


def _table_row(point: Point) -> str:
    reached, forgone = point.attainment, point.forgone_usd_per_hour
    cells = (
        escape(", ".join(marks_of(point))),
        f"{words.percent(reached.mean, 2)} <small>{words.percent(reached.low, 2)} to "
        f"{words.percent(reached.high, 2)}</small>",
        words.number(point.goodput.mean),
        words.number(point.others_goodput.mean),
        words.number(point.weighted_goodput.mean),
        words.dollars(point.usd_per_1m_good_tokens),
        f"{words.signed_dollars(forgone.mean)} <small>"
        f"{words.dollars_between(forgone.low, forgone.high)}</small>",
        words.dollars(point.tier_usd_per_hour),
    )
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{reserve(point.reserve)}</th>{row}</tr>'


def _method(study: ReserveStudy) -> str:
    command = f"<h3>To repeat it</h3><pre><code>{escape(study.command)}</code></pre>"
    return (
        "<ul><li><b>Reserve.</b> A part of three wholes: the KV guarantee of the tier's pool, its "
        "share of the prefill budget, its weight. What is left goes to the others in the plan's "
        "ratios. Points beyond the plan's bounds are what a controller could not set.</li>"
        "<li><b>Goodput.</b> Output tokens of requests within all targets of their tier, over the "
        "time in which the trace arrived.</li>"
        f"<li><b>Intervals.</b> The same draws for every point: {statistics.RESAMPLES:,} times, of "
        f"stretches of {statistics.STRETCH_BINS} of {statistics.BINS} time bins, and of seeds. A "
        "point is beaten where another is no worse in both and better in one beyond chance.</li>"
        "<li><b>Price.</b> Goodput forgone is the part of the engine's cost that the missing "
        "goodput would take at the point with the most.</li></ul>"
        f"{command if study.command else ''}"
    )
