"""`trimtab run` whose policy and wall clock can be spoiled from outside, through a file.

    python -m tests.chaos.spoiled_daemon FILE run --config ...

Everything else is the daemon as it is. FILE is JSON: `policy` (right, raises, hangs, nan, exits)
and `clock_s` (how far the wall clock is off, seconds).
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HANGS_S = 3600.0


def spoil_clock(file: Path) -> None:
    """Put the wall clock of this process off by what the file says."""
    true_s, true_ns = time.time, time.time_ns

    def off_s() -> float:
        return float(_read(file).get("clock_s", 0.0))

    time.time = lambda: true_s() + off_s()
    time.time_ns = lambda: true_ns() + int(off_s() * 1e9)


def spoil_policy(file: Path) -> None:
    """Make the learned policy behave as the file says."""
    from trimtab.agents.learned import LearnedPolicy

    right = LearnedPolicy._act

    def act(policy: LearnedPolicy, telemetry: Any, plan: Any) -> Any:
        match _read(file).get("policy", "right"):
            case "raises":
                raise ZeroDivisionError("a fault of the policy")
            case "hangs":
                _hang(file)
            case "nan":
                proposal = right(policy, telemetry, plan)
                return replace(proposal, weights=(math.nan,) * len(proposal.weights))
            case "exits":
                sys.exit(3)
        return right(policy, telemetry, plan)

    LearnedPolicy._act = act  # type: ignore[method-assign]


def _hang(file: Path) -> None:
    """Give no answer as long as the file says so: whoever is asked can only be waited for."""
    end_s = time.monotonic() + HANGS_S
    while _read(file).get("policy") == "hangs" and time.monotonic() < end_s:
        time.sleep(0.05)


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found


def main() -> None:
    """Spoil, then be the command line."""
    file = Path(sys.argv.pop(1))
    spoil_clock(file)
    spoil_policy(file)
    from trimtab.controller.cli.app import main as trimtab

    trimtab()


if __name__ == "__main__":
    main()
