"""Looks at a Prometheus that the controller's figures come from: targets, intervals, alerts.

Two questions to its HTTP interface; it knows nothing of the engine itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from trimtab.controller.daemon.settings import PrometheusSettings
from trimtab.controller.doctor.finding import ODD_ANSWER, Finding, Verdict, fault_of
from trimtab.engine_bridge.live import http_get
from trimtab.engine_bridge.live.snapshot import TelemetryUnavailableError
from trimtab.engine_bridge.plan import Plan

_UNIT_S: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def look(settings: PrometheusSettings, plan: Plan, timeout_s: float) -> Iterator[Finding]:
    """Whether a Prometheus scrapes often enough, and has our rules.

    Args:
        settings: Where it is, and which target is the engine.
        plan: Of the engine; its control interval counts.
        timeout_s: Longest wait for an answer, seconds.
    """
    area = f"prometheus {settings.url}"
    headers = {}
    if settings.token_file is not None:
        try:
            text = settings.token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            # The settings' own check has told of it.
            return
        headers["Authorization"] = f"Bearer {text}"

    def asked(what: str) -> Any:
        url = f"{settings.url.rstrip('/')}/api/v1/{what}"
        status, reason, body = http_get.get(url, headers=headers, timeout_s=timeout_s)
        http_get.check_status(url, status, reason)
        return json.loads(body)["data"]

    try:
        targets, groups = asked("targets?state=active"), asked("rules?type=alert")
        yield from _scraping(area, targets["activeTargets"], settings, plan)
        yield _rules(area, [str(group["name"]) for group in groups["groups"]])
    except TelemetryUnavailableError as error:
        yield fault_of(area, "answers", error)
    except ODD_ANSWER as error:
        odd = f"{type(error).__name__}: {error}"
        yield Finding(
            area=area, check="answers", verdict=Verdict.FAULT, found=f"no Prometheus: {odd}"[:200]
        )


def _scraping(
    area: str, targets: list[dict[str, Any]], settings: PrometheusSettings, plan: Plan
) -> Iterator[Finding]:
    wanted = settings.match.items()
    matching = [
        one for one in targets if all(one["labels"].get(key) == value for key, value in wanted)
    ]
    for one in matching:
        where, interval_s = str(one["scrapeUrl"]), _duration_s(str(one["scrapeInterval"]))
        if one["health"] != "up":
            yield Finding(
                area=area,
                check=f"target {where}",
                verdict=Verdict.FAULT,
                found=f"{one['health']}: {one.get('lastError', '')}"[:200],
                remedy="see that Prometheus reaches the engine's metrics page",
            )
        elif interval_s > plan.controller.interval_s:
            yield Finding(
                area=area,
                check=f"target {where}",
                verdict=Verdict.WARNING,
                found=f"scraped every {interval_s:g} s, the controller's interval is "
                f"{plan.controller.interval_s:g} s",
                remedy="set scrape_interval to the interval, or give the engine's metrics page",
            )
        else:
            yield Finding(
                area=area,
                check=f"target {where}",
                verdict=Verdict.OK,
                found=f"up, scraped every {interval_s:g} s",
            )
    if not matching:
        labels = ", ".join(f"{key}={value}" for key, value in wanted) or "no label"
        yield Finding(
            area=area,
            check="targets",
            verdict=Verdict.FAULT,
            found=f"none of {len(targets)} active targets has {labels}",
            remedy="add the engine to scrape_configs, or mend match",
        )


def _rules(area: str, groups: list[str]) -> Finding:
    ours = [name for name in groups if name.startswith("trimtab")]
    return Finding(
        area=area,
        check="alerts",
        verdict=Verdict.OK if ours else Verdict.NOTE,
        found=f"groups {', '.join(ours)}" if ours else "none of Trimtab's alerts is loaded",
        remedy="" if ours else "add deploy/prometheus/trimtab-rules.yaml to its rule_files",
    )


def _duration_s(text: str) -> float:
    """Seconds of a duration as Prometheus writes it, for instance 1m30s."""
    total, digits, rest = 0.0, "", text
    while rest:
        digits = rest[: len(rest) - len(rest.lstrip("0123456789."))]
        rest = rest[len(digits) :]
        unit = "ms" if rest.startswith("ms") else rest[:1]
        total += float(digits) * _UNIT_S[unit]
        rest = rest[len(unit) :]
    return total
