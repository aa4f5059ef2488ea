"""What the daemon costs: latency of its ticks, CPU and memory beside 1, 8 and 64 engines.

    python benchmarks/daemon.py [--seconds 60] [--engines 1,8,64] [--quick] [--json F]

The daemon is a real `trimtab run` process at the shipped plan's interval of 2 s: the shipped
learned policy in active mode, audit log and dashboard on. The engines are stand-ins in another
process (tests/stand_in.py): real control sockets, real pages of metrics, traffic of the replay.
Their figures come by direct scrape, and by a real Prometheus. A tick is what the daemon shows of it
(`tick_ms`); CPU is that of its process, from the kernel, in parts of one core. Run it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.live_parts import DaemonProcess, daemon, prometheus  # noqa: E402
from tests.waiting import poll  # noqa: E402

SOURCES: Final = ("scrape", "prometheus")
WARM_UP_S: Final = 12.0
SCRAPE_INTERVAL: Final = "2s"
TRAFFIC_MINUTES: Final = 10
START_S: Final = 300.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")

Row = dict[str, Any]


@contextmanager
def engines(folder: Path, count: int) -> Iterator[dict[str, dict[str, str]]]:
    """So many stand-ins in a process of their own; where each one is."""
    told = folder / "engines.json"
    command = [sys.executable, "-m", "tests.stand_in", "--folder", str(folder)]
    command += ["--engines", str(count), "--minutes", str(TRAFFIC_MINUTES)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        poll(told.exists, what="the engines' start", deadline_s=START_S)
        yield json.loads(told.read_text())
    finally:
        process.terminate()
        process.wait(60)


def measure(folder: Path, count: int, source: str, seconds: float) -> Row:
    """One row: so many engines, read in one way."""
    with ExitStack() as stack:
        found = stack.enter_context(engines(folder, count))
        settings: dict[str, Any] = {"policy": "learned", "mode": "active"}
        at = None
        if source == "prometheus":
            targets = [one["target"] for one in found.values()]
            real = stack.enter_context(prometheus(folder / "prometheus", targets, SCRAPE_INTERVAL))
            at = real.url
        settings["engines"] = {
            name: {"control": one["control"], **_source(one, at)} for name, one in found.items()
        }
        started = stack.enter_context(daemon(folder / "daemon", settings))
        for name in found:
            started.wait_for(
                lambda state: bool(state["contact"] == "controlling"),
                what=f"control of {name}",
                engine=name,
                deadline_s=60,
            )
        time.sleep(WARM_UP_S)
        first = {name: started.state(name)["ticks"] for name in found}
        cpu_s, begun_s = _cpu_s(started), time.monotonic()
        time.sleep(seconds)
        cpu_s, wall_s = _cpu_s(started) - cpu_s, time.monotonic() - begun_s
        memory = _memory_mib(started)
        return {
            "engines": count,
            "source": source,
            "start_s": started.start_s,
            "cpu_share": cpu_s / wall_s,
            "cpu_ms_per_tick": 1e3 * cpu_s / max(1, count * wall_s / 2.0),
            **memory,
            **_ticks(started, first),
        }


def _source(engine: dict[str, str], prometheus_url: str | None) -> dict[str, Any]:
    """Where an engine's figures come from, as the settings say it."""
    if prometheus_url is None:
        return {"metrics": engine["metrics"]}
    return {"prometheus": {"url": prometheus_url, "match": {"instance": engine["target"]}}}


def _ticks(started: DaemonProcess, first: dict[str, int]) -> Row:
    """Latency of the ticks after the first ones, milliseconds."""
    took, late, contacts = [], 0, []
    for name, before in first.items():
        state = started.state(name, decisions=True)
        after = [one for one in state["decisions"] if one["number"] > before]
        took += [one["tick_ms"] for one in after]
        contacts += [one["contact"] for one in after]
        late += state["late_ticks"]
    return {
        "ticks": len(took),
        "late_ticks": late,
        "controlling_fraction": contacts.count("controlling") / max(1, len(contacts)),
        "tick_ms_p50": float(np.percentile(took, 50)),
        "tick_ms_p99": float(np.percentile(took, 99)),
        "tick_ms_max": max(took),
    }


def _cpu_s(started: DaemonProcess) -> float:
    """CPU time of the process so far, seconds."""
    stat = Path(f"/proc/{started.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / _TICKS_PER_S


def _memory_mib(started: DaemonProcess) -> Row:
    """Resident memory of the process, MiB."""
    lines = Path(f"/proc/{started.process.pid}/status").read_text().splitlines()
    found = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return {
        "resident_mib": int(found["VmRSS"].split()[0]) / 1024,
        "resident_peak_mib": int(found["VmHWM"].split()[0]) / 1024,
        "threads": int(found["Threads"]),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure every number of engines with both sources."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="measured, each row")
    parser.add_argument("--engines", default="1,8,64", help="numbers of engines")
    parser.add_argument("--quick", action="store_true", help="10 s a row")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(argv)
    seconds = 10.0 if flags.quick else flags.seconds
    rows: list[Row] = []
    for count in map(int, flags.engines.split(",")):
        for source in SOURCES:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measure(Path(folder), count, source, seconds))
            show(rows[-1])
    if flags.json is not None:
        report = {"schema": 1, "seconds": seconds, "rows": rows}
        flags.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def show(row: Row) -> None:
    """Print a row."""
    print(
        f"{row['engines']:3} engines by {row['source']:10} tick P50 {row['tick_ms_p50']:6.2f} ms"
        f"  P99 {row['tick_ms_p99']:6.2f} ms  CPU {100 * row['cpu_share']:5.2f} % of a core"
        f"  {row['resident_mib']:5.1f} MiB  start {row['start_s']:.2f} s"
        f"  {row['ticks']} ticks, {row['late_ticks']} late,"
        f" {100 * row['controlling_fraction']:.0f} % controlling",
        flush=True,
    )


if __name__ == "__main__":
    main()
