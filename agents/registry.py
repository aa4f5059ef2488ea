"""The policies by the names that the command line uses.

`learned` and `bundle:FOLDER` are networks and come behind the guard; the others are as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from trimtab.agents.bundle import MANIFEST_NAME, read_bundle
from trimtab.agents.guard import Guard
from trimtab.agents.learned import LearnedPolicy
from trimtab.agents.policy import Policy
from trimtab.agents.reactive import ReactivePolicy
from trimtab.agents.static import StaticPolicy
from trimtab.agents.stock import StockFcfsPolicy, StockPriorityPolicy
from trimtab.engine_bridge.errors import BundleError, FlagError, did_you_mean

SHIPPED_BUNDLE: Final = Path(__file__).resolve().parent / "bundles" / "default"
"""The folder of the bundle that comes with Trimtab."""
BUNDLE_PREFIX: Final = "bundle:"
"""Before the folder of any other bundle."""


def _shipped() -> Policy:
    if not (SHIPPED_BUNDLE / MANIFEST_NAME).is_file():
        raise BundleError(
            f"policy {LearnedPolicy.name}",
            value="this installation has no trained policy",
            remedy=f"give {BUNDLE_PREFIX}FOLDER, a folder that trimtab train wrote",
        )
    return guarded_bundle(SHIPPED_BUNDLE)


_POLICIES: dict[str, Callable[[], Policy]] = {
    StaticPolicy.name: StaticPolicy,
    StockFcfsPolicy.name: StockFcfsPolicy,
    StockPriorityPolicy.name: StockPriorityPolicy,
    ReactivePolicy.name: ReactivePolicy,
    LearnedPolicy.name: _shipped,
}


def policy_names() -> tuple[str, ...]:
    """The names of all policies; `bundle:FOLDER` names one too."""
    return tuple(_POLICIES)


def guarded_bundle(folder: Path) -> Guard:
    """The policy of a bundle behind a guard in active mode.

    Raises:
        BundleError: the bundle cannot be read.
    """
    return Guard(LearnedPolicy(read_bundle(folder)))


def make_policy(name: str) -> Policy:
    """A new policy of that name; call its `reset` before `act`.

    Args:
        name: One of `policy_names()`, or `bundle:FOLDER`.

    Raises:
        FlagError: no policy has that name.
        BundleError: the bundle cannot be read.
    """
    prefix, colon, folder = name.partition(":")
    if colon and f"{prefix}:" == BUNDLE_PREFIX and folder:
        return guarded_bundle(Path(folder))
    if name not in _POLICIES:
        raise FlagError(
            "--policy",
            value=name,
            bound=f"one of {', '.join(_POLICIES)}, or {BUNDLE_PREFIX}FOLDER",
            remedy=_meant(prefix, folder) if colon else did_you_mean(name, _POLICIES),
        )
    return _POLICIES[name]()


def _meant(prefix: str, folder: str) -> str:
    """What a mistyped `bundle:FOLDER` was meant to be."""
    close = did_you_mean(prefix, (BUNDLE_PREFIX.removesuffix(":"),))
    return f'did you mean "{BUNDLE_PREFIX}{folder or "FOLDER"}"?' if close else ""
