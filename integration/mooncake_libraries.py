"""Libraries of the system that Mooncake's wheel needs and this machine may lack, put beside the wheel's own.

`python -m integration.mooncake_libraries`, as any user, with nothing installed on the system: packages are fetched as
apt knows them and unpacked, and their libraries copied to the folder where the wheel's programs look first. Where that
cannot be done it prints the one line that an administrator would type, and fails where the environment has CI=true, so
that no test is skipped in silence there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = {
    "libibverbs.so.1": ("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
    "libnuma.so.1": ("libnuma1",),
    "libcurl.so.4": ("libcurl4",),
}
"""Of Debian and Ubuntu, with what they need that a small system does not have."""
_SECONDS = 120


def missing() -> list[str]:
    """Libraries that Mooncake's programs do not find."""
    spec = find_spec("mooncake")
    if spec is None or spec.submodule_search_locations is None:
        return []
    folder = Path(spec.submodule_search_locations[0])
    programs = [path for path in (folder / "mooncake_master", folder / "store.so") if path.exists()]
    said = "".join(
        subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout for path in programs
    )
    return sorted(set(re.findall(r"(\S+) => not found", said)))


def fetch(packages: list[str]) -> None:
    """Put the libraries of these packages beside the wheel's own. Raises OSError or CalledProcessError."""
    spec = find_spec("mooncake")
    assert spec is not None and spec.submodule_search_locations is not None
    (target,) = Path(spec.submodule_search_locations[0]).parent.glob("mooncake_transfer_engine*.libs")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _download(packages, folder)
        for package in folder.glob("*.deb"):
            subprocess.run(
                ["dpkg", "-x", package, folder / "root"], check=True, timeout=_SECONDS, stderr=subprocess.DEVNULL
            )
        for library in (folder / "root").rglob("lib*.so.*"):
            shutil.copy(library, target / library.name)  # of a link what it points at


def _download(packages: list[str], folder: Path) -> None:
    """With the lists of packages that the system has, or else with new ones of our own, which need no rights."""
    lists, cache = folder / "lists", folder / "cache"
    for each in (lists / "partial", cache / "archives" / "partial"):
        each.mkdir(parents=True)
    own = ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={cache}"]
    for options in ([], own):
        if options:
            _apt([*options, "update"], folder)
        if _apt([*options, "download", *packages], folder) == 0:
            return
    raise OSError(f"apt-get cannot download {' '.join(packages)}")


def _apt(arguments: list[str], folder: Path) -> int:
    return subprocess.run(["apt-get", "-qq", *arguments], cwd=folder, timeout=_SECONDS, capture_output=True).returncode


def main() -> int:
    lacking = missing()
    packages = sorted({package for library in lacking for package in _PACKAGES.get(library, ())})
    if packages:
        try:
            fetch(packages)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"libraries for Mooncake were not fetched: {error}", file=sys.stderr)
    if not (left := missing()):
        return 0
    named = sorted({_PACKAGES[library][0] for library in left if library in _PACKAGES}) or left
    print(f"Mooncake's tests need {', '.join(left)}: apt-get install {' '.join(named)}", file=sys.stderr)
    return int(os.environ.get("CI") == "true")


if __name__ == "__main__":
    sys.exit(main())
