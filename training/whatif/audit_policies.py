"""Finds the policies that an audit log names: by name, and a bundle by its digest.

The folder of a bundle may hold another one by now; only the digest says which one decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from trimtab.agents.audit_entry import AuditError
from trimtab.agents.bundle import MANIFEST_NAME, read_bundle
from trimtab.agents.guard import Guard
from trimtab.agents.learned import LearnedPolicy
from trimtab.agents.manifest import read_manifest
from trimtab.agents.policy import Policy
from trimtab.agents.registry import BUNDLE_PREFIX, SHIPPED_BUNDLE, make_policy
from trimtab.agents.static import StaticPolicy
from trimtab.engine_bridge.errors import BundleError

VERSIONS_SUFFIX: Final = ".versions"
"""After the name of a pulled bundle's folder: its earlier versions are in there."""
_MOST_FOLDERS: Final = 1000


def bare_policy(name: str) -> Policy:
    """A new policy of that name, without the guard that a network comes with.

    Raises:
        FlagError: no policy has that name.
        BundleError: its bundle cannot be read.
    """
    policy = make_policy(name)
    return policy.policy if isinstance(policy, Guard) else policy


class RecordedPolicies:
    """The policies that a log may name."""

    def __init__(self, given: Sequence[str] = ()) -> None:
        """Look where bundles may be.

        Args:
            given: Policies that the user named; their bundles are looked at first.

        Raises:
            FlagError: no policy has such a name.
            BundleError: a bundle cannot be read.
        """
        self.given = {name: bare_policy(name) for name in given}
        """Policies by the names that the user gave."""
        self._used: set[str] = set()
        self._found: dict[str, Path] = {}
        self._looked_at: dict[Path, str | None] = {}

    def find(self, name: str, digest: str | None, *, where: str) -> Policy:
        """A new policy, as it was when it was recorded.

        Args:
            name: Of the policy in the log.
            digest: Of its bundle; None for a policy without one.
            where: The entry, for the error.

        Raises:
            AuditError: its bundle is not to be found.
        """
        if digest is None:
            # The daemon holds the static plan until a bundle is there.
            return StaticPolicy() if name.startswith(BUNDLE_PREFIX) else bare_policy(name)
        self._used.add(digest)
        for policy in self.given.values():
            if isinstance(policy, LearnedPolicy) and policy.bundle.digest == digest:
                return LearnedPolicy(policy.bundle)
        for folder in _folders(name):
            if self._digest(folder) == digest:
                return LearnedPolicy(read_bundle(folder))
        raise AuditError(
            where,
            key="bundle_digest",
            value=digest[:16],
            bound=f"that of a bundle which is still there; {name} holds another one or none",
            remedy=f"name the folder that holds it: --policy {BUNDLE_PREFIX}FOLDER",
        )

    def is_other(self, name: str) -> bool:
        """Whether a policy that the user named is none of the bundles that the log named."""
        policy = self.given[name]
        return not (isinstance(policy, LearnedPolicy) and policy.bundle.digest in self._used)

    def _digest(self, folder: Path) -> str | None:
        if folder not in self._looked_at:
            try:
                self._looked_at[folder] = read_manifest(folder / MANIFEST_NAME).digest
            except BundleError:
                self._looked_at[folder] = None
        return self._looked_at[folder]


def _folders(name: str) -> Iterator[Path]:
    """Where the bundle of a policy may be: in its folder, an older version of it, beside it."""
    yield SHIPPED_BUNDLE
    if not name.startswith(BUNDLE_PREFIX):
        return
    folder = Path(name.removeprefix(BUNDLE_PREFIX))
    yield folder
    versions = folder.with_name(folder.name + VERSIONS_SUFFIX)
    for place in (versions, folder.parent):
        try:
            inside = sorted(place.iterdir())[:_MOST_FOLDERS]
        except OSError:
            continue
        yield from (other for other in inside if (other / MANIFEST_NAME).is_file())
