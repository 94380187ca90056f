"""What a user installs: the wheel in an environment without torch, the same beside torch as in an engine's environment,
a source distribution, and a copy vendored into an engine."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kv_connector import extras

ROOT = Path(__file__).parents[1]
BUILT_FROM = ["kv_connector", "triton_kernels", "tests", "integration", "pyproject.toml", "README.md", "LICENSE"]


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The finished process; where it failed and `check` is set, the test fails with what it printed."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MAKE", "MFLAGS"))}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def copy_of(names: Sequence[str], source: Path) -> Path:
    """The folder, with these files and folders of the repository in it: a build in place would leave stale files."""
    source.mkdir(exist_ok=True)
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copyfile(ROOT / name, source / name)
    return source


def wheel_of(source: Path, out: Path) -> Path:
    """The wheel of a folder or a source distribution, built offline."""
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q")
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", out, source, cwd=out)
    (file,) = out.glob("*.whl")
    return file


def names_in(wheel: Path) -> set[str]:
    """All files of a wheel."""
    return set(zipfile.ZipFile(wheel).namelist())


def installed(wheel: Path, env: Path) -> Path:
    """The interpreter of a new environment that holds the wheel and nothing else."""
    run(sys.executable, "-m", "venv", "--without-pip", env, cwd=env.parent)
    python = env / "bin" / "python"
    options = ("--no-deps", "--no-index", "-q")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=env.parent)
    return python


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what lies in the repository."""
    return wheel_of(copy_of(BUILT_FROM, tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and nothing else."""
    return installed(wheel, tmp_path_factory.mktemp("clean") / "env")


@pytest.fixture(scope="session")
def engine_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, as an engine's would be: it sees torch and other packages of
    this one, but not the copy of kv_connector that the tests run."""
    python = installed(wheel, tmp_path_factory.mktemp("engine") / "env")
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "engine.pth").write_text("".join(f"{path}\n" for path in packages))
    return python


ENVIRONMENTS = {
    "wheel in a clean environment": "clean_python",
    "wheel beside torch": "engine_python",
    "this environment": "",
}


@pytest.fixture(params=ENVIRONMENTS)
def python(request: pytest.FixtureRequest) -> Path:
    """An interpreter with kv_connector installed: without torch, beside torch, and the one that runs the tests."""
    fixture = ENVIRONMENTS[request.param]
    return request.getfixturevalue(fixture) if fixture else Path(sys.executable)


def test_the_wheel_holds_the_package_with_its_kernels_and_no_tests(wheel: Path) -> None:
    expected = {"kv_connector/py.typed"}
    for folder, place in (("kv_connector", "kv_connector"), ("triton_kernels", "kv_connector/triton_kernels")):
        files = [file.relative_to(ROOT / folder).as_posix() for file in (ROOT / folder).rglob("*.py")]
        assert files, folder
        expected |= {f"{place}/{file}" for file in files}
    names = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert names == expected, "add a new subpackage to [tool.setuptools] packages in pyproject.toml"


def test_the_wheel_names_its_licence_and_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    metadata = archive.read(f"{info}/METADATA").decode()
    assert f"{info}/licenses/LICENSE" in archive.namelist()
    for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.10", "Requires-Dist: torch>=2.8"):
        assert line in metadata.splitlines()


def test_the_wheel_is_described_as_an_index_shows_it(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    text = archive.read(next(name for name in names_in(wheel) if name.endswith("METADATA"))).decode()
    metadata = email.message_from_string(text)
    assert (metadata["Name"], metadata["Description-Content-Type"]) == ("kv-connector", "text/markdown")
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert {"docs", "storage", "mooncake", "s3", "nixl-cu12", "nixl-cu13"} <= set(metadata.get_all("Provides-Extra"))
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
    assert "kv-cache" in metadata["Keywords"].split(",")


def test_errors_name_the_libraries_that_the_extras_install() -> None:
    """An error may be met where the package came from no index, so it names them and not our extra."""
    project = (ROOT / "pyproject.toml").read_text()
    optional = project[project.index("[project.optional-dependencies]") : project.index("[project.scripts]")]
    listed = re.findall(r"(?ms)^([\w-]+) = \[(.*?)\]$", optional)
    tables = {name: re.findall(r'"([^";]+)[";]', libraries) for name, libraries in listed}
    of_checkouts = {"dev", "docs", "demo", "proxy"}
    libraries = [library for name in tables.keys() - of_checkouts for library in tables[name]]
    assert len(tables) > len(of_checkouts) and sorted(extras._LIBRARIES) == sorted(libraries)
    assert extras.pip_line("obstore", "botocore") == "pip install 'obstore>=0.11,<0.13' 'botocore>=1.34'"
    sources = {path: path.read_text() for path in (ROOT / "kv_connector").rglob("*.py")}
    assert [path for path, text in sources.items() if re.search(r"kv-connector\[", text)] == []


def test_a_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    source, out = copy_of(BUILT_FROM, tmp_path / "source"), tmp_path / "out"
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, source, cwd=tmp_path)
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        roots = {name.split("/")[1] for name in content.getnames() if "/" in name}
    assert {"kv_connector", "triton_kernels", "pyproject.toml", "README.md", "LICENSE"} <= roots
    assert names_in(wheel_of(archive, out)) == names_in(wheel)


def test_an_image_is_built_from_what_the_wheel_needs(wheel: Path, tmp_path: Path) -> None:
    """What the Dockerfile copies, which is all that .dockerignore lets through."""
    lines = (ROOT / "integration" / "deploy" / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    copied = [name for names in copies for name in names]
    let_through = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(let_through)
    source = copy_of(copied, tmp_path / "source")
    assert names_in(wheel_of(source, tmp_path)) == names_in(wheel)


def test_an_operator_has_the_command(engine_python: Path, tmp_path: Path) -> None:
    command = engine_python.with_name("kv-connector")
    assert "storage" in run(command, "--help", cwd=tmp_path).stdout
    code = "import kv_connector as k, kv_connector.triton_kernels, torch; print(k.__file__, k.__version__)"
    file, version = run(engine_python, "-c", code, cwd=tmp_path).stdout.split()
    assert Path(file).is_relative_to(engine_python.parents[1])
    shown = run(engine_python, "-m", "pip", "show", "kv-connector", cwd=tmp_path).stdout
    assert f"Version: {version}\n" in shown
    refused = run(command, "storage", "stat", tmp_path / "none", cwd=tmp_path, check=False)
    assert refused.returncode == 2 and refused.stderr.startswith("error: ")


def test_the_name_of_the_kernel_folder_is_left_to_its_owner(python: Path, tmp_path: Path) -> None:
    code = "from importlib.util import find_spec; print(find_spec('triton_kernels'), find_spec('kv_connector') is None)"
    assert run(python, "-c", code, cwd=tmp_path).stdout == "None False\n"
    failed = run(python, "-c", "import triton_kernels", cwd=tmp_path, check=False)
    assert failed.returncode == 1
    assert "ModuleNotFoundError: No module named 'triton_kernels'" in failed.stderr


TIMED_IMPORT = """
import sys, time
start = time.process_time()  # others may have the core
import kv_connector
seconds = time.process_time() - start
import importlib.util, json
config = kv_connector.Config(host_memory="16GiB")  # the surface works without what moves bytes
heavy = {"torch", "numpy", "triton", "vllm"}
found = sorted(name for name in heavy if importlib.util.find_spec(name))
print(json.dumps([seconds, sorted(heavy & set(sys.modules)), found, config.host_memory]))
"""


def test_importing_is_quick_and_loads_nothing_heavy(python: Path, clean_python: Path, tmp_path: Path) -> None:
    runs: list[Any] = [json.loads(run(python, "-c", TIMED_IMPORT, cwd=tmp_path).stdout) for _ in range(5)]
    assert min(seconds for seconds, *_ in runs) < 0.3
    for _, loaded, installed, host_memory in runs:
        assert loaded == []
        assert (installed == []) == (python == clean_python), "there it was not loaded because there is none"
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
