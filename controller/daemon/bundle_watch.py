"""Where a loop's policy comes from, and the newer one that has meanwhile been laid on disk.

Reading and checking happens in another thread than the loop's; the loop only takes what is ready.
It never asks a model registry: a puller writes the folder that is watched.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from trimtab.agents.bundle import ARRAYS_NAME, MANIFEST_NAME, read_bundle
from trimtab.agents.guard import Guard
from trimtab.agents.learned import LearnedPolicy
from trimtab.agents.policy import Policy
from trimtab.agents.registry import BUNDLE_PREFIX, make_policy
from trimtab.agents.static import StaticPolicy
from trimtab.controller.daemon.policy_deadline import PolicyWithDeadline
from trimtab.engine_bridge.errors import TrimtabError
from trimtab.engine_bridge.plan import Plan

_LOG: Final = logging.getLogger("trimtab.daemon")
_LOOKS_AFTER_A_FAULT: Final = 15
"""A bundle that could not be read is read again after so many looks: disks have faults, too."""
_Marks = tuple[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A policy that is ready to be asked: read, checked against the plan, and begun."""

    policy: PolicyWithDeadline
    bundle_digest: str | None
    """None for a policy without a bundle."""


class PolicySource(Protocol):
    """What gives a loop its policy."""

    @property
    def name(self) -> str:
        """The policy's name in the settings."""

    @property
    def error(self) -> str:
        """Why the newest policy was not taken; empty if it was."""

    def first(self) -> Offer:
        """The policy to begin with, or to begin again with."""

    def newer(self) -> Offer | None:
        """A policy to go over to now, told once; never waits."""

    def reload(self) -> None:
        """Read again soon, even if nothing seems to have changed."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Under what a loop asks its policy."""

    plan: Plan
    """What the policy must fit."""
    seed: int
    """For its `reset`."""
    deadline_s: float
    """Longest wait for an answer, seconds."""
    threaded: bool = True
    """False asks in the caller's thread, for virtual time."""

    def offer(self, policy: Policy) -> Offer:
        """The policy with its deadline, begun.

        Raises:
            BundleError: it was made for other tiers or pools, or by another version.
        """
        seated = PolicyWithDeadline(policy, deadline_s=self.deadline_s, threaded=self.threaded)
        seated.reset(self.plan, self.seed)
        digest = policy.bundle.digest if isinstance(policy, LearnedPolicy) else None
        return Offer(policy=seated, bundle_digest=digest)


class NamedPolicy:
    """A policy that comes with Trimtab: it never changes."""

    def __init__(self, name: str, terms: Terms) -> None:
        """Read it, so that a fault shows at once.

        Raises:
            FlagError: no policy has that name.
            BundleError: its bundle cannot be read, or was made for other tiers or pools.
        """
        self.name = name
        self.error = ""
        self._terms = terms
        self._made: Offer | None = self._make()

    def _make(self) -> Offer:
        found = make_policy(self.name)
        return self._terms.offer(found.policy if isinstance(found, Guard) else found)

    def first(self) -> Offer:
        """The policy, anew at each call."""
        offer, self._made = self._made or self._make(), None
        return offer

    def newer(self) -> Offer | None:
        """Never one."""
        return None

    def reload(self) -> None:
        """There is nothing to read."""


class BundleWatch:
    """The bundle in a folder, and the newer one that is written there or linked to.

    `look` does the work and is called by a thread that may wait; the rest is the loop's and never
    does. Until a first bundle can be read the policy is the static plan: a puller may be slower
    than the daemon, and a broken disk must not keep the engine from its controller.
    """

    def __init__(self, folder: Path, terms: Terms) -> None:
        """Look for the first time.

        Args:
            folder: With policy.json and policy.npz; may be a link that is moved.
            terms: What the bundle must fit.
        """
        self.name = f"{BUNDLE_PREFIX}{folder}"
        self.error = ""
        self._folder, self._terms = folder, terms
        self._looking, self._lock = threading.Lock(), threading.Lock()
        self._seen: _Marks | None = None
        self._ready: Offer | None = None
        self._digest: str | None = None
        self._again = False
        self._looks = 0
        self.look()

    def first(self) -> Offer:
        """The bundle as it is now; the static policy while there is none."""
        ready = self.newer()
        if ready is None and self._digest is not None:
            # A loop that begins again: what was read has been used.
            with self._looking:
                self._digest, self._seen = None, None
            self.look()
            ready = self.newer()
        return ready or self._terms.offer(StaticPolicy())

    def newer(self) -> Offer | None:
        """The bundle that was read since the last call."""
        with self._lock:
            ready, self._ready = self._ready, None
        return ready

    def reload(self) -> None:
        """Read at the next look, whatever the files look like."""
        self._again = True

    def look(self) -> None:
        """Read the bundle if its files have changed; what is wrong with it goes to `error`."""
        with self._looking:
            marks = self._marks()
            again, self._again = self._again, False
            self._looks += 1
            rested = bool(self.error) and self._looks >= _LOOKS_AFTER_A_FAULT
            if marks == self._seen and not again and not rested:
                return
            self._looks = 0
            # The marks are older than what is read: a change meanwhile shows at the next look.
            self._seen = marks
            self._read()

    def _read(self) -> None:
        error = ""
        try:
            bundle = read_bundle(self._folder)
            if bundle.digest != self._digest:
                offer = self._terms.offer(LearnedPolicy(bundle))
                with self._lock:
                    self._ready = offer
                self._digest = bundle.digest
        except TrimtabError as fault:
            error = str(fault)
        except Exception as fault:
            # Whatever is wrong with a file, the policy at work goes on.
            error = f"{self._folder}: {type(fault).__name__}: {fault}"
        self._say(error)

    def _say(self, error: str) -> None:
        if error and error != self.error:
            _LOG.warning("bundle not taken: %s", error)
        elif self.error and not error:
            _LOG.info("bundle is right again: %s", self._folder)
        self.error = error

    def _marks(self) -> _Marks:
        """What changes when the bundle does: where the link leads, and both files' facts."""
        facts: list[tuple[int, ...]] = []
        for name in (MANIFEST_NAME, ARRAYS_NAME):
            try:
                status = (self._folder / name).stat()
                facts.append((status.st_ino, status.st_size, status.st_mtime_ns))
            except (OSError, ValueError):
                facts.append(())
        try:
            place = str(self._folder.resolve())
        except (OSError, RuntimeError):
            place = ""
        return place, tuple(facts)


def policy_source(name: str, terms: Terms) -> PolicySource:
    """The source that a policy's name in the settings means.

    Args:
        name: `static`, `reactive`, `learned` or `bundle:FOLDER`.
        terms: What the policy must fit, and how it is asked.

    Raises:
        FlagError: no policy has that name.
        BundleError: the shipped bundle was made for other tiers or pools.
    """
    if name.startswith(BUNDLE_PREFIX) and name != BUNDLE_PREFIX:
        return BundleWatch(Path(name.removeprefix(BUNDLE_PREFIX)), terms)
    return NamedPolicy(name, terms)
