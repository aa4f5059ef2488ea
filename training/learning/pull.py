"""Brings a registered model's bundle into a folder that a daemon watches, whole or not at all.

The folder is a link to one of the versions beside it, `FOLDER.versions/DIGEST`; the link is moved
by a rename, so that a reader sees the old bundle or the new one and never half of either. The
daemon itself never asks a registry.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trimtab.agents.bundle import ARRAYS_NAME, MANIFEST_NAME, read_bundle
from trimtab.engine_bridge.errors import BundleError, FlagError, ModelError, TrimtabError
from trimtab.training.learning.model_registry import ModelRegistry, Version, parse_model
from trimtab.training.whatif.audit_policies import VERSIONS_SUFFIX

KEPT_VERSIONS: Final = 4
"""Versions that stay beside the link, the newest; the one in use is one of them."""
_DIGITS: Final = 32


class PullError(TrimtabError):
    """A model could not be brought here; the bundle that was there stays."""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """What is in the folder now."""

    version: Version
    digest: str
    """Of the bundle."""
    changed: bool
    """Whether it was another one before."""


class Puller:
    """Brings one model's bundle into one folder, again and again."""

    def __init__(
        self, model: str, into: Path, *, connect: Callable[[], ModelRegistry], keep: int
    ) -> None:
        """Begin; nothing is asked or written yet.

        Args:
            model: `models:/NAME@ALIAS` or `models:/NAME/VERSION`.
            into: The folder: a link, or nothing yet.
            connect: Makes a connection to the registry.
            keep: So many versions stay, at least 1.

        Raises:
            ModelError: the model has another form.
            FlagError: the folder is a real one.
        """
        self._name, self._number, self._alias = parse_model(model, flag="MODEL")
        self._connect = connect
        self._registry: ModelRegistry | None = None
        self._keep = max(1, keep)
        # Not resolved: the link itself is what is moved.
        self._link = Path(os.path.abspath(into))
        self._versions = self._link.with_name(self._link.name + VERSIONS_SUFFIX)
        if self._link.exists() and not self._link.is_symlink():
            raise FlagError(
                "--into",
                value=str(into),
                bound="a link that this command made, or nothing yet",
                remedy="move it away, or choose another name",
            )

    @property
    def digest(self) -> str | None:
        """Of the bundle that is in the folder now; None without a whole one."""
        try:
            return read_bundle(self._link).digest
        except BundleError:
            return None

    def pull(self) -> Pulled:
        """Bring the bundle that the model's alias means now.

        Raises:
            PullError: the registry, the bundle or the disk is at fault; the folder is as it was.
        """
        try:
            version, source = self._fetch()
            # Read before it is copied: what is written is what was checked.
            digest = read_bundle(source).digest
            if self.digest == digest:
                return Pulled(version=version, digest=digest, changed=False)
            self._lay_down(source, digest)
        except (ModelError, BundleError) as error:
            self._registry = None
            raise PullError(str(error)) from error
        except OSError as error:
            place = error.filename or self._versions
            raise PullError(f"{place}: {error.strerror or error}") from error
        self._prune()
        return Pulled(version=version, digest=digest, changed=True)

    def _fetch(self) -> tuple[Version, Path]:
        if self._registry is None:
            self._registry = self._connect()
        version = self._registry.find(self._name, version=self._number, alias=self._alias)
        return version, self._registry.fetch(version)

    def _lay_down(self, source: Path, digest: str) -> None:
        """Copy the bundle beside the link, check the copy, move the link."""
        self._versions.mkdir(parents=True, exist_ok=True)
        home = self._versions / digest[:_DIGITS]
        if not _holds(home, digest):
            part = self._versions / f".{home.name}.{os.getpid()}.part"
            shutil.rmtree(part, ignore_errors=True)
            try:
                part.mkdir()
                for name in (MANIFEST_NAME, ARRAYS_NAME):
                    _copy(source / name, part / name)
                if not _holds(part, digest):
                    raise BundleError(
                        str(source), value="changed while it was copied", remedy="pull again"
                    )
                shutil.rmtree(home, ignore_errors=True)
                part.rename(home)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        # What is in use counts as the newest.
        os.utime(home)
        flip = self._link.with_name(f".{self._link.name}.{os.getpid()}.link")
        flip.unlink(missing_ok=True)
        flip.symlink_to(Path(self._versions.name) / home.name)
        flip.replace(self._link)
        _sync(self._link.parent)

    def _prune(self) -> None:
        """Delete all but the newest versions; what cannot be deleted stays."""
        try:
            found = [path for path in self._versions.iterdir() if not path.name.startswith(".")]
            found.sort(key=lambda path: path.stat().st_mtime_ns)
        except OSError:
            return
        for path in found[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)


def _holds(folder: Path, digest: str) -> bool:
    try:
        return read_bundle(folder).digest == digest
    except BundleError:
        return False


def _copy(source: Path, target: Path) -> None:
    """Copy a file so that it survives a power cut that the link survives."""
    with source.open("rb") as reading, target.open("xb") as writing:
        shutil.copyfileobj(reading, writing)
        writing.flush()
        os.fsync(writing.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
