"""The root of the command line: registers the commands and turns every error into one line.

Exit codes: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted, 141 the reader of a pipe went
away. What a command does is in its own module; heavy imports belong inside its functions, so that
`trimtab --help` answers at once.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any, Final

import typer

from trimtab.controller.cli import (
    audit,
    calibrate,
    demo,
    diagnose,
    doctor,
    fleet,
    frontier,
    gateway,
    incident,
    operate,
    profile,
    promote,
    pull,
    run,
    serve,
    trace,
    train,
    tune,
    usage,
    whatif,
)
from trimtab.engine_bridge.errors import InputError, TrimtabError, did_you_mean

app = typer.Typer(
    name="trimtab",
    help="Share a vLLM deployment fairly between tiers of tenants, and steer the shares.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings={"max_content_width": 100},
)

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
_INPUT_ERRNOS: Final = frozenset(
    (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EROFS,
     errno.ENAMETOOLONG, errno.ELOOP)
)  # fmt: skip
# Typer may bring its own copy of click, so click's classes are reached through Typer's names.
_ClickException: Final[type[Exception]] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trimtab {metadata.version('trimtab')}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise InputError("no command given", remedy="choose one of the commands above")


for _command in (
    demo,
    trace,
    whatif,
    fleet,
    train,
    promote,
    tune,
    frontier,
    incident,
    calibrate,
    serve,
    gateway,
    usage,
    run,
    operate,
    profile,
    diagnose,
    doctor,
    audit,
    pull,
):
    _command.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after `trimtab`; None takes the process's own.

    Returns:
        The exit code.
    """
    try:
        code = _invoke(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at exit; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def _invoke(arguments: Sequence[str]) -> int:
    try:
        result = app(list(arguments), prog_name="trimtab", standalone_mode=False)
    except SystemExit as error:
        # Typer ends the process by itself when the reader of a pipe goes away.
        if isinstance(error.__context__, BrokenPipeError):
            raise error.__context__ from None
        raise
    except (Exception, KeyboardInterrupt) as error:
        line, code = _fault(error)
        typer.echo(f"trimtab: {' '.join(line.split())}", err=True)
        return code
    return result if isinstance(result, int) else 0


def _fault(error: BaseException) -> tuple[str, int]:
    """Line and exit code of an error that a user can mend; any other one is raised again."""
    match error:
        case TrimtabError():
            return str(error), error.exit_code
        case _ if isinstance(error, _ClickException):
            return _usage_fault(error), InputError.exit_code
        case KeyboardInterrupt() | typer.Abort():
            return "interrupted", INTERRUPTED
        case MemoryError():
            remedy = "take a shorter trace, fewer seeds or fewer policies"
            return f"out of memory; {remedy}", TrimtabError.exit_code
        case OSError(filename=str() | bytes() | os.PathLike()):
            user = error.errno in _INPUT_ERRNOS
            line = f"{error.filename}: {error.strerror}; check the path and its permissions"
            return line, InputError.exit_code if user else TrimtabError.exit_code
    raise error


def _usage_fault(error: Any) -> str:
    """One line for an error of click's parser: command, fault, remedy."""
    message = re.split(r"\.? Did you mean|\.? \(?Possible options", error.format_message())[0]
    message = message.strip().rstrip(".")
    context = error.ctx
    if type(error).__name__ == "NoArgsIsHelpError":
        # Its message is the whole help.
        message = "no command given"
    if context is None:
        return message
    wrong = getattr(error, "option_name", None)
    if wrong is not None:
        known = [name for option in context.command.params for name in option.opts]
        known += [name for option in context.command.params for name in option.secondary_opts]
    else:
        unknown = re.match(r"No such command '(.*)'", message)
        wrong, known = unknown and unknown[1], list(getattr(context.command, "commands", ()))
    remedy = did_you_mean(wrong, known) if wrong else ""
    command = context.command_path.removeprefix("trimtab").strip()
    place = f"{command}: {message}" if command else message
    return f"{place}; {remedy or f'see {context.command_path} --help'}"


if __name__ == "__main__":
    sys.exit(main())
