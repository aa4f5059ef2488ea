"""`trimtab pull`: a registered model's bundle into a folder, once or for ever.

It is a process of its own, because `trimtab run` never waits for a model registry.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from trimtab.engine_bridge.errors import FlagError

if TYPE_CHECKING:
    from trimtab.training.learning.pull import Pulled, Puller

_SOONEST_S: Final = 1.0
_LATEST_S: Final = 86_400.0
_MOST_KEPT: Final = 1000
_ADDRESS: Final = re.compile(r"0x[0-9a-f]+")

Model = Annotated[str, typer.Argument(help="models:/NAME@ALIAS or models:/NAME/VERSION.")]
Into = Annotated[
    Path, typer.Option("--into", help="Folder for policy: bundle:FOLDER; a link that is moved.")
]
Every = Annotated[
    float | None,
    typer.Option("--every", help="Look again after so many seconds, for ever; left out, once."),
]
Keep = Annotated[
    int | None,
    typer.Option("--keep", help="So many versions stay in FOLDER.versions; left out, 4."),
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("pull")(pull)


def pull(model: Model, into: Into, every: Every = None, keep: Keep = None) -> None:
    """Bring a registered model's bundle into a folder that trimtab run watches.

    A registry that cannot be reached leaves the folder as it is.
    """
    if every is not None and not _SOONEST_S <= every <= _LATEST_S:
        raise FlagError("--every", value=every, bound=f"from {_SOONEST_S:g} to {_LATEST_S:,g}")
    if keep is not None and not 1 <= keep <= _MOST_KEPT:
        raise FlagError("--keep", value=keep, bound=f"from 1 to {_MOST_KEPT:,}")
    from trimtab.training.learning.model_registry import ModelRegistry
    from trimtab.training.learning.pull import KEPT_VERSIONS, Puller
    from trimtab.training.learning.tracking_place import shown, tracking_uri

    uri = tracking_uri(Path.cwd())
    puller = Puller(
        model,
        into,
        connect=lambda: ModelRegistry(uri),
        keep=KEPT_VERSIONS if keep is None else keep,
    )
    print(f"registry: {shown(uri)}", flush=True)
    if every is None:
        print(_words(puller.pull(), model, into))
        return
    keep_pulling(puller, model, into, pause=lambda: time.sleep(every))


def keep_pulling(puller: Puller, model: str, into: Path, *, pause: Callable[[], object]) -> None:
    """Pull for ever, and say only what has changed.

    Args:
        puller: What pulls.
        model: The model, for the words.
        into: The folder, for the words.
        pause: Waits between two pulls; ends it all by raising.
    """
    from trimtab.training.learning.pull import PullError

    fault, first = "", True
    while True:
        try:
            found = puller.pull()
        except PullError as error:
            # Some errors of a connection name an object's address, which differs each time.
            now = _ADDRESS.sub("", str(error))
            if now != fault:
                stays = "the bundle that is there stays" if puller.digest else "there is none yet"
                print(f"not pulled, {stays}: {error}", flush=True)
            fault = now
        else:
            if first or found.changed or fault:
                print(_words(found, model, into), flush=True)
            fault, first = "", False
        pause()


def _words(found: Pulled, model: str, into: Path) -> str:
    verb = "now" if found.changed else "already"
    return f"{into} is {verb} {model}: version {found.version.number}, digest {found.digest[:12]}"
