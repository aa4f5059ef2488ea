"""The token that an order to the daemon must carry: from the environment, or a file of its own.

Who may read is not its business: everybody who reaches the port may.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trimtab.engine_bridge.errors import InputError

TOKEN_VARIABLE: Final = "TRIMTAB_DAEMON_TOKEN"
TOKEN_FILE: Final = "token"
SHORTEST: Final = 16
"""Characters; shorter ones can be guessed."""
_LONGEST: Final = 1024


class TokenError(InputError):
    """The daemon's token is too short, cannot be read, or is not kept secret."""


def own_token(state_dir: Path, environment: Mapping[str, str]) -> str:
    """The token that the daemon asks for; a file with a new one is made where there is none.

    Args:
        state_dir: The daemon's folder; made with mode 0700 if it is not there.
        environment: `TRIMTAB_DAEMON_TOKEN` in it comes before the file.

    Raises:
        TokenError: the token is not fit.
    """
    if TOKEN_VARIABLE in environment:
        return _fit(environment[TOKEN_VARIABLE], TOKEN_VARIABLE)
    path = state_dir / TOKEN_FILE
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        _make(path)
    return read_token(path)


def check_token(state_dir: Path, environment: Mapping[str, str]) -> None:
    """Check that `own_token` will find a token or can keep one; nothing is made.

    Raises:
        TokenError: the token is not fit, or there is none and no place for one.
    """
    path = state_dir / TOKEN_FILE
    if TOKEN_VARIABLE in environment:
        _fit(environment[TOKEN_VARIABLE], TOKEN_VARIABLE)
    elif path.exists():
        read_token(path)
    else:
        there = next(folder for folder in (state_dir, *state_dir.parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise TokenError(
                str(state_dir),
                key=TOKEN_FILE,
                bound="in a folder that can be written to",
                remedy=f"change state_dir or the rights of {there}, or set {TOKEN_VARIABLE}",
            )


def read_token(path: Path) -> str:
    """The token in a file that nobody but its owner can read.

    Raises:
        TokenError: it cannot be read, others can read it, or it is not fit.
    """
    try:
        with path.open(encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_LONGEST)
    except OSError as error:
        raise TokenError(
            f"{path}: {error.strerror}",
            remedy=f"name the daemon's token file, or set {TOKEN_VARIABLE}",
        ) from None
    except UnicodeDecodeError:
        raise TokenError(str(path), bound="a token in ASCII characters") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TokenError(
            str(path),
            value=f"mode {stat.S_IMODE(mode):04o}",
            bound="readable by its owner alone",
            remedy=f"chmod 600 {path}",
        )
    return _fit(text, str(path))


def _fit(text: str, where: str) -> str:
    token = text.strip()
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise TokenError(
            where,
            bound=f"at least {SHORTEST} ASCII characters without spaces",
            remedy="for instance what `openssl rand -hex 24` prints",
        )
    return token


def _make(path: Path) -> None:
    """Write a new token; if another process is faster, its one stays."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
