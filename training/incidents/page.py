"""The incidents as one HTML file that fetches nothing, the verdicts first."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources

import numpy as np

from trimtab.training.incidents import table, words
from trimtab.training.incidents.incident import IncidentRun, Verdict
from trimtab.training.incidents.served import FloatArray
from trimtab.training.incidents.suite import SuiteResult
from trimtab.training.report import svg

_BINS = 60
_UNIT = re.compile(r"(?<=\d) (?=(?:%|s|ms|times)\b|%)")
"""The space between a number and its unit, at which no line may break."""


def render(result: SuiteResult) -> str:
    """The whole page as text; equal results give equal bytes."""
    parts = [
        f"<h1>Incidents on {escape(_ENGINES[result.engine])}</h1>",
        '<p class="soft">Each incident is a script of traffic, served by stock vLLM\'s rules '
        f"(before) and by Trimtab (after). Seed {result.seed}.</p>",
        _overview(result),
    ]
    for verdict in result.verdicts:
        parts += _incident(verdict)
    css = resources.files("trimtab.training.report").joinpath("report.css")
    body = _UNIT.sub("\N{NO-BREAK SPACE}", chr(10).join(parts))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Incidents</title><style>{css.read_text(encoding='utf-8')}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


_ENGINES = {"replay": "the replay", "emulated": "vLLM's own scheduler in virtual time"}


def _overview(result: SuiteResult) -> str:
    lines = []
    for verdict in result.verdicts:
        incident = verdict.incident
        well = verdict.reproduced and verdict.cured
        mark = "kept" if well else "miss"
        text = table.verdict_words(verdict).replace("**", "")
        lines.append(
            f'<li><a href="#{incident.key}">{incident.key}. {escape(incident.title)}</a>: '
            f'<b class="{mark}">{escape(text)}</b></li>'
        )
    return f"<ul>{''.join(lines)}</ul>"


def _incident(verdict: Verdict) -> list[str]:
    incident, run = verdict.incident, verdict.runs[verdict.incident.shown[0]]
    spec = run.spec
    return [
        f'<h2 id="{incident.key}">{incident.key}. {escape(incident.title)}</h2>',
        f'<p class="lead">{escape(words.sentence(verdict))}</p>',
        f"<dl><dt>Published</dt><dd>{escape(incident.symptom)}</dd>"
        f"<dt>Traffic</dt><dd>{escape(incident.traffic)}</dd>"
        f"<dt>Engine</dt><dd>{escape(spec.name)}, {spec.num_gpu_blocks:,} KV blocks, "
        f"{spec.max_num_batched_tokens:,} tokens and {spec.max_num_seqs} requests a step</dd>"
        f"<dt>Cure</dt><dd>{escape(incident.remedy).replace('`', '')}</dd></dl>",
        _figures(verdict),
        *_plots(verdict),
    ]


def _figures(verdict: Verdict) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.HEADS)
    body = []
    for finding, row in zip(verdict.findings, table.rows(verdict), strict=True):
        held = {words.YES: "kept", words.NO: "miss"}.get(row[-1], "soft")
        cells = "".join(f"<td>{escape(text)}</td>" for text in row[1:-1])
        why = f'<br><span class="soft">{escape(finding.figure.why)}</span>'
        body.append(
            f'<tr><th scope="row">{escape(row[0])}{why}</th>{cells}'
            f'<td class="{held}">{escape(row[-1].replace("**", ""))}</td></tr>'
        )
    return (
        f'<div class="box" tabindex="0"><table class="long"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _plots(verdict: Verdict) -> list[str]:
    runs = {label: verdict.runs[label] for label in verdict.incident.shown}
    end_s = max(run.served.end_s for run in runs.values())
    plan = next(iter(runs.values())).plan
    present = sorted({int(t) for run in runs.values() for t in run.trace.tier})
    tiers = svg.legend([(plan.tier_names[i], f"s{i}") for i in present])
    axis = _log_axis(max(float(np.nanmax(run.served.ttft_s)) for run in runs.values()))
    used = [p for p in range(len(plan.pools)) if any(plan.pool_of_tier[i] == p for i in present)]
    pools = svg.legend([(plan.pool_names[p], f"f{plan.pool_of_tier.index(p)}") for p in used])
    parts = [
        "<h3>Time to first token</h3>"
        '<p class="soft">The slowest of the requests that arrived in each sixtieth of the run; the '
        "scale is logarithmic.</p>" + tiers,
        _row(runs, lambda name, run: _latency(name, run, present, end_s, axis)),
        "<h3>KV cache</h3>"
        '<p class="soft">Blocks that running requests of each pool hold, of all.</p>' + pools,
        _row(runs, lambda name, run: _kv(name, run, used, end_s)),
    ]
    most = _most_lost(runs)
    if most:
        parts += [
            "<h3>Evictions</h3>"
            '<p class="soft">Running requests that lost their place, since the start.</p>' + tiers,
            _row(runs, lambda name, run: _lost(name, run, present, end_s, most)),
        ]
    return parts


def _row(runs: dict[str, IncidentRun], plot: Callable[[str, IncidentRun], str]) -> str:
    figures = [
        f"<figure><figcaption>{escape(label)}</figcaption>{plot(label, run)}</figure>"
        for label, run in runs.items()
    ]
    return f'<div class="plots wide">{"".join(figures)}</div>'


def _log_axis(slowest_s: float) -> svg.Axis:
    """From ten milliseconds to the power of ten above the slowest."""
    top = max(0, math.ceil(math.log10(slowest_s)))
    names = {-2: "0.01 s", -1: "0.1 s"}
    ticks = tuple((10.0**p, names.get(p, f"{10 ** max(p, 0):,} s")) for p in range(-2, top + 1))
    return svg.Axis(low=0.01, high=10.0**top, ticks=ticks, scale=np.log10)


def _most_lost(runs: dict[str, IncidentRun]) -> float:
    return max(float(run.served.timeline.preemptions.sum(0).max()) for run in runs.values())


def _latency(
    name: str, run: IncidentRun, tiers: Sequence[int], end_s: float, axis: svg.Axis
) -> str:
    width_s = end_s / _BINS
    place = np.minimum((run.served.requests["arrival_s"] / width_s).astype(np.int64), _BINS - 1)
    lines = []
    for tier in reversed(tiers):
        rows = (run.served.requests["tier"] == tier) & np.isfinite(run.served.ttft_s)
        slowest = np.full(_BINS, -np.inf)
        np.maximum.at(slowest, place[rows], run.served.ttft_s[rows])
        lines.append(svg.Line(values=_gaps(slowest), css=f"s{tier}"))
    return svg.line_chart(
        title=f"{name}: slowest time to first token",
        description="The slowest of the requests that arrived in each bin, by tier.",
        time_s=np.asarray((np.arange(_BINS) + 0.5) * width_s, np.float64),
        end_s=end_s,
        axis=axis,
        lines=lines,
    )


def _gaps(values: FloatArray) -> FloatArray:
    """Bins without a request leave a gap."""
    return np.where(np.isfinite(values), values, np.nan)


def _kv(name: str, run: IncidentRun, pools: Sequence[int], end_s: float) -> str:
    line = run.served.timeline
    layers = [
        svg.Line(values=line.kv_fraction[:, pool], css=f"f{run.plan.pool_of_tier.index(pool)}")
        for pool in pools
    ]
    return svg.area_chart(
        title=f"{name}: KV cache in use",
        description="KV blocks that running requests hold, as a share of all, stacked by pool.",
        time_s=line.time_s,
        end_s=end_s,
        axis=svg.linear_axis(1.0, percent=True),
        layers=layers,
    )


def _lost(name: str, run: IncidentRun, tiers: Sequence[int], end_s: float, most: float) -> str:
    line = run.served.timeline
    total = np.cumsum(line.preemptions, axis=0)
    return svg.line_chart(
        title=f"{name}: evictions since the start",
        description="Running requests that lost their place, summed up, by tier.",
        time_s=line.time_s,
        end_s=end_s,
        axis=svg.linear_axis(max(most, 4.0)),
        lines=[
            svg.Line(values=total[:, tier], css=f"s{tier}", stepped=True)
            for tier in reversed(tiers)
        ],
    )
