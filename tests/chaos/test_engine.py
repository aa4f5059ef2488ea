"""The engine itself is killed under load and started again; the daemon stays."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="it comes with vLLM")

from tests.chaos.rig import GUARD, Recovery
from tests.chaos.steady_load import SteadyLoad
from tests.chaos.watcher import Watcher
from tests.live_parts import daemon
from tests.vllm_server import running
from tests.waiting import free_port, poll
from trimtab.engine_bridge.plan import load_plan

pytestmark = pytest.mark.slow


def test_killed_and_started_again(tmp_path: Path, recoveries: list[Recovery]) -> None:
    folder, port = tmp_path / "engine", free_port()
    folder.mkdir()
    with ExitStack() as stack:
        with running(folder, port=port) as server:
            engine = {
                "plan": str(folder / "plan.yaml"),
                "control": str(folder / "control.sock"),
                "metrics": f"{server.url}/metrics",
            }
            settings = {"mode": "active", "guard": GUARD, "engines": {"a": engine}}
            watcher = Watcher(folder / "control.sock", load_plan(folder / "plan.yaml"))
            watcher.start()
            stack.callback(watcher.close)
            load = SteadyLoad(server)
            load.start()
            controller = stack.enter_context(daemon(tmp_path / "daemon", settings))
            controller.wait_for(lambda state: state["exposure"] > 0, what="a policy that acts")
            poll(lambda: not watcher.now.static, what="an allocation of the policy")
            os.killpg(server.process.pid, signal.SIGKILL)
            begun_s = time.monotonic()
            # Nobody is left waiting: what was under way ends, with an error.
            load.close()
            controller.wait_for(lambda state: state["contact"] == "no_control", what="no contact")
            shown, looks = controller.state()["detail"], len(watcher.looks)
        server = stack.enter_context(running(folder, port=port))
        healed_s = time.monotonic()
        load = SteadyLoad(server)
        load.start()
        controller.wait_for(lambda state: state["contact"] == "controlling", what="recovery")
        recovered_s = time.monotonic() - healed_s
        poll(lambda: not watcher.now.static, what="a policy that acts again")
        acting_s = time.monotonic() - healed_s
        # It began on the static plan, whatever the one before was told.
        assert watcher.looks[looks].static
        assert watcher.looks[looks].allocation.version == 0
        assert not watcher.unlawful()
        load.close()
        requests = load.check()
    recoveries.append(
        Recovery(
            fault="engine killed (SIGKILL), started again",
            lasted_s=healed_s - begun_s,
            static_after_s=0.0,
            recovered_s=recovered_s,
            acting_s=acting_s,
            contact="no_control",
            shown=shown,
            requests=requests,
        )
    )
