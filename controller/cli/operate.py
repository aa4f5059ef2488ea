"""`trimtab hold`, `release`, `mode` and `status`: what an operator tells and asks a running daemon.

They speak HTTP with it and know nothing that the dashboard does not know, too.
"""

from __future__ import annotations

import getpass
import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

_URL_VARIABLE: Final = "TRIMTAB_DAEMON_URL"
_Engine = Annotated[
    str | None, typer.Argument(help="The engine's name in the settings; none: all.")
]
_At = Annotated[
    str, typer.Option("--at", envvar=_URL_VARIABLE, help="The daemon's address.")
]  # fmt: skip
_TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="File with its token; default TRIMTAB_DAEMON_TOKEN, else state/token.",
    ),
]
_By = Annotated[
    str | None, typer.Option("--by", help="Who orders it, for the audit log; default your login.")
]
_AT: Final = "http://127.0.0.1:9464"


def register(app: typer.Typer) -> None:
    """Add the commands to the root."""
    app.command("hold")(hold)
    app.command("release")(release)
    app.command("mode")(mode)
    app.command("status")(status)


def hold(
    engine: _Engine = None, at: _At = _AT, token_file: _TokenFile = None, by: _By = None
) -> None:
    """Keep the allocation that is applied now, until somebody releases it."""
    _order("hold", engine, at, token_file, by)


def release(
    engine: _Engine = None, at: _At = _AT, token_file: _TokenFile = None, by: _By = None
) -> None:
    """End a hold, forget all trips and unlatch; the policy begins with a probation."""
    _order("release", engine, at, token_file, by)


def mode(
    mode: Annotated[str, typer.Argument(help="static, shadow, canary or active.")],
    engine: _Engine = None,
    at: _At = _AT,
    token_file: _TokenFile = None,
    by: _By = None,
) -> None:
    """Change what the policy may do."""
    _order("mode", engine, at, token_file, by, mode=mode)


def status(
    engine: _Engine = None,
    at: _At = _AT,
    as_json: Annotated[bool, typer.Option("--json", help="All that is known, as JSON.")] = False,
) -> int:
    """How the engines stand, in a sentence each; exits with 1 if one of them is in trouble.

    With ENGINE also what its tiers get.
    """
    from trimtab.controller.cli import status_lines
    from trimtab.controller.web.client import DaemonClient
    from trimtab.controller.web.words import Level

    state = DaemonClient(at).state(engine)
    shown = [state["detail"]] if engine else state["engines"]
    if as_json:
        typer.echo(json.dumps(state, indent=1))
    else:
        for line in status_lines.lines(shown):
            typer.echo(line)
    return 1 if any(each["level"] == Level.BAD for each in shown) else 0


def _order(
    kind: str,
    engine: str | None,
    at: str,
    token_file: Path | None,
    by: str | None,
    **more: str,
) -> None:
    """Give an order, wait until it is carried out, and say how the engines stand then."""
    from trimtab.controller.cli import status_lines
    from trimtab.controller.web.client import DaemonClient, operators_token

    client = DaemonClient(at, operators_token(token_file))
    order: dict[str, Any] = {"engine": engine, "by": by or _login(), **more}
    engines = client.order(kind, order)
    typer.echo(f"{kind} ordered for {', '.join(engines)}")
    after = [each for each in client.after_next_tick(engines) if each["engine"] in engines]
    for line in status_lines.lines(after):
        typer.echo(line)


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""
