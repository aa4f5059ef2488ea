"""The model registry: names like `models:/NAME@champion` to bundles, versions and their aliases.

A version is the bundle's folder as it is, no pickle. What may become champion is decided in
`promotion`; here the alias only moves, with a note of who moved it from where.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from trimtab.agents.bundle import read_bundle
from trimtab.engine_bridge.errors import ModelError, did_you_mean
from trimtab.training.learning.tracking_place import connect, shown, tracking_uri

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlflow import MlflowClient

BUNDLE_FOLDER = "bundle"
"""Where a run keeps its bundle among its artifacts."""
DIGEST_TAG = "bundle_digest"
CHAMPION = "champion"
_MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>[^/@]+))")
_BUNDLE_FILES = ("policy.json", "policy.npz")


@dataclass(frozen=True, kw_only=True)
class Version:
    """One version of a registered model."""

    name: str
    number: str
    source: str
    """Where its bundle is kept."""
    run_id: str
    tags: Mapping[str, str]

    @property
    def uri(self) -> str:
        """`models:/NAME/NUMBER`."""
        return f"models:/{self.name}/{self.number}"


class ModelRegistry:
    """The registry at a tracking URI."""

    def __init__(self, uri: str) -> None:
        """Connect.

        Raises:
            ModelError: the place cannot be reached.
        """
        self._uri = uri
        with self._reached():
            self._client: MlflowClient = connect(uri)

    def register(self, name: str, *, run_id: str, tags: Mapping[str, str]) -> Version:
        """A new version from the bundle that a finished run keeps.

        Raises:
            ModelError: the registry cannot be reached or refuses the name.
        """
        with self._reached():
            if not any(model.name == name for model in self._models()):
                self._client.create_registered_model(name)
            run = self._client.get_run(run_id)
            made = self._client.create_model_version(
                name,
                source=f"{run.info.artifact_uri}/{BUNDLE_FOLDER}",
                run_id=run_id,
                tags=dict(tags),
            )
            return _version(made)

    def find(self, name: str, *, version: str | None = None, alias: str | None = None) -> Version:
        """A model's version by number or alias; by neither, or by `latest`, the newest.

        Raises:
            ModelError: there is none, with those that there are.
        """
        with self._reached():
            known = {model.name: model for model in self._models()}
            if name not in known:
                raise ModelError(
                    f"models at {shown(self._uri)}",
                    value=name,
                    bound=f"one of {', '.join(known)}" if known else "registered first",
                    remedy=did_you_mean(name, known) or "train with --register NAME",
                )
            if alias is not None:
                version = self._aliased(known[name], alias)
            found = {
                str(v.version): v
                for v in self._client.search_model_versions(f"name = '{name}'", max_results=10_000)
            }
        if version in (None, "latest") and found:
            version = max(found, key=int)
        if version not in found:
            raise ModelError(
                f"models:/{name}",
                key="version",
                value=version,
                bound=f"one of {', '.join(sorted(found, key=int))}",
            )
        return _version(found[version])

    def holder(self, name: str, alias: str) -> str | None:
        """The number of the version that has the alias now; None without one."""
        with self._reached():
            number = dict(self._client.get_registered_model(name).aliases).get(alias)
        return None if number is None else str(number)

    def move_alias(self, version: Version, alias: str, *, tags: Mapping[str, str]) -> None:
        """Give the version the alias, and note on it from where, by whom and when."""
        before = self.holder(version.name, alias)
        notes = {
            "promoted_from": before or "none",
            "promoted_by": getpass.getuser(),
            "promoted_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "promoted_to": alias,
            **tags,
        }
        with self._reached():
            for key, value in notes.items():
                self._client.set_model_version_tag(version.name, version.number, key, value)
            self._client.set_registered_model_alias(version.name, alias, version.number)

    def fetch(self, version: Version) -> Path:
        """The folder of the version's bundle on this machine.

        A version kept on this machine is read where it is, any other one copied once to the user's
        cache.

        Raises:
            ModelError: its files are not to be had, or are not those that were registered.
        """
        folder = _local_folder(version.source) or self._copy(version)
        if not all((folder / name).is_file() for name in _BUNDLE_FILES):
            raise ModelError(
                version.uri,
                value=str(folder),
                bound=f"a folder with {' and '.join(_BUNDLE_FILES)}",
                remedy="its files were moved or deleted",
            )
        registered, found = version.tags.get(DIGEST_TAG), read_bundle(folder).digest
        if registered is not None and registered != found:
            raise ModelError(
                version.uri, key="digest", value=found, bound=f"{registered}, as registered"
            )
        return folder

    def _copy(self, version: Version) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        digest = version.tags.get(DIGEST_TAG, "unknown")
        folder = cache / "trimtab" / "models" / version.name / f"{version.number}-{digest[:16]}"
        if all((folder / name).is_file() for name in _BUNDLE_FILES):
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        with self._reached():
            for name in _BUNDLE_FILES:
                self._client.download_artifacts(
                    version.run_id, f"{BUNDLE_FOLDER}/{name}", str(folder)
                )
        # The client keeps the artifact's own folder.
        for name in _BUNDLE_FILES:
            (folder / BUNDLE_FOLDER / name).replace(folder / name)
        return folder

    def _models(self) -> list[Any]:
        return list(self._client.search_registered_models(max_results=1000))

    def _aliased(self, model: Any, alias: str) -> str:
        aliases = {key: str(number) for key, number in dict(model.aliases).items()}
        if alias not in aliases:
            raise ModelError(
                f"models:/{model.name}",
                key="alias",
                value=alias,
                bound=f"one of {', '.join(aliases)}" if aliases else "given by trimtab promote",
                remedy=did_you_mean(alias, aliases),
            )
        return aliases[alias]

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn whatever the client raises into one line."""
        try:
            yield
        except ModelError:
            raise
        except Exception as error:
            if type(error).__module__.split(".")[0] not in _FOREIGN and not isinstance(
                error, OSError
            ):
                raise
            text = " ".join(str(error).split())[:200]
            raise ModelError(
                f"models at {shown(self._uri)}", value=shown(text), bound="reachable"
            ) from error


_FOREIGN = ("mlflow", "sqlalchemy", "requests", "urllib3")


def resolve_policy(name: str) -> str:
    """`models:/NAME@ALIAS` and `models:/NAME/VERSION` as `bundle:FOLDER`; others as they are.

    Raises:
        ModelError: no such model, version or alias, or no registry.
    """
    if not name.startswith("models:"):
        return name
    model, number, alias = parse_model(name, flag="--policy")
    registry = ModelRegistry(tracking_uri(Path.cwd()))
    return f"bundle:{registry.fetch(registry.find(model, version=number, alias=alias))}"


def parse_model(text: str, *, flag: str) -> tuple[str, str | None, str | None]:
    """Name, version and alias of `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    Raises:
        ModelError: it has another form.
    """
    found = _MODEL_URI.fullmatch(text)
    if found is None:
        raise ModelError(flag, value=text, bound="like models:/NAME@champion or models:/NAME/3")
    return found["name"], found["version"], found["alias"]


def _version(found: Any) -> Version:
    return Version(
        name=str(found.name),
        number=str(found.version),
        source=str(found.source),
        run_id=str(found.run_id or ""),
        tags=dict(found.tags),
    )


def _local_folder(source: str) -> Path | None:
    """The source as a path of this machine; None where it is elsewhere."""
    parts = urlsplit(source)
    if parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path) if parts.scheme else source)
