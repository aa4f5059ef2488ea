"""Small trace files in the exact form of each public format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces import ReadOptions, read_trace

Write = Callable[[str, str | bytes], Path]
Read = Callable[..., Trace]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file, packed where its name ends in .gz."""

    def do(name: str, content: str | bytes) -> Path:
        raw = content.encode() if isinstance(content, str) else content
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return path

    return do


@pytest.fixture
def read() -> Read:
    """Read with a seed and options by keyword."""

    def do(
        path: Path, *, seed: int = 0, format: str | None = None, tier: str = "T0", **options: object
    ) -> Trace:
        rng = np.random.default_rng(seed)
        chosen = ReadOptions(**options)  # type: ignore[arg-type]
        return read_trace(path, rng=rng, format=format, tier=tier, options=chosen)

    return do


def request(
    t: float, prompt: int, output: int, ids: list[int], **extra: object
) -> dict[str, object]:
    """One request of an agent session."""
    record: dict[str, object] = {
        "t": t,
        "type": "n",
        "model": "m",
        "in": prompt,
        "out": output,
        "hash_ids": ids,
        "stop": "tool_use",
        "api_time": 2.0,
        "think_time": 3.0,
    }
    return record | extra


def session(requests: list[dict[str, object]], **extra: object) -> str:
    """One agent session file."""
    record = {
        "id": "trace_1",
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": requests,
    }
    return json.dumps(record | extra)
