"""`trimtab gateway`: admission and routing in front of engines, until a signal ends it.

What it does is `trimtab.engine_bridge.gateway`'s business; docs/gateway.md is for its users.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from trimtab.engine_bridge.errors import FlagError

_NEEDED: Final = ("httptools", "prometheus_client", "starlette", "uvicorn", "uvloop")

Config = Annotated[Path, typer.Option("--config", help="Settings file (YAML).")]
Check = Annotated[
    bool, typer.Option("--check", help="Read settings, plan, keys and limits, start nothing.")
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("gateway")(gateway)


def gateway(config: Config, check: Check = False) -> None:
    """Serve OpenAI's interface in front of engines that run with --trust-labels.

    SIGTERM ends it once open requests are done; SIGHUP reads the settings anew.
    """
    for module in _NEEDED:
        if find_spec(module) is None:
            remedy = "install the extra: pip install 'trimtab[gateway]'"
            raise FlagError("gateway", value=module, bound="installed", remedy=remedy)
    from trimtab.engine_bridge.uncompiled import keep_uncompiled

    keep_uncompiled()
    from trimtab.engine_bridge.gateway.setup import read_files

    files = read_files(config)
    if check:
        typer.echo(f"{len(files.settings.engines)} engine(s), all in order")
        return
    import uvloop

    from trimtab.engine_bridge.gateway.server import Gateway

    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    uvloop.run(Gateway(config, files).run())
