"""`trimtab doctor`: what is missing in an installation or a deployment, and how to mend it.

It parses flags and prints; the looks are `trimtab.controller.doctor`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from trimtab.engine_bridge.errors import FlagError, TrimtabError

if TYPE_CHECKING:
    from trimtab.controller.doctor.finding import Finding

_TIMEOUT_S: Final = 5.0
_LONGEST_S: Final = 300.0


class DoctorError(TrimtabError):
    """Something does not work; the lines above say what."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("doctor")(doctor)


def doctor(
    daemon: Annotated[
        Path | None, typer.Option("--daemon", help="Settings of trimtab run: look at its engines.")
    ] = None,
    gateway: Annotated[
        Path | None,
        typer.Option("--gateway", help="Settings of trimtab gateway: look at its engines."),
    ] = None,
    control: Annotated[
        str | None, typer.Option("--control", help="Control socket of one engine; with --metrics.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option("--metrics", help="URL of that engine's /metrics.")
    ] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", help="Plan of that engine. Default: the shipped one.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", help="Longest wait for an answer, seconds.")
    ] = _TIMEOUT_S,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the findings to this file.")
    ] = None,
) -> None:
    """Look at the installation, and at running engines or a gateway if they are named.

    It changes nothing and takes no lease. Exit code 0: no fault, 1: some, 2: wrong flags.
    """
    from trimtab.controller.doctor import installation
    from trimtab.controller.doctor.finding import Verdict

    if not 0.0 < timeout_s <= _LONGEST_S:
        raise FlagError("--timeout-s", value=timeout_s, bound=f"above 0, at most {_LONGEST_S:g}")
    if daemon is not None and (control or metrics or plan):
        raise FlagError(
            "--daemon", bound="given alone", remedy="leave --control, --metrics, --plan"
        )
    if (control is None) != (metrics is None):
        raise FlagError("--control", bound="given together with --metrics")
    if plan is not None and control is None:
        raise FlagError("--plan", value=plan, bound="given with --control and --metrics")
    findings = list(_told(installation.look()))
    if daemon is not None or control is not None:
        findings += _told(_engines(daemon, control, metrics, plan, timeout_s))
    if gateway is not None:
        from trimtab.controller.doctor import gateway as gateway_look

        _check_extra("gateway", "limits")
        findings += _told(gateway_look.look(gateway, timeout_s=timeout_s))
    if json is not None:
        _write(json, findings)
    counts = {v: sum(one.verdict is v for one in findings) for v in Verdict}
    faults, warnings = counts[Verdict.FAULT], counts[Verdict.WARNING]
    summary = f"{faults} fault{'s' * (faults != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    if faults:
        raise DoctorError(f"{summary}; each fault above says what to do")
    typer.echo(summary)


def _engines(
    daemon: Path | None,
    control: str | None,
    metrics: str | None,
    plan: str | None,
    timeout_s: float,
) -> Iterator[Finding]:
    import time

    _check_extra("daemon", "prometheus_api_client")
    from trimtab.controller.daemon.settings import SettingsError, load_settings, settings_from
    from trimtab.controller.doctor import engines
    from trimtab.controller.doctor.finding import fault_of

    if daemon is not None:
        try:
            settings = load_settings(daemon)
        except SettingsError as error:
            return iter((fault_of(engines.AREA, "settings", error),))
    else:
        own = {} if plan is None else {"plan": plan}
        one = {"control": control, "metrics": metrics, **own}
        # Without a dashboard: whether its token can be kept is not what was asked.
        settings = settings_from({"engines": {"engine": one}, "listen": None}, where="doctor")
    return engines.look(settings, wait=time.sleep, timeout_s=timeout_s)


def _check_extra(extra: str, module: str) -> None:
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise FlagError(
            "doctor", value=module, bound="installed", remedy=f"pip install 'trimtab[{extra}]'"
        )


def _told(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Print each finding as it comes: a look at an engine takes an interval."""
    area = ""
    for one in findings:
        if one.area != area:
            area = one.area
            typer.echo(_safe(area))
        typer.echo(_safe(f"  {one.verdict.value:8}{one.check}: {one.found}"))
        if one.remedy:
            typer.echo(_safe(f"          -> {one.remedy}"))
        yield one


def _safe(text: str) -> str:
    """Without what a terminal would obey: names and errors come from elsewhere."""
    return "".join(c if c.isprintable() else " " for c in text).rstrip()


def _write(path: Path, findings: list[Finding]) -> None:
    import json
    from dataclasses import asdict

    from trimtab.engine_bridge.atomic import write_text

    content = {"schema": 1, "findings": [asdict(one) for one in findings]}
    write_text(path, json.dumps(content, indent=1) + "\n")
