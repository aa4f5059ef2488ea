"""Runs the gateway: listens, looks after the engines, reloads, drains.

One process, one event loop. SIGTERM and SIGINT end it once open requests are done; SIGHUP reads the
settings anew, without dropping a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uvicorn
from prometheus_client import CollectorRegistry

from trimtab.engine_bridge.admission.core import Admission
from trimtab.engine_bridge.admission.metrics import AdmissionMetrics
from trimtab.engine_bridge.errors import InputError
from trimtab.engine_bridge.gateway import setup as setups
from trimtab.engine_bridge.gateway.admin import make_admin
from trimtab.engine_bridge.gateway.admitting import judging_spec, open_admission
from trimtab.engine_bridge.gateway.exchange import Exchange
from trimtab.engine_bridge.gateway.fleet import Fleet
from trimtab.engine_bridge.gateway.metrics import GatewayMetrics
from trimtab.engine_bridge.gateway.prober import Prober
from trimtab.engine_bridge.gateway.protocol import Bounds, bounded
from trimtab.engine_bridge.gateway.proxy import Proxy
from trimtab.engine_bridge.gateway.settings import GatewaySettings
from trimtab.engine_bridge.gateway.waiting import WaitingRoom

_LOG: Final = logging.getLogger("trimtab.gateway")
_TICK_S: Final = 1.0
_BACKLOG: Final = 2048
_FIXED: Final = ("listen", "admin", "caps", "usage_dir", "traces")
"""Settings that hold until the next start. Of `caps` connections, heads and bodies at once."""


class ListenError(InputError):
    """Nothing can listen at an address of the settings."""


class _Server(uvicorn.Server):
    """uvicorn's server; signals are the gateway's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway:
    """One gateway from `run` to the signal that ends it."""

    def __init__(self, config: Path, files: setups.Files) -> None:
        """Take what was read.

        Args:
            config: The settings' file, for reloads.
            files: What it holds and names.
        """
        self._config, self._files = config, files
        self._stopping = False
        self._reloading = asyncio.Lock()
        self._probes: dict[int, asyncio.Task[None]] = {}
        self._accounts = setups.make_accounts(files)
        self._tracing = setups.make_tracing(files)
        self._engine_key = setups.engine_key()
        self._registry = CollectorRegistry()
        self._metrics = GatewayMetrics(self._registry)
        if self._tracing is not None:
            self._metrics.show_spans(self._tracing.export.counts)
        self._admission_metrics = AdmissionMetrics(files.plan.tiers, self._registry)
        self._admission: Admission | None = None
        self._main: _Server | None = None
        self.port = 0
        """Where clients are served, once it runs."""
        self.admin_port = 0
        """Where health and metrics are served; 0: nowhere."""

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            ListenError: an address is taken, not ours or not allowed.
        """
        settings = self._files.settings
        sockets = [_bind(settings.listen, "listen")]
        if settings.admin is not None:
            sockets.append(_bind(settings.admin, "admin"))
        self.port = sockets[0].getsockname()[1]
        self.admin_port = sockets[1].getsockname()[1] if len(sockets) > 1 else 0
        loop = self._loop = asyncio.get_running_loop()
        self._setup = self._make_setup(self._files, before=None)
        self._waiting = WaitingRoom(settings.caps.waiting, monotonic_s=loop.time)
        self._proxy = Proxy(self._setup, self._waiting, self, engine_key=self._engine_key)
        if self._tracing is not None:
            self._proxy.tracer = self._tracing.tracer
            self._tracing.export.start()
        self._prober = Prober(
            monotonic_s=loop.time, on_good_look=self._waiting.wake, engine_key=self._engine_key
        )
        self._metrics.show_with(
            lambda: self._setup.fleet,
            waiting=lambda: self._waiting.lengths,
            open_requests=lambda: len(self._proxy.open),
            held_bytes=lambda: self._proxy.bodies.held_bytes,
            lost_rows=lambda: 0 if self._accounts is None else self._accounts.lost_rows,
        )
        servers = [_server(self._proxy, settings)]
        if len(sockets) > 1:
            servers.append(self._admin_server())
        self._main = servers[0]
        await self._first_look()
        self._set_signals()
        upkeep = loop.create_task(self._upkeep())
        # What was imported stays: no collection has to look through it again.
        gc.collect()
        gc.freeze()
        _LOG.info("serving %s, admin %s", settings.listen, settings.admin)
        try:
            await self._serve(servers, sockets)
        finally:
            upkeep.cancel()
            for probe in self._probes.values():
                probe.cancel()
            self._setup.fleet.close_but(None)
            if self._admission is not None:
                await self._admission.close()
            if self._accounts is not None:
                await asyncio.to_thread(self._accounts.close)
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.export.close)
            _LOG.info("stopped")

    @property
    def started(self) -> bool:
        """Whether clients are served."""
        return self._main is not None and self._main.started

    # What the proxy tells.

    def retried(self, engine: str, fault: str) -> None:
        """An engine failed before its first byte."""
        self._metrics.retried(engine, fault)

    def done(self, exchange: Exchange, now_s: float) -> None:
        """A request has ended."""
        self._metrics.done(exchange, now_s)
        if self._accounts is not None:
            self._accounts.add(exchange, now_s)
        if self._tracing is not None:
            self._tracing.tracer.end(exchange)

    # Reload and stop.

    def stop(self) -> None:
        """Take no new connections and end once open requests are done; told again, end at once."""
        if self._stopping and self._main is not None:
            self._main.force_exit = True
            return
        self._stopping = True
        _LOG.info("stopping: %d requests are open", len(self._proxy.open))
        if self._main is not None:
            self._main.should_exit = True

    async def reload(self) -> None:
        """Read the settings anew; if they are not in order the old ones stay."""
        async with self._reloading:
            await self._reload()

    async def _reload(self) -> None:
        try:
            files = await asyncio.to_thread(setups.read_files, self._config)
        except InputError as error:
            _LOG.error("the settings stay as they were: %s", error)
            return
        if files.plan.tier_names != self._files.plan.tier_names:
            _LOG.error("the settings stay as they were: tiers change with the next start only")
            return
        old, new = self._setup.settings, files.settings
        for key in _FIXED:
            if getattr(old, key) != getattr(new, key):
                _LOG.warning("%s counts from the next start", key)
        before = self._setup
        try:
            self._setup = self._make_setup(files, before=before.fleet)
        except InputError as error:
            _LOG.error("the settings stay as they were: %s", error)
            return
        self._files = files
        if self._accounts is not None:
            self._accounts.set_engines(files.specs)
        await self._first_look()
        # The new engines are known: from here on requests go to them, open ones stay.
        self._proxy.setup = self._setup
        self._waiting.most = new.caps.waiting
        before.fleet.close_but(self._setup.fleet)
        self._waiting.wake()
        _LOG.info("settings read: engines %s", ", ".join(self._setup.fleet.engines))

    def _make_setup(self, files: setups.Files, *, before: Fleet | None) -> setups.Setup:
        """Make engines and limits of what was read; if either cannot be, nothing has changed."""
        fleet = setups.make_fleet(files, before=before, monotonic_s=self._loop.time)
        try:
            admission = self._admit_by(files)
        except BaseException:
            fleet.close_but(before)
            raise
        fleet.take_over()
        return setups.Setup(
            files.settings, files.identifier, fleet, admission, setups.slice_tokens(files.plan)
        )

    def _admit_by(self, files: setups.Files) -> Admission | None:
        """Admission with these limits; what it has counted stays over a reload."""
        if files.admission is None:
            return None
        spec = judging_spec(files.settings, files.specs)
        if self._admission is not None:
            self._admission.reconfigure(files.admission, files.plan, spec)
        else:
            self._admission = open_admission(
                files.admission,
                files.plan,
                spec,
                fleet=lambda: self._setup.fleet,
                engine_key=self._engine_key,
                monotonic_s=self._loop.time,
                observer=self._admission_metrics,
            )
        return self._admission

    def _set_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stop)
        self._reloads: set[asyncio.Task[None]] = set()
        self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_hangup(self) -> None:
        task = self._loop.create_task(self.reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    # Engines.

    async def _first_look(self) -> None:
        """Look at each new engine once and go on looking; drop the probes of those that left."""
        engines = self._setup.fleet.engines.values()
        probes = self._setup.settings.probes
        kept = {id(engine) for engine in engines}
        for key in [key for key in self._probes if key not in kept]:
            self._probes.pop(key).cancel()
        new = [engine for engine in engines if id(engine) not in self._probes]
        await asyncio.gather(*(self._prober.look(engine, probes.time_out_s) for engine in new))
        for engine in engines:
            known = self._probes.pop(id(engine), None)
            if known is not None:
                known.cancel()
            self._probes[id(engine)] = self._loop.create_task(
                self._prober.watch(engine, probes.every_s, probes.time_out_s)
            )

    async def _upkeep(self) -> None:
        renewed_s = self._loop.time()
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = self._loop.time()
            self._proxy.end_stalled(now_s)
            if self._admission is not None:
                self._show(self._admission)
                if now_s - renewed_s >= self._admission.renew_every_s:
                    renewed_s = now_s
                    await self._renew(self._admission)
            if self._accounts is not None:
                self._accounts.flush_if_old(now_s)

    def _show(self, admission: Admission) -> None:
        self._admission_metrics.show(
            open_requests=admission.open_tickets,
            slowed_tenants=admission.slowed_tenants,
            storage_failures=admission.storage_failures,
        )

    async def _renew(self, admission: Admission) -> None:
        try:
            await admission.renew()
        except Exception:
            # Upkeep must go on; the places of open requests come back a little early.
            _LOG.exception("places of open requests could not be renewed")

    # Serving.

    async def _serve(self, servers: list[_Server], sockets: list[socket.socket]) -> None:
        main = self._loop.create_task(servers[0].serve([sockets[0]]))
        others = [
            self._loop.create_task(server.serve([bound]))
            for server, bound in zip(servers[1:], sockets[1:], strict=True)
        ]
        try:
            await main
        finally:
            # Health and metrics stay until the last request is done.
            for server in servers[1:]:
                server.should_exit = True
            await asyncio.gather(*others, return_exceptions=True)

    def _admin_server(self) -> _Server:
        app = make_admin(self._metrics, self._registry, self._unready)
        return _Server(_config(app, drain_s=1))

    def _unready(self) -> str:
        if self._stopping:
            return "stopping"
        return "" if self._setup.fleet.ready else "no engine can be used"


def _server(app: Proxy, settings: GatewaySettings) -> _Server:
    times, caps = settings.time_outs, settings.caps
    bounds = Bounds(
        head_bytes=caps.head_kib << 10,
        head_s=times.head_s,
        stalled_client_s=times.stalled_client_s,
        connections=caps.connections,
    )
    config = _config(app, drain_s=times.drain_s)
    config.http = bounded(bounds)
    config.timeout_keep_alive = int(times.keep_alive_s) or 1
    return _Server(config)


def _config(app: object, *, drain_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=max(1, int(drain_s)),
    )


def _bind(listen: str, key: str) -> socket.socket:
    host, separator, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65_535:
        raise ListenError(key, value=listen, bound="host:port, for instance 127.0.0.1:8080")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, int(port)))
        listening.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        listening.close()
        why = getattr(error, "strerror", None) or "this is no name of a host"
        raise ListenError(
            key,
            value=listen,
            remedy=f"{why}; choose another port, or stop who listens there",
        ) from None
    listening.setblocking(False)
    return listening
