"""What the documents name exists: files and folders of the repository, modules that are run, targets of make."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from integration import figures

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SCRIPTS = sorted([ROOT / "Makefile", ROOT / ".ci" / "run", *ROOT.glob("integration/*.sh")])
BASES = ("", "kv_connector", "integration/bench/results")
"""Folders that a path may be relative to: ARCHITECTURE.md writes `scheduler/half.py`, README.md names results."""
MADE = (".venv", "build/", "dist/", "out.json")
"""What a command that is shown makes."""
FOREIGN = {
    "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py",
    "lmdeploy/pytorch/kv_connector/base.py",
    "lmdeploy/pytorch/kv_connector/factory.py",
}
"""Paths in the repositories of vLLM and LMDeploy."""

_CODE = re.compile(r"```.*?```|`[^`]+`|\]\([^)]+\)", re.DOTALL)
_FILE = re.compile(r"(?<![\w/.$}{~-])((?:[A-Za-z_.][\w.-]*/)*[\w.-]+\.(?:md|py|sh|json|gz|png|toml))(?![\w/*])")
_PLACE = re.compile(r"(?<![\w/.$}{~:=-])((?:[a-z_.][\w.-]*/)+[\w-]*)(?![\w/*.$<{-])")
_DOCUMENT = re.compile(r"(?<![\w/])((?:docs/)?[\w-]+\.md)\b")
_MODULE = re.compile(r"python3?(?: -P)?\s+-m\s+((?:integration|tests|kv_connector)(?:\.\w+)*)")
_TARGET = re.compile(r"\bmake\s+([a-z][\w-]*)")


def is_there(path: str) -> bool:
    """Whether there is such a file or folder; a module may be named without `.py`."""
    return any((ROOT / base / (path + suffix)).exists() for base in BASES for suffix in ("", ".py"))


def missing(text: str, is_script: bool = False) -> list[str]:
    """What `text` names and is not there: in a script in all of it, else in what is marked as code, and documents."""
    code = text if is_script else "\n".join(_CODE.findall(text))
    # A place is meant to be ours by its first part: `layers/heads` is none.
    ours = {path.name for path in (*ROOT.iterdir(), *(ROOT / "kv_connector").iterdir()) if path.is_dir()}
    places = [place for place in _PLACE.findall(code) if place.split("/")[0] in ours]
    # A script may name files of the folder that it is in by then.
    files = [file for file in _FILE.findall(code) if not is_script or ("/" in file and not file.startswith("."))]
    paths = dict.fromkeys([*files, *places, *_DOCUMENT.findall(text)])
    found = [path for path in paths if path not in FOREIGN and not path.startswith(MADE) and not is_there(path)]
    for module in dict.fromkeys(_MODULE.findall(text)):
        path = module.replace(".", "/")
        if not is_there(f"{path}.py") and not is_there(f"{path}/__main__.py"):
            found.append(f"python -m {module}")
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    # Behind `#` are remarks: "make sure" is no target.
    named = _TARGET.findall(re.sub(r"(?m)(?:^|\s)#.*$", "", code))
    return found + [f"make {target}" for target in dict.fromkeys(named) if target not in targets]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_is_there(document: Path) -> None:
    assert missing(document.read_text()) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_runs_is_there(script: Path) -> None:
    assert missing(script.read_text(), is_script=True) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("see `kv_connector/base.py` and `scheduler/half.py`", []),
        ("see `kv_connector/handovers.py`", ["kv_connector/handovers.py"]),
        ("see docs/vllm.md", []),
        ("see docs/gone.md", ["docs/gone.md"]),
        ("the result is `index.json`, not `vllm_serving_h200.json`", ["vllm_serving_h200.json"]),
        ("![picture](integration/bench/results/gone.png)", ["integration/bench/results/gone.png"]),
        ("tests lie in `tests/handovers/`, kernels in `triton_kernels/`", ["tests/handovers/"]),
        ("read `index/tree`, `index/forest`, `heads/layers` and `.ci/run`", ["index/forest"]),
        ("python -m integration.bench.index, python -m integration.gone", ["python -m integration.gone"]),
        ("run `make\nsimulate`, not `make gone ARGS=1`; make sure", ["make gone"]),
    ],
)
def test_what_is_not_there_is_named(text: str, named: list[str]) -> None:
    assert missing(text) == named


def test_figures_that_are_written_from_results_are_those_of_the_results() -> None:
    written = "".join(path.read_text() for path in figures.documents())
    assert {name for name in figures.WRITERS if f"<!-- figures: {name} -->" in written} == set(figures.WRITERS)
    for path in figures.documents():
        text = path.read_text()
        assert text == figures.renewed(text), "run python -m integration.figures --write"


def test_all_say_the_same_memory_of_a_cached_block() -> None:
    texts = [path.read_text() for path in (*DOCUMENTS, ROOT / "kv_connector" / "index" / "tree.py")]
    said = [int(number) for text in texts for number in re.findall(r"about (\d+) bytes", text)]
    assert len(said) == 4 and len(set(said)) == 1
    measured = json.loads((figures.RESULTS / "index.json").read_text())["claims"]["memory_per_cached_block"]["value"]
    assert abs(said[0] - measured) < 0.01 * measured


def test_a_figure_that_is_not_of_its_result_is_found() -> None:
    text = "a\n  <!-- figures: mutants -->\n  all of them\n  <!-- end of figures -->\nb\n"
    lines = figures.renewed(text).splitlines()
    assert (lines[:2], lines[-2:]) == (["a", "  <!-- figures: mutants -->"], ["  <!-- end of figures -->", "b"])
    assert "all of them" not in figures.renewed(text) and lines[2].startswith("  The last run of all")
    assert figures.renewed(figures.renewed(text)) == figures.renewed(text)


def test_every_variable_that_is_set_for_mooncake_is_told() -> None:
    source = (ROOT / "kv_connector/storage/mooncake/client.py").read_text()
    names = set(re.findall(r'"(MC_\w+)"', source))
    assert len(names) > 5
    assert names - set(re.findall(r"MC_\w+", (ROOT / "docs/mooncake.md").read_text())) == set()


def test_a_benchmark_that_is_none_is_named_before_anything_is_installed(tmp_path: Path) -> None:
    """Here nothing can be: there is no Python."""
    command = ["make", "bench", "BENCH=typo", f"VENV={tmp_path / 'venv'}", "PYTHON=false"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    child = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert child.returncode == 2
    assert child.stderr.splitlines()[0] == "no benchmark typo: see integration/bench"
