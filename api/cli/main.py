"""The `midstream` command. Heavy imports happen inside the commands, so that `midstream --help` is quick.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted. An error is one line on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from midstream import __version__
from midstream.api.cli import benches, house, operate, plays, services
from midstream.api.cli.context import Globals
from midstream.api.cli.output import say
from midstream.api.cli.up import command as up_command
from midstream.control.errors import BadInput, MidstreamError

FAILED: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 130

# click's error classes have no public name in typer: this is the base of all that a command line can do wrong.
CommandLineError: Final[type[Exception]] = typer.BadParameter.__mro__[2]

EXAMPLES = """Moves running LLM requests between instances, mid-stream, with every decision a fact in a log.

Examples:

  midstream up --instances 4

  midstream instances list

  midstream migrations start REQUEST --to i1

  midstream events tail --follow -o jsonl

  midstream replay verify --set balance.low=20
"""

app = typer.Typer(
    name="midstream", help=EXAMPLES, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"midstream {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    data_dir: Annotated[Path | None, typer.Option(help="Local files of `up`. [default: .midstream]")] = None,
    url: Annotated[str | None, typer.Option(help="Admin API to talk to. [default: that of `up`]")] = None,
    key: Annotated[str | None, typer.Option(help="Key to present there. [default: that of `up`]")] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Options before the command."""
    context.obj = Globals(data_dir=data_dir, url=url, key=key)


up_command.register(app)
plays.register(app)
benches.register(app)
operate.register(app)
house.register(app)
services.register(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return its exit code."""
    try:
        result = app(list(arguments) or ["--help"], prog_name="midstream", standalone_mode=False)
    except BadInput as error:
        return _failed(str(error), BAD_INPUT)
    except MidstreamError as error:
        return _failed(str(error), FAILED)
    except CommandLineError as error:
        return _failed(_line_of(error), BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return FAILED
    return result if isinstance(result, int) else 0


def main() -> None:
    """Entry point."""
    sys.exit(run(sys.argv[1:]))


def _failed(message: str, code: int) -> int:
    say(f"midstream: {' '.join(message.split())}")
    return code


def _line_of(error: BaseException) -> str:
    """What was wrong with the command line, and where to read more."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "midstream"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        message = "a command is missing"
    return f"{message.rstrip('.')}; see `{path} --help`"
