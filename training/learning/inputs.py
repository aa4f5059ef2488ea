"""What a run learns from, and the record of it: traces, plan, engine, versions, command line."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from trimtab.engine_bridge.atomic import write_text
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.trace import Trace
from trimtab.training.learning.scenarios import Span, fixed_windows, split, whole
from trimtab.training.learning.settings import TrainSettings

INPUTS_FOLDER = "inputs"
_PACKAGES = (
    *("trimtab", "numpy", "numba", "gymnasium", "stable-baselines3", "torch"),
    *("mlflow-skinny", "pandas", "scipy"),
)


@dataclass(frozen=True)
class NamedTrace:
    """A trace and the file that it was read from."""

    source: str
    trace: Trace

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the trace."""
        return self.trace.digest()

    @property
    def name(self) -> str:
        """Short name, for tables."""
        return Path(self.source).name


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run learns from."""

    traces: tuple[NamedTrace, ...]
    validation: tuple[NamedTrace, ...] = ()
    """Traces to validate on; without any the end of each training trace is held back."""
    plan: Plan
    spec: EngineSpec

    def training_spans(self) -> list[Span]:
        """The stretches that episodes are cut from."""
        return self._split()[0]

    def validation_windows(self, settings: TrainSettings) -> dict[str, Trace]:
        """The windows that every validation plays, by name."""
        spans = whole([n.trace for n in self.validation]) if self.validation else self._split()[1]
        windows = fixed_windows(spans, length_s=settings.window_s, most=settings.validation_runs)
        return {f"window {number}": window for number, window in enumerate(windows)}

    def _split(self) -> tuple[list[Span], list[Span]]:
        return split([named.trace for named in self.traces], hold_back=not self.validation)

    def identity(self, settings: TrainSettings) -> dict[str, Any]:
        """All that determines the result, as JSON holds it."""
        return {
            **settings.content(),
            "traces": [named.digest for named in self.traces],
            "validation": [named.digest for named in self.validation],
            "plan": self.plan.digest,
            "engine": engine_digest(self.spec),
        }

    def write(self, folder: Path, *, command: str) -> None:
        """Write plan, engine, versions and command line into `folder`."""
        folder.mkdir(exist_ok=True)
        plan = yaml.safe_dump(self.plan.model_dump(mode="json"), sort_keys=False)
        write_text(folder / "plan.yaml", plan)
        write_text(folder / "engine.json", json.dumps(asdict(self.spec), indent=2) + "\n")
        write_text(folder / "versions.json", json.dumps(versions(), indent=2) + "\n")
        write_text(folder / "command.txt", command + "\n")


def engine_digest(spec: EngineSpec) -> str:
    """SHA-256 over all that changes a replay on the engine."""
    content = asdict(spec)
    for words in ("fidelity", "cost_per_hour"):
        del content[words]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of what computed, by name; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
