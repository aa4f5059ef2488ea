"""The proxies under test as processes: nginx, Trimtab's gateway, LiteLLM's proxy.

What cannot be had here is None, never a fault.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.engine import MODEL

KEY = "sk-benchmark"
PROMPT = "Say what you think of it. " * 40
START_S = 23.0
INSTALL_S = 600.0
PEERS = ("nginx", "trimtab", "litellm")
NO_LIMIT = 100_000_000


@dataclass
class Target:
    """A way to the engine, and what was measured on it."""

    name: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    whole_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """CPU time of the proxy's processes until now, seconds."""
        assert self.process is not None
        return sum(map(_cpu_s, _family(self.process.pid)))


def _family(leader: int) -> list[int]:
    family, found = [leader], {leader}
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda one: int(one.name)):
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) in found and int(entry.name) not in found:
                found.add(int(entry.name))
                family.append(int(entry.name))
    return family


def _cpu_s(pid: int) -> float:
    """Of all its threads; finer than the clock ticks in `stat`."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total_ns += int(thread.read_text().split()[0])
    return total_ns / 1e9


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start(command: list[str], folder: Path, env: dict[str, str] | None = None) -> Any:
    """Start a process that ends with this one's `stop`; its output goes to a file."""
    with (folder / f"{Path(command[0]).name}.log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, env=os.environ | (env or {}),
            start_new_session=True,
        )  # fmt: skip


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start_nginx(peers: Path, folder: Path, engine: int) -> Target | None:
    """Nginx as a bare reverse proxy; None: it is not to be had."""
    program = shutil.which("nginx") or str(peers / "nginx/usr/sbin/nginx")
    if not Path(program).exists() and not _unpack_nginx(peers / "nginx"):
        return None
    port = free_port()
    temporary = "\n".join(
        f"  {kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr;\n"
        "events { worker_connections 1024; }\n"
        f"http {{\n  access_log off;\n{temporary}\n"
        f"  upstream engine {{ server 127.0.0.1:{engine}; keepalive 64; }}\n"
        f"  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://engine;\n"
        '    proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; } }\n}\n'
    )
    command = [program, "-c", str(folder / "nginx.conf"), "-e", "stderr", "-p", str(folder)]
    return Target("nginx", port, start(command, folder))


def _unpack_nginx(folder: Path) -> bool:
    """Unpacked, not installed: Debian's package would start a service."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fetch = ["apt-get", "download", "-qq", "nginx", "nginx-common"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(fetch, cwd=folder, check=True, timeout=15, **quiet)  # type: ignore[call-overload]
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True, timeout=15)
    except (subprocess.SubprocessError, OSError):
        return False
    return (folder / "usr/sbin/nginx").exists()


def start_trimtab(folder: Path, engine: int) -> Target:
    """The gateway with keys and quotas."""
    port = free_port()
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (folder / "keys.yaml").write_text(f"acme: {{tier: T0, keys_sha256: [{digest}]}}\n")
    (folder / "admission.yaml").write_text(
        f"tiers: {{T0: {{requests_per_minute: {NO_LIMIT}, prompt_tokens_per_minute: {NO_LIMIT},\n"
        f"  output_tokens_per_minute: {NO_LIMIT}, concurrent_requests: 100000}}}}\n"
    )
    (folder / "gateway.yaml").write_text(
        f"listen: 127.0.0.1:{port}\nadmin: null\nkeys: keys.yaml\nadmission: admission.yaml\n"
        f'engines: {{a: {{url: "http://127.0.0.1:{engine}", models: [{MODEL}]}}}}\n'
    )
    command = [sys.executable, "-m", "trimtab.controller.cli.app", "gateway"]
    return Target("trimtab", port, start([*command, "--config", "gateway.yaml"], folder))


def start_litellm(peers: Path, folder: Path, engine: int, *, install: bool) -> Target | None:
    """LiteLLM's proxy with a key and quotas, without a database; None: it is not to be had."""
    program = peers / "litellm/bin/litellm"
    if not program.exists() and not (install and _install_litellm(peers / "litellm")):
        return None
    port = free_port()
    (folder / "who.py").write_text(
        "from fastapi import HTTPException, Request\n"
        "from litellm.proxy._types import UserAPIKeyAuth\n"
        "async def who(request: Request, api_key: str) -> UserAPIKeyAuth:\n"
        f"    if api_key != {KEY!r}:\n"
        "        raise HTTPException(401, 'unknown key')\n"
        "    return UserAPIKeyAuth(api_key=api_key, user_id='acme', max_parallel_requests=100000,\n"
        f"        rpm_limit={NO_LIMIT}, tpm_limit={NO_LIMIT})\n"
    )
    (folder / "litellm.yaml").write_text(
        f"model_list: [{{model_name: {MODEL}, litellm_params: {{model: openai/{MODEL},\n"
        f'  api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}}}]\n'
        "litellm_settings: {telemetry: false, num_retries: 0}\n"
        "general_settings: {custom_auth: who.who}\n"
    )
    command = [str(program), "--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port)]
    env = {
        "LITELLM_MASTER_KEY": f"sk-{secrets.token_hex(32)}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
    }
    return Target("litellm", port, start([*command, "--num_workers", "1"], folder, env))


def _install_litellm(folder: Path) -> bool:
    print("installing LiteLLM's proxy; this takes minutes", file=sys.stderr)
    try:
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "litellm[proxy]"]
        subprocess.run(pip, check=True, timeout=INSTALL_S)
    except (subprocess.SubprocessError, OSError):
        return False
    return (folder / "bin/litellm").exists()


def answers(target: Target, until_s: float) -> bool:
    """Wait until a whole request goes through."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{target.port}/v1/chat/completions",
        data=body(stream=False),
        headers={"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    while time.monotonic() < until_s:
        if target.process is not None and target.process.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:  # not there yet, or not ready
            pass
        time.sleep(0.05)
    return False


@contextlib.contextmanager
def all_targets(peers: Path, *, install: bool, hurry: bool) -> Iterator[dict[str, Target]]:
    """The direct way and every proxy that is to be had, ready to answer.

    Args:
        peers: Folder for what is not installed on this machine.
        install: Whether to install LiteLLM where it is missing.
        hurry: Whether to leave LiteLLM out if it takes long to start.
    """
    with tempfile.TemporaryDirectory(prefix="trimtab-gateway-") as name:
        folder, engine = Path(name), free_port()
        direct = Target("direct", engine)
        program = [sys.executable, str(Path(__file__).with_name("engine.py")), str(engine)]
        processes = [start(program, folder)]
        try:
            # It takes longest to start, and does not mind that the engine is not there yet.
            litellm = start_litellm(peers, folder, engine, install=install)
            began_s = time.monotonic()
            answers(direct, began_s + START_S)
            found = [
                litellm,
                start_trimtab(folder, engine),
                start_nginx(peers, folder, engine),
            ]
            started = [one for one in found if one is not None]
            processes += [one.process for one in started if one.process is not None]
            patience_s = {"litellm": START_S if hurry else 8 * START_S}
            ready = {
                one.name: one
                for one in reversed(started)
                if answers(one, began_s + patience_s.get(one.name, 2.0 * START_S))
            }
            yield {"direct": direct} | {name: ready[name] for name in PEERS if name in ready}
        finally:
            for process in processes:
                stop(process)


def body(*, stream: bool) -> bytes:
    """One request's body."""
    messages = [{"role": "user", "content": PROMPT}]
    return json.dumps({"model": MODEL, "messages": messages, "stream": stream}).encode()


def head(length: int) -> bytes:
    """Its head."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n" % (KEY.encode(), length)
    )
