"""The files that a command is to write: checked before the long work begins."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from ..values import shown

_PICTURE = ".png"


def check_outputs(*, json: Path | None = None, png: Path | None = None) -> None:
    """Raises ConfigError for a file that could not be written, and for a picture of another kind."""
    for option, path in (("--json", json), ("--png", png)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise ConfigError(f"{option}={shown(str(path))}: there is no folder {shown(str(path.parent))}: make it")
        if path.is_dir():
            raise ConfigError(f"{option}={shown(str(path))} is a folder: name a file in it")
    if png is not None and png.suffix.lower() != _PICTURE:
        raise ConfigError(f"--png={shown(str(png))}: give a name that ends in {_PICTURE}")
