"""The plots of the report: the load once, then each view of every contender on common axes."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.plan import Plan
from trimtab.training.report import svg
from trimtab.training.whatif.run import Outcome, Run

FloatArray = npt.NDArray[np.float64]

_MOVED = 1e-9


def load_plot(outcome: Outcome) -> str:
    """Offered load by tier, stacked, as a share of what the engine can do."""
    load, tiers = outcome.load, outcome.study.plan.tier_names
    present = [i for i in range(len(tiers)) if load.by_tier[:, i].any()]
    axis = svg.linear_axis(max(1.05, float(load.by_tier.sum(1).max())), percent=True)
    chart = svg.area_chart(
        title="Offered load over time",
        description="Engine time that the arriving requests ask for, as a share of capacity, "
        f"stacked by tier; mean {outcome.result.trace.offered_load:.0%}.",
        time_s=load.time_s,
        end_s=outcome.study.trace.duration_s,
        axis=axis,
        layers=[svg.Line(values=load.by_tier[:, i], css=f"f{i}") for i in present],
        rules=[svg.Rule(value=1.0, label="capacity")],
    )
    key = svg.legend([(tiers[i], f"f{i}") for i in present])
    return f'{key}<div class="plots wide"><figure>{chart}</figure></div>'


def queue_plots(outcome: Outcome) -> str:
    """Waiting requests by tier."""
    runs = shown_runs(outcome)
    highest = max(float(run.series.queue.max(initial=0.0)) for run in runs)
    return _by_tier(
        outcome, "Waiting requests", svg.log1p_axis(highest), lambda run: run.series.queue
    )


def attainment_plots(outcome: Outcome) -> str:
    """Share of arrivals within targets by tier."""
    end_s = outcome.study.trace.duration_s
    bins = len(shown_runs(outcome)[0].series.attainment)
    time_s = (np.arange(bins) + 0.5) * end_s / bins
    return _by_tier(
        outcome,
        "Share within targets, by arrival",
        svg.linear_axis(1.0, percent=True),
        lambda run: run.series.attainment,
        time_s=time_s,
        end_s=end_s,
    )


def allocation_plots(outcome: Outcome) -> str:
    """Weights, budget and KV fractions over the static ones, where they ever moved."""
    moving = [run for run in shown_runs(outcome) if _moves(run)]
    still = [run.label for run in shown_runs(outcome) if not _moves(run)]
    note = ""
    if still:
        labels = escape(", ".join(still))
        note = f'<p class="soft">Held the static allocation throughout: {labels}.</p>'
    if not moving:
        return note
    plan = outcome.study.plan
    all_moves = np.concatenate([_all_moves(run).ravel() for run in moving])
    axis = svg.ratio_axis(float(all_moves.min()), float(all_moves.max()))
    key = [("prefill budget", "sb")]
    key += [(f"weight {name}", f"s{i}") for i, name in enumerate(plan.tiers)]
    pools = [(f"KV of {name}", f"s{_first_tier(plan, i)}") for i, name in enumerate(plan.pools)]
    figures = []
    for run in moving:
        knobs = np.concatenate([run.series.budget[:, None], run.series.weights], axis=1)
        for title, columns, entries in (
            ("budget and weights", knobs, key),
            ("KV fractions", run.series.kv_moves, pools),
        ):
            chart = svg.line_chart(
                title=f"{run.label}: {title}, over the static plan's",
                description="Factor by which the policy has moved each knob; 1 is the static plan.",
                time_s=run.series.time_s,
                end_s=_end_s(outcome),
                axis=axis,
                lines=[
                    svg.Line(values=columns[:, i], css=css, stepped=True)
                    for i, (_, css) in reversed(list(enumerate(entries)))
                ],
                rules=[svg.Rule(value=1.0)],
            )
            figures.append(_figure(run.label, chart, title))
    return f'{note}{svg.legend([*key, *pools])}<div class="plots">{"".join(figures)}</div>'


def kv_plots(outcome: Outcome) -> str:
    """KV blocks of running requests by pool, stacked, as a share of all blocks."""
    plan = outcome.study.plan
    names = [
        f"{pool} ({', '.join(t for t, tier in plan.tiers.items() if tier.pool == pool)})"
        for pool in plan.pools
    ]
    highest = max(
        float(run.series.kv_fraction.sum(1).max(initial=0)) for run in shown_runs(outcome)
    )
    axis = svg.linear_axis(max(0.05, min(1.0, highest)), percent=True)
    figures = []
    for run in shown_runs(outcome):
        layers = [
            svg.Line(values=run.series.kv_fraction[:, i], css=f"f{_first_tier(plan, i)}")
            for i in range(len(names))
        ]
        chart = svg.area_chart(
            title=f"{run.label}: KV cache in use",
            description="KV blocks that running requests hold, as a share of all, stacked by pool.",
            time_s=run.series.time_s,
            end_s=_end_s(outcome),
            axis=axis,
            layers=layers,
        )
        figures.append(_figure(run.label, chart))
    key = svg.legend([(name, f"f{_first_tier(plan, i)}") for i, name in enumerate(names)])
    return f'{key}<div class="plots">{"".join(figures)}</div>'


def shown_runs(outcome: Outcome) -> list[Run]:
    """The runs that are plotted: each contender's on the first seed."""
    return [run for run in outcome.runs if run.seed == outcome.study.seeds[0]]


def _by_tier(
    outcome: Outcome,
    title: str,
    axis: svg.Axis,
    values: Callable[[Run], FloatArray],
    *,
    time_s: FloatArray | None = None,
    end_s: float | None = None,
) -> str:
    tiers = outcome.study.plan.tier_names
    used = set(outcome.study.trace.tier_names)
    present = [i for i, name in enumerate(tiers) if name in used]
    figures = []
    for run in shown_runs(outcome):
        columns = values(run)
        chart = svg.line_chart(
            title=f"{run.label}: {title.lower()}",
            description=f"{title} over time, one line a tier.",
            time_s=run.series.time_s if time_s is None else time_s,
            end_s=end_s or _end_s(outcome),
            axis=axis,
            # The first tier is drawn last, on top of the others.
            lines=[svg.Line(values=columns[:, i], css=f"s{i}") for i in reversed(present)],
        )
        figures.append(_figure(run.label, chart))
    key = svg.legend([(tiers[i], f"s{i}") for i in present])
    return f'{key}<div class="plots">{"".join(figures)}</div>'


def _figure(label: str, chart: str, more: str = "") -> str:
    small = f" <small>{escape(more)}</small>" if more else ""
    return f"<figure><figcaption>{escape(label)}{small}</figcaption>{chart}</figure>"


def _first_tier(plan: Plan, pool: int) -> int:
    """A pool wears the colour of its first tier."""
    return plan.pool_of_tier.index(pool)


def _all_moves(run: Run) -> FloatArray:
    s = run.series
    return np.concatenate([s.weights, s.kv_moves, s.budget[:, None]], axis=1)


def _moves(run: Run) -> bool:
    moves = _all_moves(run)
    return bool(len(moves)) and bool(np.any(np.abs(moves - 1.0) > _MOVED))


def _end_s(outcome: Outcome) -> float:
    """Where the common time axis ends: when the last run shown did."""
    return max(run.result.engine.end_s for run in shown_runs(outcome))
