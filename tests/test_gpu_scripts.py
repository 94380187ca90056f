"""The scripts for a GPU, with a `python3` that only says what it was asked: a part that fails hides no other."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = f"""#!/bin/bash
[ "$2" != integration.vendor ] || exec {sys.executable} "$@"
[ "$1" != -c ] || exit 0
printf '%s %s %s\\n' "$BENCH_COMMIT" "$PYTHONPATH" "$*" >>"$ASKED"
echo "$CUDA_VISIBLE_DEVICES" >"$ASKED.gpus"
for word; do
    if [ "$before" = --json ]; then echo '{{}}' >"$word"; fi
    if [ "$before" = --logs ]; then echo 'of an engine' >"$word/ours.log"; fi
    before=$word
done
case "$*" in
    *--collect-only*) printf '%s\\n' x.py::test_a x.py::test_sleep ;;
    *"$FAILS"*) kill -SEGV $$ ;;
esac
"""
TIMEOUT = """#!/bin/bash
[ "$1 $2" = "-k 5" ] || [ "$1 $2" = "-s KILL" ] && [ "$3" -gt 0 ] || exit 125
"${@:4}"
status=$?
case "$*" in
    *"$HANGS"*) exit 124 ;;
esac
exit $status
"""


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """A folder for PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"python3": PYTHON, "timeout": TIMEOUT, "nvidia-smi": "#!/bin/sh\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(stubs: Path, *command: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What a script prints, and the lines of what it ran."""
    asked = stubs.parent / "asked"
    asked.write_text("")
    environment = os.environ | {"HANGS": "nothing", "FAILS": "nothing", "BENCH_COMMIT": "", "PYTHONPATH": ""}
    environment |= {"PATH": f"{stubs}:{os.environ['PATH']}", "ASKED": str(asked), "TMPDIR": str(stubs.parent)}
    script, *arguments = command
    done = subprocess.run(
        ["bash", str(ROOT / "integration" / script), *arguments],
        env=environment | variables,
        cwd=stubs.parent,
        capture_output=True,
        text=True,
    )
    return done, asked.read_text().splitlines()


@pytest.mark.parametrize(
    ("command", "failing", "results"),
    [
        (("gpu_vllm.sh", "", "out", "", "ttft_graphs", "misses", "serving_12_6"), "vllm_ttft", "vllm"),
        (("gpu_sglang.sh", "", "out", "ttft", "misses", "serving_12_6"), "sglang_ttft", "sglang"),
    ],
)
def test_a_part_that_fails_leaves_its_logs_and_hides_no_other(
    stubs: Path, command: tuple[str, ...], failing: str, results: str
) -> None:
    done, asked = run(stubs, *command, FAILS=failing)
    out, parts = stubs.parent / "out", command[-3:]
    assert done.returncode == 1 and len(asked) == 3, done.stderr
    endings = (".json", ".log", "_logs.tar.gz")
    assert {file.name for file in out.iterdir()} == {f"{results}_{part}{end}" for part in parts for end in endings}
    for part in parts:
        with tarfile.open(out / f"{results}_{part}_logs.tar.gz") as logs:
            assert "./ours.log" in logs.getnames()
    assert run(stubs, *command)[0].returncode == 0


@pytest.mark.parametrize("script", ["gpu_vllm.sh", "gpu_sglang.sh"])
def test_what_is_asked_for_wrongly_is_told_before_anything_runs(stubs: Path, script: str) -> None:
    no_peers = [""] if script == "gpu_vllm.sh" else []
    for arguments in (["", "out", *no_peers, "ttft_graphs", "ttft", "serving_1x"], ["nowhere", "out", *no_peers]):
        done, asked = run(stubs, script, *arguments)
        assert done.returncode == 2 and done.stderr and not asked
    done, asked = run(stubs, "gpu.sh", "out", "copies", "test")
    assert done.returncode == 2 and "there is no part test" in done.stderr and not asked


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a copy without its repository")
def test_a_site_may_be_named_from_here_and_the_repository_names_the_commit(stubs: Path) -> None:
    (stubs.parent / "site").mkdir()
    done, (asked,) = run(stubs, "gpu_vllm.sh", "site", "out", "", "ttft_eager", BENCH_COMMIT="of another day")
    assert done.returncode == 0, done.stderr
    commit, path = asked.rsplit(maxsplit=1)[0].split()[:2]
    assert path.startswith(f"{stubs.parent / 'site'}:")
    told = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    assert commit == subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("script", ["gpu_vllm.sh", "gpu_sglang.sh"])
def test_every_part_takes_the_connectors_and_the_gpu_that_it_is_given(stubs: Path, script: str) -> None:
    no_peers = [""] if script == "gpu_vllm.sh" else []
    chosen = 'none,ours:host_form="lossless"'
    for part in ("ttft_graphs" if no_peers else "ttft", "misses", "serving_12_6"):
        done, (asked,) = run(stubs, script, "", "out", *no_peers, part, CONNECTORS=chosen, GPU="2")
        assert done.returncode == 0, done.stderr
        assert asked.endswith(f" --connectors {chosen}") and " --device 2 " in asked
    assert " --users 12,6 --at-once 6 --host-memory 15200MiB " in asked, "what the part's name says, on one host"


@pytest.mark.parametrize(
    "command",
    [
        ("gpu_vllm.sh", "", "out", "", "tests"),
        ("gpu_vllm.sh", "", "out", "", "replicas"),
        ("gpu.sh", "out", "tests"),
    ],
)
def test_what_is_run_sees_no_gpus_but_those_that_are_named(stubs: Path, command: tuple[str, ...]) -> None:
    done, _ = run(stubs, *command, GPU="3,1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and (stubs.parent / "asked.gpus").read_text() == "3,1\n", done.stderr


def test_behind_a_benchmark_that_hangs_the_next_one_runs(stubs: Path) -> None:
    out = stubs.parent / "out"
    done, asked = run(stubs, "gpu.sh", str(out), "pd", "overlap", HANGS="bench.pd")
    assert done.returncode == 1 and len(asked) == 2, done.stderr
    assert {file.name for file in out.iterdir()} == {"pd.json", "overlap.json"}


def test_what_tests_have_no_time_for_is_left_out_and_counts(stubs: Path) -> None:
    done, asked = run(stubs, "gpu_vllm_tests.sh", "", "600")
    assert done.returncode == 0 and [line.split("::")[-1] for line in asked[1:]] == ["test_a", "test_sleep"]
    done, asked = run(stubs, "gpu_vllm_tests.sh", "", "0")
    assert done.returncode == 1 and len(asked) == 1 and done.stdout == "0 of 2 passed, 0 skipped\n"
