"""The traffic profile as one HTML file that fetches nothing, the likely cause first."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any, Final

import numpy as np

from trimtab.engine_bridge.pricing import OUTPUT_PRICE, REPEATED_PROMPT_PRICE
from trimtab.training.profile.logged import Logged
from trimtab.training.report import svg, words

_SHOWN_TENANTS: Final = 6
_BINS: Final = 120
_OTHERS: Final = "f7"


def render(logged: Logged, content: Mapping[str, Any]) -> str:
    """The whole page as text.

    Args:
        logged: The requests, for the plot.
        content: What `profile.json` holds.
    """
    window = content["window"]
    when = time.strftime("%d %B %Y %H:%M:%S UTC", time.gmtime(window["since_unix_s"])).lstrip("0")
    engine = (content["alert"] or {}).get("engine", "")
    title = f"Traffic profile{f' of {engine}' if engine else ''}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{window["requests"]:,} requests that arrived within '
        f"{words.duration(window['seconds'])} from {when} on, {_against(content['before'])}.</p>",
        f'<p class="lead">{escape(content["cause"]["sentence"])}</p>',
        _alert(content["alert"]),
        _first_tokens(content["ttft_ms"]),
        "<h2>Demand over time</h2>",
        _demand(logged),
        "<h2>Who</h2>",
        _who(content["who"]),
        "<h2>Lengths</h2>",
        _lengths(content["lengths"]),
        "<h3>The longest prompts</h3>",
        _longest(content["longest"]),
        "<h2>Bursts</h2>",
        _bursts(content["bursts"]),
        "<h2>Prefixes</h2>",
        _prefixes(content["prefixes"]),
        "<h2>What it does not show</h2>",
        _limits(content),
    ]
    css = resources.files("trimtab.training.report").joinpath("report.css")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{css.read_text(encoding='utf-8')}</style></head>\n"
        f"<body><main>\n{chr(10).join(parts)}\n</main></body></html>\n"
    )


def _against(before: Mapping[str, Any]) -> str:
    if not before["requests"]:
        return "with nothing in the log before them"
    return f"against {before['requests']:,} in the {words.duration(before['seconds'])} before them"


def _alert(alert: Mapping[str, Any] | None) -> str:
    if not alert or "tier" not in alert:
        return ""
    p99_ms, usual_ms = float(alert["p99_ttft_ms"]), float(alert["baseline_ms"])
    return (
        f"<p>Made because the P99 time to first token of {escape(str(alert['tier']))} was "
        f"{words.milliseconds(p99_ms)}, {p99_ms / max(usual_ms, 1e-9):.1f} times its "
        f"{words.milliseconds(usual_ms)} of the last hour, for {float(alert['for_s']):.0f} s.</p>"
    )


def _first_tokens(tiers: Mapping[str, Any]) -> str:
    head = ("Time to first token", "P50", "P50 before", "P99", "P99 before")
    body = []
    for tier, sides in tiers.items():
        cells = [
            words.milliseconds(spread[mark]) if (spread := sides[side]) else words.NONE
            for mark in ("p50", "p99")
            for side in ("now", "before")
        ]
        body.append((escape(tier), *cells))
    return _table(head, body)


def _demand(logged: Logged) -> str:
    """Priced tokens a second by tenant, before and in the window."""
    trace = logged.trace
    end_s = logged.before_s + logged.window_s
    fresh = trace.prompt_tokens - (1.0 - REPEATED_PROMPT_PRICE) * logged.cached_tokens
    weights = fresh + OUTPUT_PRICE * trace.output_tokens
    edges = np.linspace(0.0, end_s, _BINS + 1)
    now = logged.in_window
    by_tenant = np.bincount(trace.tenant[now], weights[now], len(trace.tenant_names))
    shown = [i for i in np.argsort(-by_tenant, kind="stable")[:_SHOWN_TENANTS] if by_tenant[i] > 0]
    columns = [_binned(logged, weights, trace.tenant == i, edges) for i in shown]
    rest = _binned(logged, weights, ~np.isin(trace.tenant, shown), edges)
    layers = [svg.Line(values=column, css=f"f{n}") for n, column in enumerate(columns)]
    layers.append(svg.Line(values=rest, css=_OTHERS))
    chart = svg.area_chart(
        title="Demand over time",
        description="Priced tokens a second by tenant, stacked; the line is the window's start.",
        time_s=(edges[:-1] + edges[1:]) / 2,
        end_s=end_s,
        axis=svg.linear_axis(float(np.sum([*columns, rest], axis=0).max())),
        layers=layers,
        marks_s=[logged.before_s] if logged.before_s else [],
    )
    key = [(trace.tenant_names[i], f"f{n}") for n, i in enumerate(shown)]
    key += [("others", _OTHERS)] if rest.any() else []
    return (
        f'<p class="soft">Priced tokens a second: fresh prompt + {REPEATED_PROMPT_PRICE:g} &times; '
        f"cached prompt + {OUTPUT_PRICE:g} &times; output, by arrival. The upright line is where "
        f"the window begins.</p>{svg.legend(key)}"
        f'<div class="plots wide"><figure>{chart}</figure></div>'
    )


def _binned(logged: Logged, weights: Any, rows: Any, edges: Any) -> Any:
    sums, _ = np.histogram(logged.trace.arrival_s[rows], edges, weights=weights[rows])
    return sums / (edges[1] - edges[0])


def _who(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("Tenant", "Tier", "Requests/s", "before", "Share of demand", "before", "Prompt",
            "Answer", "Cached")  # fmt: skip
    body = []
    for row in rows:
        before = row["before"]
        body.append(
            (
                escape(row["tenant"]),
                escape(row["tier"]),
                words.figures(row["requests_per_s"]),
                words.figures(before["requests_per_s"]) if before else words.NONE,
                words.percent(row["demand_share"], 0),
                words.percent(before["demand_share"], 0) if before else words.NONE,
                f"{row['prompt_tokens_mean']:,.0f}",
                f"{row['output_tokens_mean']:,.0f}",
                words.percent(row["cached_share"], 0),
            )
        )
    note = '<p class="soft">Prompt and answer are means, in tokens; the heaviest come first.</p>'
    return note + _table(head, body)


def _lengths(tiers: Mapping[str, Any]) -> str:
    head = ("Tier", "Tokens", "P50", "P90", "P99", "Longest", "P50 before", "P90 before",
            "P99 before", "Longest before")  # fmt: skip
    marks = ("p50", "p90", "p99", "max")
    body = []
    for tier, kinds in tiers.items():
        for kind, name in (("prompt_tokens", "prompt"), ("output_tokens", "answer")):
            cells = [
                f"{spread[mark]:,.0f}" if spread else words.NONE
                for spread in (kinds[kind]["now"], kinds[kind]["before"])
                for mark in marks
            ]
            body.append((escape(tier), name, *cells))
    return _table(head, body)


def _longest(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("Tenant", "Tier", "Prompt", "Cached", "Answer", "Arrived after", "TTFT", "Outcome")
    body = [
        (
            escape(row["tenant"]),
            escape(row["tier"]),
            f"{row['prompt_tokens']:,}",
            f"{row['cached_tokens']:,}",
            f"{row['output_tokens']:,}",
            f"{row['after_s']:.1f} s",
            words.NONE if row["ttft_s"] is None else words.milliseconds(row["ttft_s"] * 1e3),
            escape(row["outcome"]),
        )
        for row in rows
    ]
    return _table(head, body)


def _bursts(bursts: Mapping[str, Any]) -> str:
    head = ("Tenant", "Mean/s", "Peak of 1 s", "over mean", "Peak/s of 10 s", "over mean")
    entries = [("all", bursts["all"]), *((escape(k), v) for k, v in bursts["tenants"].items())]
    body = [
        (
            name,
            words.figures(peaks["mean_per_s"]),
            words.figures(peaks["peak_1s_per_s"]),
            f"{peaks['peak_1s_over_mean']:.1f}",
            words.figures(peaks["peak_10s_per_s"]),
            f"{peaks['peak_10s_over_mean']:.1f}",
        )
        for name, peaks in entries
    ]
    note = '<p class="soft">Arrivals in the window; tenants with few requests are left out.</p>'
    return note + _table(head, body)


def _prefixes(prefixes: Mapping[str, Any]) -> str:
    def share(value: float | None) -> str:
        return words.NONE if value is None else words.percent(value, 0)

    now, before = prefixes["now"], prefixes["before"]
    shares = _table(
        ("Prompt tokens", "Now", "Before"),
        [
            ("sent before", share(now["repeated_share"]), share(before["repeated_share"])),
            ("found in the cache", share(now["cached_share"]), share(before["cached_share"])),
        ],
    )
    if not prefixes["top"]:
        return f"{shares}<p>No two requests of the window begin alike.</p>"
    top = _table(
        ("Shared prefix", "Requests", "Tokens", "Tenants", "Tiers"),
        [
            (
                f"#{number}",
                f"{prefix['requests']:,}",
                f"{prefix['tokens']:,}",
                str(prefix["tenants"]) if prefix["tenant"] is None else escape(prefix["tenant"]),
                escape(", ".join(prefix["tiers"])),
            )
            for number, prefix in enumerate(prefixes["top"], start=1)
        ],
    )
    return (
        f"{shares}<h3>What is shared most</h3>"
        '<p class="soft">The longest beginning that at least half of the requests with the same '
        f"first block have in common. No content is known here.</p>{top}"
    )


def _limits(content: Mapping[str, Any]) -> str:
    lines = [
        "A request is in the log when it has ended. What was still waiting or running when the "
        "profile was made is not in it, so that the last seconds show less than came.",
        "The cause is arithmetic on demand, not proof: what grew most when the tier became slow.",
    ]
    alert = content["alert"] or {}
    for key, what in (("waiting", "waited"), ("running", "ran")):
        counts = alert.get(key)
        if isinstance(counts, Mapping) and any(counts.values()):
            told = ", ".join(f"{count:,} of {tier}" for tier, count in counts.items() if count)
            lines.append(f"When the profile was made, these requests {what}: {escape(told)}.")
    if content["window"]["lost_rows"]:
        lost = f"{content['window']['lost_rows']:,}"
        lines.append(f"The log lost {lost} requests in this time: its disk was too slow or full.")
    ends = content["window"]["outcomes"]
    told = ", ".join(f"{count:,} {name}" for name, count in ends.items())
    lines.append(f"Outcomes of the window's requests: {escape(told)}.")
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="box"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )
