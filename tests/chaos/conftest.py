"""One deployment for all faults, and the table of recoveries at the end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.vllm_server import Server

RECOVERIES = pytest.StashKey[list]()


def pytest_configure(config: pytest.Config) -> None:
    """Nothing has been tried yet."""
    config.stash[RECOVERIES] = []


@pytest.fixture(scope="session")
def recoveries(request: pytest.FixtureRequest) -> list[object]:
    """What all trials have come to so far."""
    found: list[object] = request.config.stash[RECOVERIES]
    return found


@pytest.fixture(scope="package")
def rig(
    server: Server, tmp_path_factory: pytest.TempPathFactory, recoveries: list[object]
) -> Iterator[object]:
    """The deployment, with load, and no daemon yet."""
    from tests.chaos.rig import Rig
    from tests.chaos.steady_load import SteadyLoad
    from tests.chaos.watcher import Watcher
    from tests.end_to_end.test_metrics import samples, total
    from tests.live_parts import Proxy, SocketProxy, prometheus
    from trimtab.agents import bundle as bundle_module
    from trimtab.engine_bridge.plan import load_plan

    folder = tmp_path_factory.mktemp("chaos")
    bundle = folder / "bundle"
    shutil.copytree(Path(bundle_module.__file__).parent / "bundles" / "default", bundle)
    plan = load_plan(server.folder / "plan.yaml")
    target = server.url.removeprefix("http://")
    before = samples(server)
    watcher, load = Watcher(server.folder / "control.sock", plan), SteadyLoad(server)
    with (
        prometheus(folder / "prometheus", [target]) as real,
        Proxy(real.url) as link,
        SocketProxy(server.folder / "control.sock", folder / "link.sock") as control,
    ):
        watcher.start()
        load.start()
        made = Rig(
            server, plan, real, link, control, bundle, folder, watcher, load,
            recoveries,
        )  # fmt: skip
        yield made
        made.end_daemon()
        load.close()
        watcher.close()
    assert not watcher.unlawful()
    assert not load.wrong
    # As the engine counts them: each once, and none that ended otherwise.
    after = samples(server)
    for outcome in ("finished", "cancelled", "failed", "refused", "shed", "other"):
        name, label = "trimtab_requests_total", f'outcome="{outcome}"'
        grown = total(after, name, label) - total(before, name, label)
        assert grown == (load.sent if outcome == "finished" else 0), outcome


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the recoveries; TRIMTAB_CHAOS_JSON names a file for them."""
    found = config.stash[RECOVERIES]
    if not found:
        return
    terminalreporter.section("recoveries, seconds")
    terminalreporter.line(
        f"{'fault':44}{'lasted':>8}{'static':>8}{'recovered':>10}{'acting':>8}{'requests':>9}"
        "  shown"
    )
    for one in found:
        static = "-" if one.static_after_s is None else f"{one.static_after_s:.1f}"
        terminalreporter.line(
            f"{one.fault:44}{one.lasted_s:8.1f}{static:>8}{one.recovered_s:10.1f}"
            f"{one.acting_s:8.1f}{one.requests:9}  {one.contact}: {one.shown[:120]}"
        )
    if path := os.environ.get("TRIMTAB_CHAOS_JSON"):
        Path(path).write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
