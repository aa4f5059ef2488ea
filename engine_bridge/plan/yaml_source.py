"""Reads YAML the strict way: plain data only, no key twice, no text that turns into something else.

It follows the core schema of YAML 1.2, so that `no`, `on` or `12:30` stay text. It knows nothing
about plans.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from trimtab.engine_bridge.errors import PlanError

MAX_BYTES: Final = 1 << 20


class Source:
    """One YAML document with the line of each key."""

    def __init__(self, where: str, text: str) -> None:
        """Parse the text.

        Args:
            where: What to call it in errors: the file's name.
            text: The YAML.

        Raises:
            PlanError: it is not one mapping of plain data.
        """
        self.where = where
        try:
            self._node, data = _parse(where, text)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = "" if mark is None else f" line {mark.line + 1}"
            what = error.problem or error.context or "unreadable"
            raise PlanError(f"{where}{line}", bound="valid YAML", remedy=what) from None
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            raise PlanError(where, bound="valid YAML", remedy=str(error)) from None
        except RecursionError:
            raise PlanError(where, bound="valid YAML", remedy="it is nested too deeply") from None
        if not isinstance(data, dict):
            found = "an empty file" if data is None else data
            raise PlanError(
                where,
                value=found,
                bound="a mapping of keys to values",
                remedy="start from the shipped default plan",
            )
        self.data: dict[str, Any] = data

    def place(self, path: tuple[object, ...]) -> str:
        """File and line of a key path, or of the nearest key above it that the file has."""
        node, line = self._node, None
        for part in path:
            if not isinstance(node, yaml.MappingNode):
                break
            pairs = {key.value: (key, value) for key, value in node.value}
            if part not in pairs:
                break
            key, node = pairs[part]
            line = key.start_mark.line + 1
        return self.where if line is None else f"{self.where} line {line}"


def read_source(path: Path) -> Source:
    """Read a YAML file.

    Raises:
        PlanError: it cannot be read, is too large, or is not one mapping of plain data.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise PlanError(str(path), bound="a file that exists", remedy="check the path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError(str(path), bound="a readable file", remedy=reason) from None
    if len(raw) > MAX_BYTES:
        raise PlanError(str(path), bound=f"at most {MAX_BYTES} bytes", remedy="is it a plan?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = raw[: error.start].count(b"\n") + 1
        raise PlanError(
            f"{path} line {row}", value=raw[error.start], bound="UTF-8 text", remedy="is it a plan?"
        ) from None
    return Source(str(path), text)


def _parse(where: str, text: str) -> tuple[yaml.Node | None, object]:
    loader = _CoreLoader(text)
    loader.where = where
    try:
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's idea of what is a number, and no key twice."""

    where = ""
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise PlanError(
                    f"{self.where} line {line}",
                    value=shown,
                    bound="text, because it is a key",
                    remedy="put it in quotes",
                )
            if key.value in seen:
                raise PlanError(
                    f"{self.where} line {line}",
                    key=key.value,
                    bound="given once",
                    remedy=f"it is also on line {seen[key.value]}; take one out",
                )
            seen[key.value] = line
        return super().construct_mapping(node, deep=deep)

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        # The parent reads a leading zero as octal.
        return int(self.construct_scalar(node))


_CoreLoader.add_constructor("tag:yaml.org,2002:int", _CoreLoader.construct_decimal)

for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"\A(?:{_pattern})\Z"), _first
    )
