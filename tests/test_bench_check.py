"""`make bench-check`: which results are of the package's code as it is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from integration import bench_check, report
from integration.bench_check import ages


def git(root: Path, *command: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", "-C", str(root), *identity, *command], check=True, capture_output=True, text=True
    ).stdout


def commit(root: Path, file: str, text: str) -> str:
    path = root / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    git(root, "add", ".")
    git(root, "commit", "-qm", text)
    return git(root, "rev-parse", "HEAD").strip()


def test_a_result_is_old_when_the_package_has_changed_since(tmp_path: Path) -> None:
    root, results = tmp_path / "checkout", tmp_path / "results"
    root.mkdir()
    results.mkdir()
    git(root, "init", "-q")
    first = commit(root, "kv_connector/half.py", "one")
    second = commit(root, "triton_kernels/copy.py", "two")
    commit(root, "docs/vllm.md", "three")
    named = {"before": first, "kernels": second, "dirty": second + "+", "elsewhere": "f" * 40, "none": None}
    for name, of in named.items():
        (results / f"{name}.json").write_text(json.dumps({"date": "2026-11-23", "commit": of}))
    (results / "calibration.json").write_text("{}")
    assert {age.result.removesuffix(".json"): age.why for age in ages(results, root)} == {
        "before": "the code has changed since",
        "dirty": "files had been changed",
        "elsewhere": "the commit is not in this repository",
        "none": "names no commit",
        "calibration": "names no commit",
        "kernels": "",
    }
    assert [age.why for age in ages(results, root)][-1] == "", "old ones come first"


def test_old_results_are_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_check.main() == 0
    assert "vllm_misses_0251_h200.json" in capsys.readouterr().out


def test_a_copied_tree_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(report.COMMIT, "a" * 40)
    assert report.commit() == report.Report("x").commit == "a" * 40


def test_arguments_name_no_folder_of_the_machine() -> None:
    given = ["--json", "/home/me/out/x.json", "--trace=/data/t.jsonl", "--logs", "../logs", "--rates", "8,saturated"]
    assert report.without_folders(given) == [
        "--json", "x.json", "--trace=t.jsonl", "--logs", "logs", "--rates", "8,saturated",
    ]  # fmt: skip
    assert report.without_folders(['ours:storage={"path": "/mnt/kv/a"}']) == ['ours:storage={"path": "a"}']
