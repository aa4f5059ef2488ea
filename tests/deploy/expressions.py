"""What a PromQL expression names: metrics, and labels with the values that they must have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
PROMETHEUS: Final = ROOT / "deploy" / "prometheus"
RULES: Final = PROMETHEUS / "trimtab-rules.yaml"
DASHBOARD: Final = ROOT / "deploy" / "grafana" / "trimtab.json"
VARIABLES: Final = {"$job": ".*", "$instance": ".*", "$loop": ".*", "$__rate_interval": "1m"}
"""What stands for Grafana's variables where Prometheus itself is asked."""

_TEXT = re.compile(r'"[^"]*"|\'[^\']*\'')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)\s*\{([^}]*)\}")
_WORD = re.compile(r"[A-Za-z_:][\w:]*(?!\w)\s*\(?")
_OPERATORS = {"and", "or", "unless", "bool", "offset", "inf", "nan", "by", "on"}


def metrics(expression: str) -> set[str]:
    """Names of the metrics that an expression reads."""
    text = re.sub(r"\{[^}]*\}", "", _TEXT.sub('""', expression))
    text = _GROUPING.sub("", re.sub(r"\[[^\]]*\]", "", text))
    text = re.sub(r"\boffset\s+\w+|\b\d[\w.]*", "", text)
    words = [word.strip() for word in _WORD.findall(text)]
    return {word for word in words if not word.endswith("(")} - _OPERATORS


def wanted_labels(expression: str) -> list[tuple[str, str, str]]:
    """Metric, label and value of every `label="value"` in an expression."""
    found = []
    for metric, matchers in _SELECTOR.findall(expression):
        for label, value in re.findall(r'(\w+)\s*=\s*"([^"]*)"', matchers):
            found.append((metric, label, value))
    return found


def rules() -> list[dict[str, Any]]:
    """Every rule of the shipped file."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """The shipped dashboard."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def dashboard_expressions() -> list[str]:
    """Every expression of the dashboard's panels, with Grafana's variables filled in."""
    found = []
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for variable, value in VARIABLES.items():
                text = text.replace(variable, value)
            found.append(text)
    return found


def template_queries() -> list[str]:
    """Expressions inside annotations, with their places filled in."""
    found = []
    for rule in rules():
        for text in rule.get("annotations", {}).values():
            for query in re.findall(r'printf "([^"]*)"', text):
                found.append(query.replace("'%s'", '".*"').replace("=", "=~"))
    return found
