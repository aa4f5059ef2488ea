"""Looks at the installation: Python, packages, vLLM's seams, the compiler's cache, what is shipped.

It reads what is installed and imports what it must to know; it opens no connection.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement

from trimtab.controller.doctor.finding import Finding, Verdict, fault_of
from trimtab.engine_bridge.errors import TrimtabError

AREA: Final = "installation"
EXTRAS: Final = {
    "vllm": "engines on this machine (trimtab serve)",
    "daemon": "the controller (trimtab run)",
    "gateway": "the gateway (trimtab gateway)",
    "admission": "quotas inside an engine (trimtab serve --admission)",
    "train": "training policies (trimtab train, tune)",
    "ui": "MLflow's pages",
    "otel": "sending traces of requests",
}
"""Extras that users install, and what each is for."""


def look() -> Iterator[Finding]:
    """Everything about the installation, in the order of the report."""
    try:
        requires = metadata.requires("trimtab") or ()
    except metadata.PackageNotFoundError:
        requires = ()
    yield from packages(requires, _installed)
    yield from engine_seams(_installed("vllm"))
    yield compiler_cache()
    yield from shipped()


def packages(requires: Iterable[str], installed: Callable[[str], str | None]) -> Iterator[Finding]:
    """Whether what Trimtab needs is there, and which extras are.

    Args:
        requires: Requirements as the package's metadata have them.
        installed: The installed version of a distribution; None without one.
    """
    by_extra: dict[str, list[Requirement]] = {"": []}
    for text in requires:
        try:
            one = Requirement(text)
        except InvalidRequirement:
            continue
        for extra in ("", *EXTRAS):
            marker = one.marker
            if marker is None or marker.evaluate({"extra": extra}):
                by_extra.setdefault(extra, []).append(one)
                break
    needed = by_extra.pop("")
    if not needed:
        yield Finding(
            area=AREA,
            check="packages",
            verdict=Verdict.WARNING,
            found="not installed as a package: what it needs is not known",
            remedy="pip install trimtab",
        )
        return
    yield _group("packages", needed, installed, Verdict.FAULT, "pip install trimtab")
    for extra, purpose in EXTRAS.items():
        wanted = by_extra.get(extra, [])
        command = f"pip install 'trimtab[{extra}]'"
        missing = [one.name for one in wanted if installed(one.name) is None]
        if not wanted or missing:
            # Parts of an extra come with other packages, so some of them mean no wish for it.
            some = f" ({', '.join(missing)})" if len(missing) < len(wanted) else ""
            whole = "not installed" if wanted else "not known to the installed version"
            yield Finding(
                area=AREA,
                check=f"extra {extra}",
                verdict=Verdict.NOTE,
                found=f"{whole}{some}: it is for {purpose}",
                remedy=f"{command}, where you want that",
            )
        else:
            yield _group(f"extra {extra}", wanted, installed, Verdict.WARNING, command)


def _group(
    check: str,
    wanted: Iterable[Requirement],
    installed: Callable[[str], str | None],
    worst: Verdict,
    command: str,
) -> Finding:
    there, wrong = [], []
    for one in wanted:
        version = installed(one.name)
        if version is None:
            wrong.append(f"{one.name} is missing")
        elif not one.specifier.contains(version, prereleases=True):
            wrong.append(f"{one.name} {version}, must be {one.specifier}")
        else:
            there.append(f"{one.name} {version}")
    if wrong:
        found = "; ".join(wrong)
        return Finding(area=AREA, check=check, verdict=worst, found=found, remedy=command)
    return Finding(area=AREA, check=check, verdict=Verdict.OK, found=", ".join(there))


def engine_seams(version: str | None) -> Iterator[Finding]:
    """Whether the scheduler fits the installed vLLM; nothing where there is none."""
    if version is None:
        return
    check = "vLLM's scheduler"
    from trimtab.engine_bridge.vllm.seams import check_installed

    try:
        faults = check_installed(version)
    except TrimtabError as error:
        yield fault_of(AREA, check, error)
    except ImportError as error:
        yield Finding(
            area=AREA,
            check=check,
            verdict=Verdict.FAULT,
            found=f"vLLM {version} cannot be imported: {error}",
            remedy="install vLLM anew, with the torch that it asks for",
        )
    else:
        yield Finding(
            area=AREA,
            check=check,
            verdict=Verdict.FAULT if faults else Verdict.OK,
            found="; ".join(faults) or f"vLLM {version}: every seam is as the plug-in expects it",
            remedy="install a released vLLM of a supported version" if faults else "",
        )


def compiler_cache() -> Finding:
    """Whether compiled code can be kept from one process to the next."""
    from trimtab.engine_bridge import compiled

    check = "compiled code"
    if compiled.interpreted():
        return Finding(
            area=AREA,
            check=check,
            verdict=Verdict.WARNING,
            found="the compiler is off: a replay takes some hundred times as long",
            remedy="unset NUMBA_DISABLE_JIT",
        )
    folder = str(compiled.numba_settings.CACHE_DIR)
    if not folder or not os.access(folder, os.W_OK | os.X_OK):
        return Finding(
            area=AREA,
            check=check,
            verdict=Verdict.WARNING,
            found=f"its folder {folder or '(none)'} cannot be written to: each process compiles "
            "for a minute",
            remedy="set NUMBA_CACHE_DIR to a folder that can",
        )
    return Finding(area=AREA, check=check, verdict=Verdict.OK, found=f"kept in {folder}")


def shipped() -> Iterator[Finding]:
    """Whether the plan and the policy that come with Trimtab can be used."""
    from trimtab.agents.registry import SHIPPED_BUNDLE, make_policy
    from trimtab.engine_bridge.plan import load_plan

    try:
        plan = load_plan(None)
        yield Finding(
            area=AREA,
            check="shipped plan",
            verdict=Verdict.OK,
            found=f"{plan.name}, {plan.digest[:12]}",
        )
        make_policy("learned").reset(plan, seed=0)
        yield Finding(
            area=AREA, check="shipped policy", verdict=Verdict.OK, found=str(SHIPPED_BUNDLE)
        )
    except TrimtabError as error:
        yield fault_of(AREA, "shipped policy", error)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
