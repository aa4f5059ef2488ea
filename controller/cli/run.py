"""`trimtab run`: the controller daemon beside engines, until a signal ends it.

What it does is `trimtab.controller.daemon`'s business; docs/run.md is for its users.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from trimtab.engine_bridge.errors import FlagError

if TYPE_CHECKING:
    from trimtab.controller.daemon.settings import DaemonSettings

_NEEDED: Final = ("prometheus_api_client", "prometheus_client", "starlette", "uvicorn")
_NONE: Final = "none"

Config = Annotated[
    Path | None, typer.Option("--config", help="Settings file (YAML) for one or more engines.")
]
Control = Annotated[
    str | None, typer.Option("--control", help="Control socket of one engine: path, or tcp://h:p.")
]
Metrics = Annotated[str | None, typer.Option("--metrics", help="URL of the engine's /metrics.")]
Prometheus = Annotated[
    str | None, typer.Option("--prometheus", help="URL of a Prometheus that scrapes the engine.")
]
Match = Annotated[
    list[str] | None,
    typer.Option("--match", help="label=value that picks the engine's series; several times."),
]
Rank = Annotated[int | None, typer.Option("--rank", help="The engine's data-parallel rank.")]
PlanFlag = Annotated[
    str | None, typer.Option("--plan", help="Plan file of the engine, or a shipped plan.")
]
PolicyFlag = Annotated[
    str | None,
    typer.Option("--policy", help="static, reactive, learned (default) or bundle:FOLDER."),
]
Mode = Annotated[
    str | None,
    typer.Option("--mode", help="static, shadow (default), canary or active."),
]
TrafficLog = Annotated[
    Path | None, typer.Option("--traffic-log", help="Folder of the engine's log of requests.")
]
EngineName = Annotated[str | None, typer.Option("--name", help="Name of the engine.")]
Listen = Annotated[
    str | None,
    typer.Option("--listen", help="host:port of the dashboard, or none; default 127.0.0.1:9464."),
]
StateDir = Annotated[
    Path | None, typer.Option("--state-dir", help="Folder for audit, profiles, token.")
]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Exit 1 where another controller holds an engine.")
]
Check = Annotated[
    bool, typer.Option("--check", help="Read settings, plans and policies, start nothing.")
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("run")(run)


def run(
    config: Config = None,
    control: Control = None,
    metrics: Metrics = None,
    prometheus: Prometheus = None,
    match: Match = None,
    rank: Rank = None,
    plan: PlanFlag = None,
    policy: PolicyFlag = None,
    mode: Mode = None,
    traffic_log: TrafficLog = None,
    name: EngineName = None,
    listen: Listen = None,
    state_dir: StateDir = None,
    no_wait: NoWait = False,
    check: Check = False,
) -> None:
    """Steer running engines within their plans, under the guard, until SIGTERM.

    Give --config, or the flags of one engine: --control with --metrics or --prometheus. The default
    mode is shadow: the static plan holds, and the log shows what the policy would do.
    """
    _check_installed()
    engine: dict[str, object] = {
        "control": control,
        "metrics": metrics,
        "plan": plan,
        "rank": rank,
        "traffic_log": traffic_log,
        "prometheus": _prometheus(prometheus, match or []),
    }
    shared: dict[str, object] = {"policy": policy, "mode": mode, "state_dir": state_dir}
    if config is not None:
        _refuse_flags({**engine, **shared, "name": name, "listen": listen})
    settings = _settings(config, name or "engine", engine, shared, listen)
    from trimtab.controller.daemon.daemon import Daemon

    _log_to_stderr()
    daemon = Daemon(settings, waits=not no_wait)
    if check:
        daemon.check()
        typer.echo(f"{len(settings.engines)} engine(s), all in order")
    else:
        daemon.run()


def _check_installed() -> None:
    for module in _NEEDED:
        if find_spec(module) is None:
            raise FlagError(
                "run",
                value=module,
                bound="installed",
                remedy="install the extra: pip install 'trimtab[daemon]'",
            )


def _settings(
    config: Path | None,
    name: str,
    engine: dict[str, object],
    shared: dict[str, object],
    listen: str | None,
) -> DaemonSettings:
    from trimtab.controller.daemon.settings import load_settings, settings_from

    if config is not None:
        return load_settings(config)
    if engine["control"] is None:
        raise FlagError("run", bound="told its engines", remedy="give --config FILE, or --control")
    values: dict[str, object] = {key: value for key, value in shared.items() if value is not None}
    values["engines"] = {name: {key: v for key, v in engine.items() if v is not None}}
    if listen is not None:
        values["listen"] = None if listen == _NONE else listen
    return settings_from(values, where="run")


def _prometheus(url: str | None, match: list[str]) -> dict[str, object] | None:
    labels: dict[str, str] = {}
    for word in match:
        label, equals, value = word.partition("=")
        if not equals or not label or url is None:
            raise FlagError("--match", value=word, bound="label=value, beside --prometheus")
        labels[label] = value
    return None if url is None else {"url": url, "match": labels}


def _refuse_flags(given: dict[str, object]) -> None:
    for key, value in given.items():
        if value is not None:
            flag = f"--{key.replace('_', '-')}"
            raise FlagError(flag, bound="left out with --config", remedy="write it into the file")


class _OneLine(logging.Formatter):
    """A line an event, tracebacks too: what reads logs reads lines."""

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(super().format(record).splitlines())


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
