"""`kv-connector`: what an operator asks of a machine, a model, a trace, a storage folder and a running engine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from ..admin import commands as admin
from ..errors import ConfigError
from ..values import shown
from . import calibrate, completion, doctor, simulate, size, storage, top

__all__ = ["main", "make_parser"]

_COMMANDS = (doctor, size, simulate, top, admin, calibrate, storage, completion)
"""In the order of the help. Each has `add`; what is slow to import it imports when it runs."""
_OF_ENGINES = {"torch", "triton", "numpy"}
"""What an engine brings, in the versions that it needs; the package is installed beside it with `--no-deps`."""
_STDOUT = 1
_INTERRUPTED, _CUT_OFF = 130, 141
"""As shells have it of who was ended by Ctrl-C, and by the end of who reads."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where all is well, 1 where something is damaged, cannot be read or is a problem, 2 where the command cannot be
    carried out, or not in full."""
    options = make_parser().parse_args(arguments)
    try:
        run: Callable[[argparse.Namespace], int] = options.run
        status = run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)  # for what Python writes at its end
        return _CUT_OFF
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (OSError, ConfigError) as error:
        print(f"error: {_said(error)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in _OF_ENGINES:
            raise
        print(
            f"error: {error.name} is not installed in {sys.prefix}: run this in the engine's environment, which has it",
            file=sys.stderr,
        )
        return 2


def _said(error: OSError | ConfigError) -> str:
    """Of a file, the file first, and no number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{shown(os.fspath(error.filename))}: {error.strerror}"
    return str(error)


def make_parser() -> argparse.ArgumentParser:
    """Of all commands; each sets `run`, what carries it out."""
    parser = argparse.ArgumentParser(prog="kv-connector", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(parsers)
    return parser
