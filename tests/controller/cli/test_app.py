"""Whatever a command does, the command line ends with the right code and at most one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from trimtab.controller.cli import app as cli
from trimtab.engine_bridge.errors import PlanError, ReplayError
from trimtab.engine_bridge.plan import load_plan

COMMAND = (sys.executable, "-m", "trimtab.controller.cli.app")


def _raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def _load(
    plan: Annotated[str, typer.Option()], seeds: Annotated[int, typer.Option(min=1)] = 1
) -> None:
    load_plan(plan)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """An empty command line in place of the real one."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command("load")(_load)
    app.callback()(lambda: None)
    group = typer.Typer(no_args_is_help=True)
    group.command("load")(_load)
    group.callback()(lambda: None)
    app.add_typer(group, name="group")
    monkeypatch.setattr(cli, "app", app)
    return app


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            PlanError("p.yaml", key="name", value=1, bound="text"),
            2,
            "p.yaml: name: 1, must be text",
        ),
        (ReplayError("blocks lost"), 1, "blocks lost"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (typer.Abort(), 130, "interrupted"),
        (MemoryError(), 1, "out of memory; take a shorter trace, fewer seeds or fewer policies"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.csv"), 2, None),
        (PermissionError(errno.EACCES, "Permission denied", "out.json"), 2, None),
        (OSError(errno.ENOSPC, "No space left on device", "out.json"), 1, None),
        (typer.BadParameter("x\ny"), 2, None),
    ],
)
def test_an_error_is_one_line_and_its_code(
    commands: typer.Typer,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str | None,
) -> None:
    commands.command("fail")(_raising(error))
    # Typer itself handles an interrupt in one of its versions and leaves it to us in another.
    assert cli.main(["fail"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    if not isinstance(error, KeyboardInterrupt):
        assert err.startswith("trimtab: ")
        assert err.count("\n") == 1
        assert said is None or err == f"trimtab: {said}\n"


def test_a_fault_of_ours_is_not_hidden(commands: typer.Typer) -> None:
    commands.command("fail")(_raising(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fail"])


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (3, 3), ("text", 0)])
def test_a_number_that_a_command_returns_is_the_exit_code(
    commands: typer.Typer, returned: Any, code: int
) -> None:
    commands.command("give")(lambda: returned)
    assert cli.main(["give"]) == code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["laod"], "No such command 'laod'; did you mean \"load\"?"),
        (["zzzz"], "No such command 'zzzz'; see trimtab --help"),
        (["load", "--paln", "x"], 'load: No such option: --paln; did you mean "--plan"?'),
        (["load", "--zzzzz"], "load: No such option: --zzzzz; see trimtab load --help"),
        (["group"], "group: no command given; see trimtab group --help"),
        (["load"], "load: Missing option '--plan'; see trimtab load --help"),
        (["load", "--plan", "default", "--seeds", "x"], "--seeds"),
        (["load", "--plan", "default", "--seeds", "0"], "--seeds"),
        (["load", "--plan"], "--plan"),
        (["load", "--plan", "default", "more"], "more"),
        (["load", "--plan", "defualt"], 'did you mean "default"?'),
        (["load", "--plan", "nowhere.yaml"], "nowhere.yaml: must be a file that exists"),
    ],
)
def test_wrong_usage_is_one_line_and_2(
    commands: typer.Typer, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trimtab: ")
    assert err.count("\n") == 1
    assert said in err


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


def test_version() -> None:
    done = _run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("trimtab ")


def test_no_command_shows_the_help_and_is_wrong_usage() -> None:
    done = _run()
    assert done.returncode == 2
    assert "Usage: trimtab" in done.stdout
    assert done.stderr == "trimtab: no command given; choose one of the commands above\n"


def test_help_answers_at_once() -> None:
    took_s = []
    for _ in range(3):
        start = time.perf_counter()
        done = _run("--help")
        took_s.append(time.perf_counter() - start)
        assert done.returncode == 0
    # Typically 0.15 s; an import of numba or pandas at the top of a command costs a second.
    assert min(took_s) < 0.6


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, trimtab.controller.cli.app; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"numba", "pandas", "pyarrow", "numpy", "torch"}.isdisjoint(loaded)


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = subprocess.run(
            [*COMMAND, "--help"], stdout=gone, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_a_wrong_plan_goes_through_the_command_line(
    commands: typer.Typer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: [\n")
    assert cli.main(["load", "--plan", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"trimtab: {file} line 2: must be valid YAML; ")
