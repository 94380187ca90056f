"""What a user installs: the wheel in an environment without torch, and a copy vendored into an engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BUILT_FROM = ["kv_connector", "triton_kernels", "tests", "integration", "pyproject.toml", "README.md", "LICENSE"]


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The finished process; where it failed and `check` is set, the test fails with what it printed."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MAKE", "MFLAGS"))}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy: a build in place would leave stale files for the next one."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copyfile(ROOT / name, source / name)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q")
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", out, source, cwd=out)
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="session")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and nothing else."""
    env = tmp_path_factory.mktemp("clean") / "env"
    run(sys.executable, "-m", "venv", "--without-pip", env, cwd=env.parent)
    python = env / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=env.parent).stdout.strip()
    options = ("--no-deps", "--no-index", "-q")
    run(sys.executable, "-m", "pip", "install", *options, "--target", site, wheel, cwd=env.parent)
    return python


@pytest.fixture(params=["wheel in a clean environment", "this environment"])
def python(request: pytest.FixtureRequest) -> Path:
    """An interpreter with kv_connector installed: one without torch, and the one that runs the tests."""
    if request.param == "this environment":
        return Path(sys.executable)
    clean: Path = request.getfixturevalue("clean_python")
    return clean


def test_the_wheel_holds_the_package_with_its_kernels_and_no_tests(wheel: Path) -> None:
    expected = {"kv_connector/py.typed"}
    for folder, place in (("kv_connector", "kv_connector"), ("triton_kernels", "kv_connector/triton_kernels")):
        files = [file.relative_to(ROOT / folder).as_posix() for file in (ROOT / folder).rglob("*.py")]
        assert files, folder
        expected |= {f"{place}/{file}" for file in files}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected, "add a new subpackage to [tool.setuptools] packages in pyproject.toml"


def test_the_wheel_names_its_licence_and_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    metadata = archive.read(f"{info}/METADATA").decode()
    assert f"{info}/licenses/LICENSE" in archive.namelist()
    for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.10", "Requires-Dist: torch>=2.8"):
        assert line in metadata.splitlines()


def test_the_name_of_the_kernel_folder_is_left_to_its_owner(python: Path, tmp_path: Path) -> None:
    code = "from importlib.util import find_spec; print(find_spec('triton_kernels'), find_spec('kv_connector') is None)"
    assert run(python, "-c", code, cwd=tmp_path).stdout == "None False\n"
    failed = run(python, "-c", "import triton_kernels", cwd=tmp_path, check=False)
    assert failed.returncode == 1
    assert "ModuleNotFoundError: No module named 'triton_kernels'" in failed.stderr


TIMED_IMPORT = """
import sys, time
start = time.perf_counter()
import kv_connector
seconds = time.perf_counter() - start
import importlib.util, json
config = kv_connector.Config(host_memory="16GiB")  # the surface works without what moves bytes
heavy = {"torch", "numpy", "triton", "vllm"}
found = sorted(name for name in heavy if importlib.util.find_spec(name))
print(json.dumps([seconds, sorted(heavy & set(sys.modules)), found, config.host_memory]))
"""


def test_importing_is_quick_and_loads_nothing_heavy(python: Path, tmp_path: Path) -> None:
    runs: list[Any] = [json.loads(run(python, "-c", TIMED_IMPORT, cwd=tmp_path).stdout) for _ in range(5)]
    assert min(seconds for seconds, *_ in runs) < 0.3
    for _, loaded, installed, host_memory in runs:
        assert loaded == []
        assert python == Path(sys.executable) or installed == []
        assert host_memory == 16 << 30


def test_a_vendored_copy_runs_under_another_name(tmp_path: Path) -> None:
    run("make", "-C", ROOT, "vendor", f"DEST={tmp_path}/someengine/kvc", cwd=tmp_path)
    assert not list(tmp_path.rglob("__pycache__"))
    script = shutil.copyfile(ROOT / "tests" / "drive_vendored.py", tmp_path / "drive.py")
    child = run(sys.executable, script, "someengine.kvc", cwd=tmp_path)
    assert child.stdout == "ran someengine.kvc\n"


def test_vendoring_again_replaces_the_copy_and_spares_other_files(tmp_path: Path) -> None:
    dest = tmp_path / "kvc"
    command = ("make", "-C", ROOT, "vendor", f"DEST={dest}")
    run(*command, cwd=tmp_path)
    (dest / "types.py").write_text("old")
    run(*command, cwd=tmp_path)
    assert (dest / "types.py").read_text() == (ROOT / "kv_connector/types.py").read_text()
    (dest / "theirs.py").write_text("theirs")
    (dest / "types.py").write_text("old")
    refused = run(*command, cwd=tmp_path, check=False)
    assert refused.returncode != 0
    assert "1 files that are not ours (theirs.py): give an empty folder" in refused.stderr
    assert (dest / "types.py").read_text() == "old"


@pytest.mark.parametrize(
    ("dest", "message"),
    [
        ("", "DEST is missing: make vendor DEST=path/in/engine/kv_connector"),
        ("kv_connector/copy", "holds this project's own source"),
        (".", "holds this project's own source"),
        ("../kv-connector", "cannot be imported: end it in a package name"),
        ("pyproject", ""),
    ],
)
def test_vendoring_to_a_wrong_place_is_refused(dest: str, message: str, tmp_path: Path) -> None:
    if dest == "pyproject":
        (tmp_path / "taken").write_text("")
        dest, message = str(tmp_path / "taken"), "is a file: give a folder"
    refused = run("make", "-C", ROOT, "vendor", f"DEST={dest}", cwd=tmp_path, check=False)
    assert refused.returncode != 0
    assert message in refused.stderr
