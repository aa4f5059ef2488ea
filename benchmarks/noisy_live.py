"""`noisy_neighbour` as a user sees it: real requests to an emulated server, in real time.

Clients, server and engine share the machine: run it alone. It judges nothing.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from live_clients import Clients, server
from noisy_traffic import NOISY, QUIET, Workload

from trimtab.engine_bridge.plan import load_plan, with_values

QUOTA: Final = {"tenants": {"noisy": {"requests_per_second": 10}}}
ROWS: Final = (
    ("alone, stock", ("--stock", "fcfs"), False, False),
    ("stock FCFS", ("--stock", "fcfs"), False, False),
    ("shipped plan", (), False, False),
    ("isolation", (), True, False),
    ("isolation, quota a second", (), True, True),
)
"""Name, flags of the server, whether the plan isolates, whether the quota holds."""


def live(
    engine: str, workload: Workload, isolation: Mapping[str, object], minutes: float
) -> list[dict[str, Any]]:
    """Each row for so many minutes; ratios are to the quiet tenant alone under stock vLLM."""
    found: list[dict[str, Any]] = []
    for name, flags, isolates, limited in ROWS:
        plan = with_values(load_plan(), isolation if isolates else {})
        trace = workload.trace(plan, seed=0, minutes=minutes, solo=name.startswith("alone"))
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            (folder / "plan.yaml").write_text(plan.model_dump_json())
            (folder / "admission.yaml").write_text(json.dumps(QUOTA))
            more = ["--plan", str(folder / "plan.yaml"), *flags]
            more += ["--admission", str(folder / "admission.yaml")] if limited else []
            with server(folder, engine, *more) as url:
                clients = Clients(url, engine.rpartition(":")[2], trace)
                asyncio.run(clients.run())
        line: dict[str, Any] = {"row": name, "refused_or_failed": len(clients.failed)}
        for tenant, number in (("quiet", QUIET), ("noisy", NOISY)):
            seen = [s for row, s in clients.seen.items() if trace.tenant[row] == number]
            ttft = [1e3 * (s.first_s - s.sent_s) for s in seen] or [float("nan")]
            line[f"{tenant}_requests"] = len(seen)
            line[f"{tenant}_p50_ms"] = float(np.quantile(ttft, 0.5))
            line[f"{tenant}_p99_ms"] = float(np.quantile(ttft, 0.99))
        line["ratio"] = line["quiet_p99_ms"] / (found[0] if found else line)["quiet_p99_ms"]
        print(json.dumps(line), flush=True)
        found.append(line)
    return found
