"""An engine's own `/metrics`, read directly: one GET a look.

vLLM's page is long; only Trimtab's lines are parsed, and of these only what telemetry needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from trimtab.engine_bridge.live import http_get
from trimtab.engine_bridge.live.series import HISTOGRAM_ENDS, OWN_LABELS, PREFIX, RANK, WANTED
from trimtab.engine_bridge.live.snapshot import Snapshot, TelemetryUnavailableError, Unavailable

_LINE: Final = re.compile(rb"^trimtab_(\w+)(?:\{(.*)\})? +([^ \n]+)", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PLAIN: Final = "text/plain;version=0.0.4"


class ScrapeSource:
    """A page in Prometheus' text form."""

    def __init__(
        self,
        url: str,
        *,
        rank: str = "0",
        timeout_s: float = 1.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Say where the page is.

        Args:
            url: For instance `http://127.0.0.1:8000/metrics`.
            rank: Data-parallel rank of the engine: its label `engine`.
            timeout_s: For a whole read, seconds.
            headers: Further headers, for instance `Authorization`.

        Raises:
            SourceError: it is no URL.
        """
        self._url, self._rank, self._timeout_s = http_get.check_url(url), rank, timeout_s
        self._headers = {"Accept": _PLAIN, **(headers or {})}

    @property
    def place(self) -> str:
        """The URL."""
        return http_get.place(self._url)

    def read(self) -> Snapshot:
        """The page as it is now.

        Raises:
            TelemetryUnavailableError: there is none, or nothing of this engine on it.
        """
        status, reason, page = http_get.get(
            self._url, headers=self._headers, timeout_s=self._timeout_s
        )
        http_get.check_status(self._url, status, reason)
        try:
            return parse(page, self._rank)
        except ValueError as error:
            text = f"{self.place}: {error}"
            raise TelemetryUnavailableError(Unavailable.MALFORMED, text) from error
        except TelemetryUnavailableError as error:
            raise TelemetryUnavailableError(error.reason, f"{self.place}: {error}") from None

    def close(self) -> None:
        """Nothing is open between two reads."""


def parse(page: bytes, rank: str) -> Snapshot:
    """The figures of one engine on a page.

    Raises:
        ValueError: a value is no number.
        TelemetryUnavailableError: there are none of this engine.
    """
    values: dict[str, dict[str, float]] = {}
    names, ranks = set(), set()
    for raw_name, raw_labels, raw_value in _LINE.findall(page):
        name = raw_name.decode()
        if name not in WANTED:
            if not name.endswith(HISTOGRAM_ENDS):
                names.add(name)
            continue
        labels = dict(_LABEL.findall(raw_labels.decode("utf-8", "replace")))
        names.add(name)
        ranks.add(labels.get(RANK, ""))
        if labels.get(RANK) != rank:
            continue
        own = next((labels[label] for label in OWN_LABELS if label in labels), "")
        values.setdefault(name, {})[own] = float(raw_value)
    if not values:
        raise TelemetryUnavailableError(Unavailable.NO_DATA, _nothing(rank, names, ranks))
    return Snapshot(values=values, delay_s=0.0, names=frozenset(names))


def _nothing(rank: str, names: set[str], ranks: set[str]) -> str:
    if ranks:
        return f"no series of engine {rank}; there are those of {', '.join(sorted(ranks))}"
    if names:
        return f"no series that telemetry is made of among {len(names)} names of {PREFIX}*"
    return (
        f"no series {PREFIX}* on the page; is it that of `trimtab serve`, with"
        " PROMETHEUS_MULTIPROC_DIR set?"
    )
