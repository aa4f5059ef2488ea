"""The pages for people: their commands run, their links lead somewhere."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from trimtab.engine_bridge.trace import NO_SESSION, Trace
from trimtab.training.traces.canonical_write import write_trace
from trimtab.training.traces.generate import generate

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>.*?) -->\n)?^```(?P<language>\S*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = {"sh", "text", "yaml", "json", "csv", "python"}
ABSOLUTE = re.compile(r"(?<![\w.:/<)\]])(?:~|/\w+)/\w")
UPWARDS = re.compile(r"(?<!\w)\.\./[\w./\-]*")
SECONDS = 180.0


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None
    """Why the test does not run it."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            text=found["text"],
            reason=found["reason"],
        )
        for found in FENCE.finditer(text)
    ]


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "sh" and block.reason is None]


def anchor(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
    return kept.replace(" ", "-")


@pytest.fixture(scope="session")
def traffic() -> Trace:
    return generate(hours=0.05, seed=3, load=0.8)


@pytest.fixture
def folder(tmp_path: Path, traffic: Trace) -> Path:
    """A folder that looks like the checkout, with the files that the pages take for granted."""
    for name in ("engine_bridge", "benchmarks", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_trace(traffic, tmp_path / "mine.parquet")
    write_trace(traffic, tmp_path / "traffic.csv")
    open_loop = [row for row in range(len(traffic)) if traffic.session[row] == NO_SESSION]
    _write_batch(traffic, open_loop, tmp_path / "batch.csv")
    _write_access_log(traffic, tmp_path / "access.jsonl")
    (tmp_path / "steps.csv").write_text(
        "model,tp,kind,prefill_tokens,prefill_prefix,decode_batch,decode_context,iter_ms\n"
        "Llama-3.1-8B,1,decode,0,0,1,512,7.4\n"
        "Llama-3.1-8B,1,decode,0,0,64,2048,14.0\n"
        "Llama-3.1-8B,1,prefill,2048,0,0,0,52.0\n"
        "Llama-3.1-8B,1,mixed,512,0,64,2048,25.0\n"
    )
    return tmp_path


def _write_batch(trace: Trace, rows: list[int], path: Path) -> None:
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["arrival_s", "tenant", "tier", "prompt_tokens", "output_tokens"])
        for row in rows:
            lengths = int(trace.prompt_tokens[row]), int(trace.output_tokens[row])
            out.writerow([float(trace.arrival_s[row]), "nightly", "T2", *lengths])


def _write_access_log(trace: Trace, path: Path) -> None:
    """A gateway's log in another form than ours, not in order, with a failed call."""
    with path.open("w") as file:
        for row in np.random.default_rng(0).permutation(len(trace))[:400]:
            usage = {
                "prompt_tokens": int(trace.prompt_tokens[row]),
                "completion_tokens": int(trace.output_tokens[row]) if row % 50 else 0,
            }
            time = 1.7e9 + float(np.nan_to_num(trace.arrival_s[row]))
            print(json.dumps({"time": time, "key": f"key-{row % 5}", "usage": usage}), file=file)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if runnable(page)], ids=lambda page: page.stem
)
def test_every_command_of_a_page_runs(page: Path, folder: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "120",
    }
    for block in runnable(page):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{block.text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_says_what_it_is(page: Path) -> None:
    found = blocks(page)
    marks = page.read_text(encoding="utf-8").count("\n```")
    assert marks == 2 * len(found), f"{page.name}: a block is not closed"
    for block in found:
        assert block.language in LANGUAGES, f"{block}: ```{block.language}, not {LANGUAGES}"
        assert block.reason is None or block.reason.strip(), f"{block}: not run, but why?"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_relative_link_leads_to_a_file_and_heading(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert file.is_relative_to(ROOT), f"{page.name}: {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {anchor(title) for title in headings}, f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_names_a_path_outside_the_repository(page: Path) -> None:
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        assert ABSOLUTE.search(line) is None, f"{page.name}:{number}: {line}"
        for path in UPWARDS.findall(line):
            there = (page.parent / path).resolve()
            assert there.is_relative_to(ROOT), f"{page.name}:{number}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_named_file_of_the_repository_exists(page: Path) -> None:
    code = re.findall(r"`((?:agents|benchmarks|controller|docs|engine_bridge|envs|tests|training)"
                      r"/[\w./\-]*)`", page.read_text(encoding="utf-8"))  # fmt: skip
    for name in code:
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_the_readme_shows_what_the_demo_prints(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- demo table -->\n```text\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    done = subprocess.run(
        [sys.executable, "-m", "trimtab.controller.cli.app", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    printed = done.stdout.split("% within targets")[0]
    rows = [line.split() for line in printed.splitlines() if line.strip()]
    assert rows == [line.split() for line in shown[1].splitlines() if line.strip()], printed
