"""What tuning came to, in words, as JSON and as a plan file's text.

It prints nothing and writes no file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from trimtab.engine_bridge.plan import with_values
from trimtab.training.tuning.plan_text import rewrite
from trimtab.training.tuning.space import shown
from trimtab.training.tuning.tune import GIVEN, TUNED, Task, Tuned
from trimtab.training.whatif.schema import jsonable

_SUFFIX = "-tuned"
_LONGEST_NAME = 64


def tuned_text(task: Task, tuned: Tuned, text: str) -> str:
    """The tuned plan as a file: the given one's text with new values and a name of its own.

    Args:
        task: what was to be tuned.
        tuned: what tuning came to.
        text: the given plan's text.
    """
    name = task.plan.name.removesuffix(_SUFFIX)[: _LONGEST_NAME - len(_SUFFIX)] + _SUFFIX
    values = {change.place: shown(change.after) for change in tuned.changes}
    return rewrite(
        text,
        {("name",): name} | values,
        wanted=with_values(tuned.plan, {"name": name}),
        note=note(task, tuned),
    )


def note(task: Task, tuned: Tuned) -> str:
    """Where a tuned plan comes from, for a comment on top of it."""
    traffic = ", ".join(Path(name).name for name in task.traces)
    return "\n".join(
        (
            f"Tuned from plan {task.plan.name} by trimtab tune: {task.spec.name}, {traffic},",
            f"{len(tuned.trials)} trials, seed {task.seed}. {verdict(tuned)}",
        )
    )


def verdict(tuned: Tuned) -> str:
    """What was found, in one or two sentences."""
    tried = f"{len(tuned.trials)} plans were tried"
    if not tuned.changes:
        return f"No better plan was found; {tried}."
    if tuned.gain is None:
        return f"Interrupted; {tried}, and what the best one gains was not measured."
    gain = tuned.gain.attainment
    amount = f"{100 * gain.mean:+.2f} points"
    between = f"95 % interval {100 * gain.ci95[0]:+.2f} to {100 * gain.ci95[1]:+.2f}"
    if tuned.shown:
        return f"Weighted attainment {amount} ({between}) on traffic that the search has not seen."
    return (
        f"No gain is shown: weighted attainment {amount} ({between}) on traffic that the search "
        "has not seen."
    )


def to_json(task: Task, tuned: Tuned, *, written: str, out: Path) -> str:
    """The result for machines (schema 1; shares and gains are fractions).

    Args:
        task: what was to be tuned.
        tuned: what tuning came to.
        written: which plan was written, `GIVEN` or `TUNED`.
        out: where to.
    """
    content = jsonable(_content(task, tuned) | {"written": written, "out": str(out)})
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _content(task: Task, tuned: Tuned) -> dict[str, Any]:
    gain, evaluation = tuned.gain, tuned.evaluation
    measured: dict[str, Any] | None = None
    if gain is not None and evaluation is not None:
        measured = {
            "traces": list(evaluation.traces),
            "seeds": list(evaluation.seeds),
            "given": {
                "weighted_attainment": evaluation.mean(GIVEN),
                "tiers": evaluation.tier_attainment(GIVEN),
            },
            "tuned": {
                "weighted_attainment": evaluation.mean(TUNED),
                "tiers": evaluation.tier_attainment(TUNED),
            },
            "weighted_attainment": dataclasses.asdict(gain.attainment),
            "weighted_goodput_relative": dataclasses.asdict(gain.goodput),
            "tiers": {name: dataclasses.asdict(found) for name, found in gain.tiers.items()},
            "by_trace": dict(gain.by_trace),
        }
    complete = [trial for trial in tuned.trials if not trial.pruned]
    return {
        "schema": 1,
        "engine": task.spec.name,
        "plan": task.plan.name,
        "traces": [{"name": n, "digest": t.digest()} for n, t in task.traces.items()],
        "seed": task.seed,
        "trials": len(tuned.trials),
        "pruned": len(tuned.trials) - len(complete),
        "interrupted": tuned.interrupted,
        "score": {
            "given": tuned.trials[0].score if tuned.trials else math.nan,
            "best": max((trial.score for trial in complete), default=math.nan),
        },
        "changes": [
            {"knob": ".".join(c.place), "from": c.before, "to": c.after} for c in tuned.changes
        ],
        "gain": measured,
        "gain_shown": tuned.shown,
    }
