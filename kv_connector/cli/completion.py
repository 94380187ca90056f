"""`kv-connector completion`: a script by which a shell completes commands and options."""

from __future__ import annotations

import argparse

from ..errors import ConfigError
from ..extras import pip_line
from .text import Parsers

_SHELLS = ("bash", "zsh", "tcsh")


def add(parsers: Parsers) -> None:
    """Put the command into the parser."""
    text = "print a script by which a shell completes commands and options"
    parser = parsers.add_parser("completion", help=text, description=f"{text}; needs shtab")
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise ConfigError(f"completion needs shtab: {pip_line('shtab')}") from error
    from . import make_parser

    print(shtab.complete(make_parser(), options.shell))
    return 0
