"""The daemon: one process, a thread for each engine's loop, and nothing that waits for another.

Threads: the caller's (signals), one a loop, one that looks for newer bundles, the web server's, and
those that the parts of a loop bring along. What a loop does is `loop`'s business.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Final

from trimtab.agents.verdict import GuardMode
from trimtab.controller.daemon import parts
from trimtab.controller.daemon.audit_log import Audit
from trimtab.controller.daemon.bundle_watch import BundleWatch, PolicySource, policy_source
from trimtab.controller.daemon.command import Command, CommandKind
from trimtab.controller.daemon.loop import EngineLoop
from trimtab.controller.daemon.pace import Pace, awake_clock_s
from trimtab.controller.daemon.settings import DaemonSettings
from trimtab.controller.daemon.state import Contact, LoopState
from trimtab.controller.web.app import make_app
from trimtab.controller.web.serve import WebServer, parse_listen
from trimtab.controller.web.token import check_token, own_token
from trimtab.engine_bridge.errors import TrimtabError
from trimtab.engine_bridge.plan import Plan, load_plan

FAULTS_TO_REPLACE: Final = 3
"""So many ticks in a row that fail by a fault of our own, and the loop is made anew."""
BUNDLE_LOOK_S: Final = 2.0
"""Time between two looks for newer bundles, seconds."""
STOP_S: Final = 10.0
"""Longest wait for the loops to end, seconds; a tick is shorter."""
SEED: Final = 0
_LEAST_CLOSE_S: Final = 0.1
_LOG: Final = logging.getLogger("trimtab.daemon")
_OF_SIGNAL: Final = {
    signal.SIGUSR1: CommandKind.HOLD,
    signal.SIGUSR2: CommandKind.RELEASE,
    signal.SIGHUP: CommandKind.RELOAD,
}
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


class HeldElsewhereError(TrimtabError):
    """Another controller holds an engine's lease, and nobody wants to wait for it."""


class Daemon:
    """All loops, from `start` to `stop`; meets `web.view.DaemonView`."""

    def __init__(self, settings: DaemonSettings, *, waits: bool = True) -> None:
        """Read plans and policies, so that what is wrong in the settings shows at once.

        Args:
            settings: Which engines, by which policy.
            waits: Whether to wait in standby for an engine that another controller holds.

        Raises:
            InputError: a plan, policy, address or token is not in order.
        """
        self._settings, self._waits = settings, waits
        self._plans = {name: load_plan(own.plan) for name, own in settings.engines.items()}
        self._sources = {
            name: policy_source(settings.policy_of(name), parts.terms(plan, SEED))
            for name, plan in self._plans.items()
        }
        for name, plan in self._plans.items():
            # It opens nothing, but a wrong address shows.
            parts.live_engine(name, settings, plan, parts.holder_name()).close()
        if settings.listen is not None:
            parse_listen(settings.listen)
        self._audits: dict[str, Audit] = {}
        self._loops: dict[str, EngineLoop] = {}
        self._server: WebServer | None = None
        self._orders: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        self._ending, self._look_now = threading.Event(), threading.Event()
        self._refused = ""
        self._threads: list[threading.Thread] = []

    def check(self) -> None:
        """Check what only a start would show; nothing is made or opened.

        Raises:
            InputError: the token for orders cannot be read or kept.
        """
        if self._settings.listen is not None:
            check_token(self._settings.state_dir, os.environ)

    @property
    def loops(self) -> Mapping[str, EngineLoop]:
        """The loops by their engine's name."""
        return self._loops

    @property
    def url(self) -> str | None:
        """Where the dashboard is; None without one."""
        return None if self._server is None else self._server.url

    def states(self) -> Mapping[str, LoopState]:
        """The newest state of every loop, in the order of the settings."""
        return {name: loop.state for name, loop in self._loops.items()}

    def command(self, engine: str | None, command: Command) -> None:
        """Give an order to one loop, or to all for None."""
        for name in self._loops if engine is None else (engine,):
            self._loops[name].command(command)
        if command.kind is CommandKind.RELOAD:
            self._look_now.set()

    def now_unix_s(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def start(self) -> None:
        """Begin to serve the dashboard and to tick.

        Raises:
            ListenError: nothing can listen at the address of the settings.
        """
        for name in self._settings.engines:
            self._audits[name] = parts.audit_log(name, self._settings)
            self._loops[name] = self._make_loop(name, self._settings.mode_of(name))
        if self._settings.listen is not None:
            self._server = self._web(self._settings.listen)
            self._server.start()
        for place, name in enumerate(self._loops):
            self._spawn(f"trimtab-{name}", partial(self._drive, name, place))
        watches = [source for source in self._sources.values() if isinstance(source, BundleWatch)]
        if watches:
            self._spawn("trimtab-bundles", partial(self._look, watches))
        for name, loop in self._loops.items():
            state, plan = loop.state, self._plans[name]
            _LOG.info(
                "%s: policy %s, mode %s, plan %s %s, figures from %s",
                name, state.policy, state.mode, plan.name, plan.digest[:12], loop.engine.place,
            )  # fmt: skip
        many = "1 engine" if len(self._loops) == 1 else f"{len(self._loops)} engines"
        _LOG.info("%s%s", many, "" if self.url is None else f", {self.url}")

    def stop(self) -> None:
        """End the loops, give their leases back and write the records out."""
        self._ending.set()
        self._look_now.set()
        until_s = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        for audit in self._audits.values():
            audit.close(max(_LEAST_CLOSE_S, until_s - time.monotonic()))
        if self._server is not None:
            self._server.stop()

    def run(self) -> None:
        """Start, obey signals until one ends it, and stop.

        SIGUSR1 holds all engines, SIGUSR2 releases all, SIGHUP reads the bundles again, SIGTERM and
        SIGINT end it. Only the main thread may call it.

        Raises:
            HeldElsewhereError: another controller holds an engine, and `waits` is false.
            ListenError: nothing can listen at the address of the settings.
        """
        with self._signals():
            self.start()
            try:
                while (number := self._orders.get()) not in _ENDING:
                    kind = _OF_SIGNAL[number]
                    self.command(None, Command(kind=kind, by=f"signal {number.name}"))
            finally:
                self.stop()
        if self._refused:
            raise HeldElsewhereError(self._refused)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def take(number: int, frame: FrameType | None) -> None:
            self._orders.put(signal.Signals(number))

        before = {number: signal.signal(number, take) for number in (*_OF_SIGNAL, *_ENDING)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _spawn(self, label: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=label, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _drive(self, name: str, place: int) -> None:
        """A loop's thread: tick on the grid, and go on with a new loop after faults of ours."""
        interval_s = float(self._plans[name].controller.interval_s)
        pace = Pace(
            interval_s,
            monotonic_s=awake_clock_s,
            wait=self._ending.wait,
            # Spread out, so that many engines do not want the processor at once.
            phase_s=interval_s * place / len(self._loops),
        )
        while True:
            pace.wait_for_tick()
            if self._ending.is_set():
                break
            try:
                state = self._loops[name].tick(late_ticks=pace.late)
                if not self._waits and state.contact is Contact.STANDBY:
                    self._refuse(name, state)
                    break
                if self._loops[name].faults_in_a_row >= FAULTS_TO_REPLACE:
                    self._replace(name)
            except Exception:
                _LOG.exception("%s: its loop could not be made anew; trying again", name)
        self._loops[name].close()

    def _refuse(self, name: str, state: LoopState) -> None:
        self._refused = (
            f"engine {name}: {state.holder} holds its lease; stop that controller, or leave out"
            " --no-wait to stand by"
        )
        self._orders.put(signal.SIGTERM)

    def _replace(self, name: str) -> None:
        """A new loop in the place of one that only fails; what the operator ordered stays.

        One that was latched goes on in mode static: only the operator lets the policy act again.
        """
        old = self._loops[name]
        mode = old.state.mode
        held = mode is GuardMode.HOLD
        if held or old.state.latched:
            mode = GuardMode.STATIC
        loop = self._make_loop(name, mode, faults=old.state.faults)
        if held:
            loop.command(Command(kind=CommandKind.HOLD, by="the daemon, as before a fault"))
        self._loops[name] = loop
        for command in old.untold():
            loop.command(command)
        _LOG.error("%s: its loop was made anew after %d faults", name, FAULTS_TO_REPLACE)
        with contextlib.suppress(Exception):
            old.close()

    def _make_loop(self, name: str, mode: GuardMode, *, faults: int = 0) -> EngineLoop:
        plan: Plan = self._plans[name]
        holder = parts.holder_name()
        source: PolicySource = self._sources[name]
        return EngineLoop(
            name,
            parts.live_engine(name, self._settings, plan, holder),
            source,
            self._audits[name],
            holder=holder,
            settings=self._settings.guard_settings,
            mode=mode,
            seed=SEED,
            profiler=parts.profile_watch(name, self._settings, plan),
            monotonic_s=awake_clock_s,
            faults=faults,
        )

    def _look(self, watches: list[BundleWatch]) -> None:
        while not self._ending.is_set():
            for watch in watches:
                try:
                    watch.look()
                except Exception:
                    _LOG.exception("%s could not be looked at", watch.name)
            self._look_now.wait(BUNDLE_LOOK_S)
            self._look_now.clear()

    def _web(self, listen: str) -> WebServer:
        try:
            token = own_token(self._settings.state_dir, os.environ)
        except OSError as error:
            # A full disk must not keep engines from their controller; signals work without it.
            _LOG.warning("no orders over HTTP, as no token can be kept: %s", error)
            token = secrets.token_urlsafe(32)
        return WebServer(make_app(self, token, hosts=self._settings.hosts), listen)
