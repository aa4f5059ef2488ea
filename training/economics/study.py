"""What `trimtab frontier` found out, and its JSON form (schema 1)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from trimtab.training.economics.frontier import Frontier
from trimtab.training.whatif.schema import TraceFacts, jsonable

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class ReserveStudy:
    """Frontiers of one tier, and what is needed to repeat them."""

    tier: str
    engine: str
    engine_limits: dict[str, Any]
    plan: str
    trace: TraceFacts
    seeds: tuple[int, ...]
    frontiers: tuple[Frontier, ...]
    command: str = ""

    def to_json(self) -> str:
        """The study as JSON, the same bytes for the same study; intervals are mean, low, high."""
        content: dict[str, Any] = {"schema": SCHEMA, **dataclasses.asdict(self)}
        return json.dumps(jsonable(content), indent=1, allow_nan=False)
