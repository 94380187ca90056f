"""Copy the package into an engine's tree: `make vendor DEST=engine/third_party/kv_connector`.

The copy is complete, kernels in place, and works under whatever name DEST gives it: imports inside it are relative.
Its file VENDORED lists what was copied, so that a second run replaces that and refuses to touch anything else.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path("VENDORED")
SUFFIXES = {".py", ".typed"}


def sources() -> dict[Path, Path]:
    """Every file of the package, by its place in the copy."""
    roots = {Path(): ROOT / "kv_connector", Path("triton_kernels"): ROOT / "triton_kernels"}
    files = {
        place / file.relative_to(root): file
        for place, root in roots.items()
        for file in sorted(root.rglob("*"))
        if file.suffix in SUFFIXES and "__pycache__" not in file.parts
    }
    return files | {Path("LICENSE"): ROOT / "LICENSE"}


def vendor(dest: Path) -> int:
    """Copy the package to `dest`; returns the number of files. Raises ValueError naming the fix, before any change."""
    dest = dest.resolve()
    if ROOT.is_relative_to(dest) or any(dest.is_relative_to(ROOT / own) for own in ("kv_connector", "triton_kernels")):
        raise ValueError(f"DEST={dest} holds this project's own source: give a folder inside an engine")
    if not dest.name.isidentifier():
        raise ValueError(f"DEST={dest} cannot be imported: end it in a package name, such as kv_connector")
    if dest.exists() and not dest.is_dir():
        raise ValueError(f"DEST={dest} is a file: give a folder")
    if foreign := _foreign(dest):
        names = ", ".join(str(place) for place in foreign[:3])
        raise ValueError(f"DEST={dest} holds {len(foreign)} files that are not ours ({names}): give an empty folder")
    if dest.exists():
        shutil.rmtree(dest)
    files = sources()
    for place, file in files.items():
        target = dest / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    (dest / RECORD).write_text("".join(f"{place.as_posix()}\n" for place in sorted([*files, RECORD])))
    return len(files)


def _foreign(dest: Path) -> list[Path]:
    """Files below `dest` that no earlier copy put there; bytecode does not count."""
    record = dest / RECORD
    ours = {Path(line) for line in record.read_text().splitlines()} if record.is_file() else set()
    present = {file.relative_to(dest) for file in dest.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    return sorted(present - ours)


def main(argv: list[str]) -> int:
    """Command line: one argument, the destination."""
    if len(argv) != 1 or not argv[0].strip():
        print("DEST is missing: make vendor DEST=path/in/engine/kv_connector", file=sys.stderr)
        return 2
    try:
        num_files = vendor(Path(argv[0]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{num_files} files copied to {argv[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
