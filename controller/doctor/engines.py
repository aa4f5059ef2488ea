"""Looks at running engines as the controller would: control socket, figures, folders.

It takes the settings of `trimtab run` and asks what the daemon asks: no lease, no orders.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from trimtab.controller.daemon import parts
from trimtab.controller.daemon.daemon import Daemon
from trimtab.controller.daemon.settings import DaemonSettings, PrometheusSettings
from trimtab.controller.doctor import prometheus as prometheus_of
from trimtab.controller.doctor.finding import ODD_ANSWER, Finding, Verdict, fault_of
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.errors import TrimtabError
from trimtab.engine_bridge.live.live_engine import LiveEngine
from trimtab.engine_bridge.live.reading import ControlView, Reading
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.vllm.control_client import ControlClient

AREA: Final = "controller"
_OLD_INTERVALS: Final = 2.0
"""Figures that are older than so many intervals make the guard keep still."""
_SOME: Final = 1.2
"""So many intervals are waited for a new one."""
_BLOCKS_OFF: Final = 0.1
"""A KV cache that differs from the engine file's by more than this part misleads what-ifs."""
_HOLDER: Final = "trimtab doctor"


def look(
    settings: DaemonSettings, *, wait: Callable[[float], object], timeout_s: float
) -> Iterator[Finding]:
    """Everything about the controller's settings and its engines.

    Args:
        settings: As `trimtab run` reads them.
        wait: Waits for so many seconds.
        timeout_s: Longest wait for an answer of Prometheus, seconds.
    """
    try:
        Daemon(settings).check()
    except TrimtabError as error:
        yield fault_of(AREA, "settings", error)
        return
    count = len(settings.engines)
    yield Finding(
        area=AREA,
        check="settings",
        verdict=Verdict.OK,
        found=f"{count} engine{'s' * (count > 1)}: plans, policies and token in order",
    )
    yield _state_dir(settings.state_dir)
    seen: list[PrometheusSettings] = []
    for name in settings.engines:
        plan = load_plan(settings.engines[name].plan)
        yield from _engine(name, settings, plan, wait)
        prometheus = settings.prometheus_of(name)
        if prometheus is not None and prometheus not in seen:
            seen.append(prometheus)
            yield from prometheus_of.look(prometheus, plan, timeout_s)


def _state_dir(folder: Path) -> Finding:
    nearest = folder
    # Path's own tests raise where a folder on the way may not be read.
    while not os.path.exists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    good = os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)
    return Finding(
        area=AREA,
        check="state_dir",
        verdict=Verdict.OK if good else Verdict.FAULT,
        found=str(folder) if good else f"{folder} cannot be written to",
        remedy="" if good else "give the daemon's user a folder that it may write to",
    )


def _engine(
    name: str, settings: DaemonSettings, plan: Plan, wait: Callable[[float], object]
) -> Iterator[Finding]:
    """One engine: two looks, an interval apart."""
    area, own = f"engine {name}", settings.engines[name]
    engine = parts.live_engine(name, settings, plan, _HOLDER)
    try:
        reading = engine.poll()
        yield from _control(area, reading, plan)
        if reading.failure is None:
            wait(_SOME * plan.controller.interval_s)
            reading = engine.poll()
        yield _figures(area, engine, reading, plan)
    finally:
        engine.close()
    if reading.control is not None:
        yield from _facts(area, own.control, plan)
    yield from _socket_mode(area, own.control)
    if own.traffic_log is not None:
        yield _traffic_log(area, own.traffic_log)


def _control(area: str, reading: Reading, plan: Plan) -> Iterator[Finding]:
    view, check = reading.control, "control socket"
    if view is None:
        yield Finding(
            area=area,
            check=check,
            verdict=Verdict.FAULT,
            found=reading.control_failure,
            remedy="start the engine with --control-socket (trimtab serve), and give its path",
        )
        return
    held = f"version {view.version}, {view.state}"
    held += f", held by {view.holder}" if view.holder else ""
    yield Finding(area=area, check=check, verdict=Verdict.OK, found=f"answers: {held}")
    yield _plan(area, view, plan)


def _plan(area: str, view: ControlView, plan: Plan) -> Finding:
    if view.allocation is not None:
        return Finding(area=area, check="plan", verdict=Verdict.OK, found=f"{plan.name}, the same")
    return Finding(
        area=area,
        check="plan",
        verdict=Verdict.FAULT,
        found=f"the engine runs {view.plan} ({view.plan_digest[:12]}), the settings say "
        f"{plan.name} ({plan.digest[:12]})",
        remedy="give both the same plan file: the controller sends nothing to another one",
    )


def _figures(area: str, engine: LiveEngine, reading: Reading, plan: Plan) -> Finding:
    check, interval_s = "figures", plan.controller.interval_s
    if reading.failure is not None:
        return Finding(
            area=area,
            check=check,
            verdict=Verdict.FAULT,
            found=f"{reading.failure} ({reading.failure.reason.value})",
            remedy="see docs/live.md for what each reason means",
        )
    if reading.telemetry is None:
        return Finding(
            area=area,
            check=check,
            verdict=Verdict.WARNING,
            found=f"{engine.place} answers, but no interval has ended yet",
            remedy=f"look again in {interval_s:g} s",
        )
    age_s, notices = reading.telemetry.age_s, "; ".join(one.text for one in reading.notices)
    if age_s > _OLD_INTERVALS * interval_s:
        return Finding(
            area=area,
            check=check,
            verdict=Verdict.FAULT,
            found=f"{age_s:.1f} s old, more than {_OLD_INTERVALS:g} intervals of {interval_s:g} s",
            remedy="scrape the engine at least once an interval, or give its metrics page",
        )
    return Finding(
        area=area,
        check=check,
        verdict=Verdict.NOTE if notices else Verdict.OK,
        found=f"{age_s:.1f} s old{'; ' * bool(notices)}{notices}",
    )


def _facts(area: str, control: str, plan: Plan) -> Iterator[Finding]:
    """What the engine says of itself against what a what-if would take it for."""
    try:
        with ControlClient(control) as client:
            facts = client.health()["engine"]
        spec = get_engine_spec(str(facts["engine"]))
        blocks = int(facts["blocks"])
    except (TrimtabError, *ODD_ANSWER) as error:
        yield Finding(
            area=area, check="facts", verdict=Verdict.NOTE, found=f"not told: {error}"[:200]
        )
        return
    expected = spec.num_gpu_blocks
    if abs(blocks - expected) > _BLOCKS_OFF * expected:
        yield Finding(
            area=area,
            check="KV cache",
            verdict=Verdict.NOTE,
            found=f"{blocks:,} blocks, where {spec.name} has {expected:,}",
            remedy=f"replay it with --num-gpu-blocks {blocks}, or an engine file of its own",
        )
    else:
        yield Finding(area=area, check="KV cache", verdict=Verdict.OK, found=f"{blocks:,} blocks")


def _socket_mode(area: str, control: str) -> Iterator[Finding]:
    """Whoever may write to the socket's file may steer the engine."""
    path = Path(control.removeprefix("unix:"))
    if control.startswith("tcp://"):
        return
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        # The look at the socket has told of it.
        return
    if mode & stat.S_IWOTH:
        yield Finding(
            area=area,
            check="control socket's permissions",
            verdict=Verdict.FAULT,
            found=f"{path} may be written to by everybody ({mode:o})",
            remedy=f"chmod o-w {path}",
        )


def _traffic_log(area: str, folder: Path) -> Finding:
    good = os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)
    return Finding(
        area=area,
        check="traffic log",
        verdict=Verdict.OK if good else Verdict.WARNING,
        found=str(folder) if good else f"{folder} is no folder that can be read: no profiles",
        remedy="" if good else "start the engine with --traffic-log, and give that folder",
    )
