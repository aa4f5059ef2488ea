"""The draft section of an engine file: what it gives, and one line for every fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.engine_file import read_engine_file, write_engine_file
from trimtab.engine_bridge.engine_spec import find_engine_file, get_engine_spec
from trimtab.engine_bridge.errors import EngineSpecError

NAME = "h100:llama-3.1-8b-tp1"
DRAFT = {
    "label": "code",
    "tokens": 4,
    "us_per_token": 12.5,
    "pass_ms": 0.3,
    "acceptance": {"T0": 0.75, "T2": 0.4},
    "kept": 0.9,
}


def written(tmp_path: Path, draft: Any) -> Path:
    content = find_engine_file(NAME).model_dump(exclude_none=True) | {"draft": draft}
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_an_engine_file_may_have_a_draft_model(tmp_path: Path) -> None:
    spec = get_engine_spec(written(tmp_path, DRAFT))
    assert spec.draft == DraftSpec(
        label="code",
        tokens=4,
        us_per_token=12.5,
        pass_ms=0.3,
        acceptance=(("T0", 0.75), ("T2", 0.4)),
        kept=0.9,
    )
    assert get_engine_spec(NAME).draft is None


def test_it_is_written_as_it_was_read(tmp_path: Path) -> None:
    file = read_engine_file(written(tmp_path, DRAFT))
    write_engine_file(file, tmp_path / "again.yaml")
    assert read_engine_file(tmp_path / "again.yaml") == file


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokens": 0}, r"draft\.tokens.*0"),
        ({"tokens": 65}, r"draft\.tokens.*65"),
        ({"tokens": None}, r"draft\.tokens"),
        ({"us_per_token": -1.0}, r"draft\.us_per_token.*-1"),
        ({"kept": 0.0}, r"draft\.kept.*0"),
        ({"acceptance": {"T0": 1.2}}, r"draft\.acceptance.*T0 = 1\.2.*from 0 to 1"),
        ({"tokenz": 4}, r'draft\.tokenz.*did you mean "tokens"'),
    ],
)
def test_a_fault_is_told_in_one_line(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = written(tmp_path, DRAFT | change)
    with pytest.raises(EngineSpecError, match=told) as fault:
        get_engine_spec(path)
    assert str(path) in str(fault.value)
    assert "\n" not in str(fault.value)
