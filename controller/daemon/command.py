"""What an operator can tell a loop: a value that dashboard, command line and signals all make.

Values only; a loop applies them at its next tick.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trimtab.agents.verdict import GuardMode


class CommandKind(enum.StrEnum):
    """What is asked for; a closed set."""

    HOLD = "hold"
    """Keep the allocation that is applied now."""
    RELEASE = "release"
    """End a hold, forget all trips and unlatch; the policy begins with a probation."""
    MODE = "mode"
    """Change the guard's mode."""
    RELOAD = "reload"
    """Read the policy's bundle again now."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One order of an operator to one loop."""

    kind: CommandKind
    mode: GuardMode | None = None
    """The mode to change to; set exactly where `kind` is `MODE`."""
    by: str = ""
    """Who ordered it, for the audit log: a name and the way it came."""

    def __post_init__(self) -> None:
        """Refuse an order that says two things or none."""
        if (self.mode is not None) != (self.kind is CommandKind.MODE):
            raise ValueError(f"command {self.kind}: a mode goes with {CommandKind.MODE} alone")
