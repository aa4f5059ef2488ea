"""The errors that Trimtab raises on purpose, as one tree with one exit code a branch.

It is not a place for messages: whoever finds a fault says where it is and how to mend it.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Final

_ABSENT: Final = object()
_LONGEST_VALUE = 120
_ABRIDGED = reprlib.Repr()
_ABRIDGED.maxlevel = 3
_ABRIDGED.maxother = _LONGEST_VALUE


class TrimtabError(Exception):
    """Root of the tree: the command failed, although its input was right."""

    exit_code: int = 1
    """What the command line exits with."""


class InputError(TrimtabError):
    """The user's input is wrong; the text is one line: where, key, value, bound, remedy."""

    exit_code = 2

    def __init__(
        self,
        where: str,
        *,
        key: str = "",
        value: object = _ABSENT,
        bound: str = "",
        remedy: str = "",
    ) -> None:
        """Describe one fault.

        Args:
            where: File, file and row, or flag, for instance `plan.yaml` or `azure.csv row 12`.
            key: Path of the key, column or knob inside `where`, for instance `tiers.T0.weight`.
            value: The value that was found; left out where there is none to show.
            bound: What would be right, for instance `above 0`.
            remedy: What the user can do about it.
        """
        self.where = where
        self.key = key
        self.value = value
        self.bound = bound
        self.remedy = remedy
        super().__init__(self._line())

    def _line(self) -> str:
        place = ": ".join(part for part in (self.where, self.key) if part)
        found = "" if self.value is _ABSENT else _shown(self.value)
        must = f"must be {self.bound}" if self.bound else ""
        fault = ", ".join(part for part in (found, must) if part)
        line = ": ".join(part for part in (place, fault) if part)
        if self.remedy:
            line = f"{line}; {self.remedy}" if line else self.remedy
        return _printable(line)


class PlanError(InputError):
    """A plan file is not a plan."""


class TraceError(InputError):
    """Recorded traffic cannot be read or contradicts itself."""


class EngineSpecError(InputError):
    """An engine's name or file is not known, or its facts contradict each other."""


class AllocationError(InputError):
    """An allocation does not have the shape that its plan asks for."""


class ActionError(InputError):
    """An action, or what is said to lay actions out, is not what the plan asks for."""


class EpisodeError(InputError):
    """An environment cannot make an episode of what it was given."""


class BundleError(InputError):
    """A policy bundle cannot be read, contradicts itself, or was made for something else."""


class FlagError(InputError):
    """A command-line flag has a value that the command cannot use."""


class TableError(InputError):
    """A table of measurements cannot be read."""


class ModelError(InputError):
    """A model registry has no such model, version or alias, or cannot be reached."""


class TrainingError(TrimtabError):
    """Training cannot go on: its figures are no numbers any more, or its files are gone."""


class PromotionError(TrimtabError):
    """A model was not promoted, because a line of the gate failed."""


class IncidentError(TrimtabError):
    """A reported incident was not reproduced, or not cured; the line says which."""


class ReplayError(TrimtabError):
    """The replay broke one of its own invariants: a fault of Trimtab, not of its input."""


def did_you_mean(name: object, candidates: Iterable[str]) -> str:
    """Suggest the candidate that a mistyped name most resembles.

    Args:
        name: What the user wrote.
        candidates: The names that exist.

    Returns:
        `did you mean "T0"?`, or an empty string where nothing is close.
    """
    by_folded: dict[str, str] = {}
    for candidate in candidates:
        by_folded.setdefault(candidate.casefold(), candidate)
    close = difflib.get_close_matches(str(name).casefold(), list(by_folded), n=1, cutoff=0.5)
    return f'did you mean "{by_folded[close[0]]}"?' if close else ""


def _shown(value: object) -> str:
    """Render a found value on one short line, whatever it is."""
    if isinstance(value, str):
        text = f'"{value}"'
    elif value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        # A scalar of numpy shows as the number that the user wrote; a nested value is abridged,
        # because aliases in YAML can make it exponentially long.
        item = getattr(value, "item", None)
        text = _ABRIDGED.repr(item() if callable(item) and not hasattr(value, "__len__") else value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def _printable(text: str) -> str:
    """Fold white space and escape what a terminal would obey or refuse to encode."""
    folded = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in folded)
