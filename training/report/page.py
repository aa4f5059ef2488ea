"""The what-if report: one HTML file that fetches nothing, verdict first.

Its bytes depend on the result only: no clock, no random ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from trimtab.engine_bridge import pricing
from trimtab.training.report import economics, plots, tables, words
from trimtab.training.report.verdict import Verdict, verdict
from trimtab.training.whatif import statistics, variation
from trimtab.training.whatif.compare import reference_label
from trimtab.training.whatif.run import Outcome
from trimtab.training.whatif.schema import WhatIfResult

_UNIT = re.compile(r"(?<=\d) (?=(?:%|s|ms|min|h|points)\b|%)")
"""The space between a number and its unit, at which no line may break."""


def render(outcome: Outcome) -> str:
    """The whole page as text."""
    result = outcome.result
    several = len(result.policies) > 1
    parts = [
        _top(result),
        _verdict(verdict(result), [tier.name for tier in result.tiers]),
        '<h2 id="overview">Who kept which promise</h2>',
        f'<p class="soft">Share of requests within all targets of their tier{_mean_note(result)}. '
        f"{tables.STAR} best of all, {tables.KEPT} promise kept, {tables.MISSED} promise missed. "
        "Refused, lost and unfinished requests count as not served.</p>",
        tables.overview(result),
        '<h2 id="time">Over time</h2>',
        _time(outcome),
    ]
    if several:
        parts += [
            '<h2 id="differences">Differences</h2>',
            '<p class="soft">Paired: the same arrivals under both. In the strips (square-root '
            "scale) right of the middle is better; an interval that touches the middle may be "
            "chance. A P99 TTFT is of the requests that got a first token, so refusing many can "
            "make it short.</p>",
            tables.difference_table(result),
        ]
    parts += [
        '<h2 id="economics">What it cost</h2>',
        economics.section(result),
        '<h2 id="figures">All figures</h2>',
        tables.details(result),
        '<h2 id="method">Method</h2>',
        _method(outcome),
    ]
    return document(f"What-if: {' vs '.join(result.policies)} on {result.engine}", parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page around its parts, with the style sheet inside."""
    css = resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    body = _UNIT.sub("\N{NO-BREAK SPACE}", chr(10).join(parts))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{css}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _top(result: WhatIfResult) -> str:
    trace = result.trace
    links = [("overview", "Promises"), ("time", "Over time")]
    if len(result.policies) > 1:
        links.append(("differences", "Differences"))
    links += [("economics", "Cost"), ("figures", "All figures"), ("method", "Method")]
    nav = "".join(f'<a href="#{anchor}">{text}</a>' for anchor, text in links)
    return (
        f"<h1>What if: {escape(', '.join(result.policies))}</h1>"
        f'<p class="soft">{trace.requests:,} requests over {words.duration(trace.duration_s)} on '
        f"{escape(result.engine)} under plan {escape(result.plan)}; they ask for about "
        f"{trace.offered_load:.0%} of what the engine can do.</p><nav>{nav}</nav>"
    )


def _verdict(found: Verdict, tiers: Sequence[str]) -> str:
    lines = []
    for text in (*found.others, *found.tiers, *found.costs, *found.guards):
        lead = next((name for name in tiers if text.startswith(f"{name} (")), "")
        bold = f"<b>{escape(lead)}</b>" if lead else ""
        lines.append(f"<li>{bold}{escape(text.removeprefix(lead))}</li>")
    return f'<p class="lead">{escape(found.headline)}</p><ul>{"".join(lines)}</ul>'


def _time(outcome: Outcome) -> str:
    seed = outcome.study.seeds[0]
    which = f" Seed {seed} is shown." if len(outcome.study.seeds) > 1 else ""
    return (
        '<p class="soft">Time runs from the start of the trace; plots of one kind share their '
        f"axes.{which}</p>"
        "<h3>Offered load</h3>"
        '<p class="soft">Engine time that arrivals ask for, as a share of what the engine can do.'
        f"</p>{plots.load_plot(outcome)}"
        "<h3>Queue</h3>"
        '<p class="soft">Waiting requests; the scale is logarithmic, so that short queues show.</p>'
        f"{plots.queue_plots(outcome)}"
        f"<h3>Attainment</h3>{plots.attainment_plots(outcome)}"
        "<h3>Allocation against the static plan</h3>"
        f"{plots.allocation_plots(outcome)}"
        "<h3>KV cache</h3>"
        '<p class="soft">Blocks that running requests hold; what is cached but idle is not '
        f"counted.</p>{plots.kv_plots(outcome)}"
    )


def _method(outcome: Outcome) -> str:
    result = outcome.result
    seeds = result.seeds
    if len(seeds) == 1:
        drawn = (
            f"The trace was cut into {statistics.BINS} time bins; stretches of "
            f"{statistics.STRETCH_BINS} bins were drawn with replacement, the same for both sides"
        )
    else:
        drawn = (
            f"Seeds were drawn with replacement, and inside each stretches of "
            f"{statistics.STRETCH_BINS} of {statistics.BINS} time bins, the same for both sides"
        )
    recorded = "Seed 0 is the trace as recorded. " if 0 in seeds else ""
    against = escape(reference_label(result.policies))
    listed = ", ".join(map(str, seeds))
    return (
        "<ul>"
        f"<li><b>Paired.</b> Every contender saw the same arrivals on seed{'s'[: len(seeds) > 1]} "
        f"{listed}. {recorded}Other seeds move each tenant's stream by up to "
        f"{variation.TENANT_OFFSET_S:g} s and each session by up to "
        f"{variation.SESSION_JITTER_S:g} s more, so that bursts meet otherwise.</li>"
        f"<li><b>Intervals.</b> {drawn}, {statistics.RESAMPLES:,} times "
        f"({statistics.QUANTILE_RESAMPLES} for quantiles). Differences are against {against}.</li>"
        "<li><b>Weighted attainment.</b> Demand is tier value &times; (fresh prompt tokens + "
        f"{pricing.REPEATED_PROMPT_PRICE:g} &times; prompt tokens seen before in the trace + "
        f"{pricing.OUTPUT_PRICE:g} &times; output tokens) / 1000; it is served if the request "
        "ended within every target of its tier.</li>"
        f"<li><b>Drain.</b> After the last arrival a run went on until all requests had ended, for "
        f"at most {words.duration(result.drain_s)}. Rates are over the time in which the trace "
        "arrived.</li>"
        "<li><b>Engine.</b> A simulation of each scheduler step; its step times come from a model "
        "of the engine, whose fit is stated below. It is not a measurement of your machines.</li>"
        f"</ul><dl>{_facts(result)}</dl>{_fidelity(result)}{_command(result)}"
    )


def _facts(result: WhatIfResult) -> str:
    rows = {
        "Trace": f"<code>{escape(result.trace.digest[:16])}</code>, "
        f"{result.trace.requests:,} requests",
        "Engine": f"{escape(result.engine)} ("
        + escape(", ".join(f"{key} {value}" for key, value in result.engine_limits.items()))
        + ")",
        "Runs": ", ".join(
            f"{escape(run.policy)} seed {run.seed} <code>{escape(run.engine.digest[:12])}</code>"
            for run in result.results
        ),
    }
    if result.trace.notes:
        rows["Notes on the trace"] = escape(" ".join(result.trace.notes))
    return "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in rows.items())


def _fidelity(result: WhatIfResult) -> str:
    if not result.fidelity:
        return ""
    return f"<h3>Fidelity of the step-time model</h3><dl>{_entries(result.fidelity)}</dl>"


def _entries(facts: Mapping[str, Any]) -> str:
    return "".join(f"<dt>{escape(str(k))}</dt><dd>{_told(v)}</dd>" for k, v in facts.items())


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{escape(str(k))}: {_told(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_told(item) for item in value)
    return escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def _command(result: WhatIfResult) -> str:
    if not result.command:
        return ""
    return f"<h3>To repeat it</h3><pre><code>{escape(result.command)}</code></pre>"


def _mean_note(result: WhatIfResult) -> str:
    return f", mean of {len(result.seeds)} seeds" if len(result.seeds) > 1 else ""
