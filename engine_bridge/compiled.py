"""The decorator of the hot functions: Numba, cached on disk, never stale.

Numba's own cache looks only at the file of the function itself, so a change in a function that it
calls would go unnoticed. Here the cache's folder is named after the text of all hot modules. With
NUMBA_DISABLE_JIT=1 the functions stay plain Python, and Numba is not even imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

_INTERPRETED: Final = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
if not _INTERPRETED:
    import numba
    from numba.core import config as _config

    numba_settings: Any = _config

F = TypeVar("F", bound=Callable[..., object])

_HERE = Path(__file__).parent
_HOT = ("step_time.py", "compiled.py", "rules/*.py", "replay/*.py")
_KEPT = 3
"""Folders of other versions that stay: a user may switch between checkouts."""


def _digest() -> str:
    sha = hashlib.sha256(numba.__version__.encode())
    for pattern in _HOT:
        for path in sorted(_HERE.glob(pattern)):
            sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


def _cache_folder() -> Path:
    """$NUMBA_CACHE_DIR, else the user's cache folder; below it one folder a version."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(given) if given else user) / "trimtab" / "compiled"


def _prepare(folder: Path) -> None:
    """Make this version's folder and drop the oldest of the others.

    Without a writable folder Numba still works: it compiles anew in each process.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        others = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for stale in others[: -_KEPT - 1]:
            shutil.rmtree(stale, ignore_errors=True)
    except OSError:
        return
    numba_settings.CACHE_DIR = str(folder)


def interpreted() -> bool:
    """Whether the compiler is off (NUMBA_DISABLE_JIT=1)."""
    return _INTERPRETED


def compiled(function: F) -> F:
    """Compile a function at its first call, or load it from the cache."""
    return function if _INTERPRETED else cast(F, numba.njit(cache=True)(function))


def inlined(function: F) -> F:
    """Compile a small function into each of its callers.

    A call takes hold of the replay's state and its arrays anew, which costs more than what such a
    function does.
    """
    if _INTERPRETED:
        return function
    return cast(F, numba.njit(cache=True, forceinline=True)(function))


if not _INTERPRETED:
    _prepare(_cache_folder() / _digest())
