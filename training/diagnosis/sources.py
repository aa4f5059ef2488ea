"""What can be diagnosed: a what-if's JSON, an engine's traffic log, an engine's metrics page.

Each gives signs, and the plan and engine that they belong to. It judges nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.errors import FlagError, InputError, did_you_mean
from trimtab.engine_bridge.live.assemble import Assembler
from trimtab.engine_bridge.live.snapshot import MetricSource
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.training.diagnosis.live_signs import live_signs
from trimtab.training.diagnosis.observed import of_log
from trimtab.training.diagnosis.signs import Signs, signs_from_json, signs_of
from trimtab.training.whatif.drafting import with_draft_lengths

READ_EVERY_S: Final = 5.0
"""Time between two looks at a metrics page, seconds."""


class DiagnosisError(InputError):
    """What was given cannot be diagnosed."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a source holds."""

    signs: Signs
    spec: EngineSpec
    plan: Plan
    """The plan that ran: with the draft lengths that a what-if gives to a plan without any."""
    told: str
    """What it is, for people."""


def from_whatif(
    path: Path, plan: Plan, *, policy: str | None, seed: int, engine: str | None
) -> Found:
    """One run of a what-if.

    Args:
        path: What `trimtab whatif --json` wrote.
        plan: The plan that it ran under.
        policy: Label of the contender; None: the first.
        seed: The seed.
        engine: Name or file of the engine; None: as the JSON names it.

    Raises:
        DiagnosisError: the file is no such JSON, of another plan, or holds no such run.
        EngineSpecError: there is no such engine.
    """
    try:
        return _from_whatif(path, plan, policy=policy, seed=seed, engine=engine)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DiagnosisError(
            str(path),
            value=f"{type(error).__name__}: {error}",
            bound="the JSON of trimtab whatif --json of this version",
            remedy="run the what-if again",
        ) from error


def _from_whatif(
    path: Path, plan: Plan, *, policy: str | None, seed: int, engine: str | None
) -> Found:
    content = _read(path)
    if content["plan"] != plan.name:
        raise DiagnosisError(
            str(path),
            key="plan",
            value=content["plan"],
            bound=f"the plan to judge by, {plan.name}",
            remedy="give the what-if's plan with --plan",
        )
    labels = list(dict.fromkeys(str(run["policy"]) for run in content["results"]))
    label = labels[0] if policy is None else policy
    if label not in labels:
        raise FlagError(
            "--policy",
            value=label,
            bound=f"one of {', '.join(labels)}",
            remedy=did_you_mean(label, labels),
        )
    seeds = [int(run["seed"]) for run in content["results"] if run["policy"] == label]
    if seed not in seeds:
        raise FlagError("--seed", value=seed, bound=f"one of {', '.join(map(str, seeds))}")
    run = next(r for r in content["results"] if r["policy"] == label and r["seed"] == seed)
    if not run.get("signs"):
        raise DiagnosisError(
            str(path),
            key=f"results: {label}: signs",
            value=None,
            bound="the run's signs",
            remedy="run the what-if again with this version",
        )
    spec = _engine_of(content, engine)
    signs = signs_from_json(run["signs"])
    if tuple(signs.tiers) != plan.tier_names:
        raise DiagnosisError(
            str(path),
            key=f"results: {label}: signs: tiers",
            value=", ".join(signs.tiers),
            bound=f"those of plan {plan.name}, {', '.join(plan.tier_names)}",
            remedy="give the plan as it was, or run the what-if again",
        )
    told = f"{path.name}: {label}" + (f", seed {seed}" if len(seeds) > 1 else "")
    return Found(signs=signs, spec=spec, plan=with_draft_lengths(plan, spec), told=told)


def _engine_of(content: dict[str, Any], engine: str | None) -> EngineSpec:
    """The engine that a what-if ran, with its limits and its draft model."""
    spec = get_engine_spec(content["engine"] if engine is None else engine)
    spec = spec.with_limits(**content["engine_limits"])
    draft = content["draft"]
    if draft is not None:
        pairs = tuple((str(tier), float(share)) for tier, share in draft["acceptance"])
        draft = DraftSpec(**{**draft, "acceptance": pairs})
    return replace(spec, draft=draft)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        known = {name: content[name] for name in ("schema", "plan", "engine", "results")}
    except (ValueError, KeyError, TypeError) as error:
        raise DiagnosisError(
            str(path), bound="the JSON of trimtab whatif --json", remedy="name such a file"
        ) from error
    if known["schema"] != 1 or not known["results"]:
        raise DiagnosisError(
            str(path), key="schema", value=known["schema"], bound="1, with results"
        )
    return {"engine_limits": {}, "draft": None, **content}


def from_log(
    folder: Path, plan: Plan, spec: EngineSpec, *, since_unix_s: float | None, window_s: float
) -> Found:
    """A stretch of an engine's traffic log.

    Args:
        folder: The log's folder.
        plan: The engine's plan.
        spec: The engine.
        since_unix_s: Start of the stretch, seconds since 1970; None: it ends with the newest
            request.
        window_s: Its length, seconds.

    Raises:
        TraceError: there is no such log, or nothing arrived in that time.
        PlanError: the log has a tier that the plan lacks.
    """
    from trimtab.training.profile.logged import read_logged

    logged = read_logged(folder, since_unix_s=since_unix_s, window_s=window_s, before_s=0.0)
    signs = signs_of(of_log(logged, plan), plan, spec, fair_rules=True)
    told = f"{folder.name}: {signs.requests:,} requests"
    return Found(signs=signs, spec=spec, plan=plan, told=told)


def from_metrics(
    source: MetricSource,
    plan: Plan,
    spec: EngineSpec,
    *,
    window_s: float,
    wait: Callable[[float], None] = time.sleep,
) -> Found:
    """An engine as it is now, watched for a while.

    Args:
        source: Its metrics.
        plan: Its plan.
        spec: The engine.
        window_s: How long to watch, seconds.
        wait: Waits so many seconds.

    Raises:
        TelemetryUnavailableError: the page cannot be read.
        DiagnosisError: nothing arrived in that time.
    """
    assembler = Assembler(plan)
    seen: list[Telemetry] = []
    left_s = window_s
    assembler.take(source.read())
    while left_s > 0:
        wait(min(READ_EVERY_S, left_s))
        left_s -= READ_EVERY_S
        if assembler.take(source.read()).fresh and assembler.latest is not None:
            seen.append(assembler.latest)
    try:
        signs = live_signs(seen, plan, spec)
    except ValueError:
        raise DiagnosisError(
            source.place,
            value=f"no request in {window_s:g} s",
            bound="an engine with traffic",
            remedy="watch it for longer with --seconds",
        ) from None
    told = f"{source.place}: {window_s:g} s of metrics"
    return Found(signs=signs, spec=spec, plan=plan, told=told)
