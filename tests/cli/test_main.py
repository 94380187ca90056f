"""The command itself: quick, complete, and whole without the extras."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kv_connector import __version__
from kv_connector.cli import main, storage

HEAVY = ("torch", "numpy", "rich", "matplotlib", "shtab", "pynvml")


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom kv_connector.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('loaded', sorted(set({HEAVY}) & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert child.stdout.splitlines()[-1] == "loaded []", child.stderr
    for command in ("doctor", "size", "simulate", "top", "calibrate", "storage", "completion"):
        assert f"    {command}" in child.stdout


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0 and capsys.readouterr().out == f"kv-connector {__version__}\n"


def test_bash_completes_commands_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real bash, asked as it asks when a user presses tab."""
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    ask = f"""source {script}; read -ra spec <<<"$(complete -p kv-connector)"
    try() {{
        COMP_WORDS=(kv-connector "$@"); COMP_CWORD=$#; COMPREPLY=()
        ${{spec[-2]}} kv-connector "${{@: -1}}"; echo "${{COMPREPLY[@]}}"
    }}
    try si; try size --kv-cache-dtype fp8_; try storage v"""
    child = subprocess.run(["bash", "-c", ask], capture_output=True, text=True)
    assert child.stdout.splitlines() == ["size simulate", "fp8_e4m3 fp8_e5m2", "verify"], child.stderr


def test_what_an_extra_is_missing_for_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "zsh"]) == 2
    assert "pip install 'shtab>=1.7'" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "name"), [("doctor", "torch"), ("calibrate", "torch"), ("simulate", "numpy")])
def test_where_no_engine_is_installed_that_is_said(tmp_path: Path, command: str, name: str) -> None:
    """As after `pip install --no-deps` in an environment of its own."""
    (tmp_path / "trace").write_text("")
    words = [command, str(tmp_path / "trace")] if command == "simulate" else [command]
    code = f"import sys\nsys.modules[{name!r}] = None\nfrom kv_connector.cli import main\nsys.exit(main({words}))"
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    told = f"error: {name} is not installed in {sys.prefix}: run this in the engine's environment, which has it\n"
    assert (child.returncode, child.stderr) == (2, told)


def test_who_reads_no_more_gets_no_error(tmp_path: Path) -> None:
    """As `head` does; and a check that was cut off is not told as one that found nothing."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n')
    for options in ([], ["-u"]):
        child = subprocess.Popen(
            [sys.executable, *options, "-c", MAIN, "simulate", str(trace)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert (child.stderr.read(), child.wait()) == ("", 141)
        child.stderr.close()


MAIN = "import sys; from kv_connector.cli import main; sys.exit(main())"


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "survey", interrupt)
    assert main(["storage", "stat", str(tmp_path)]) == 130
    assert capsys.readouterr() == ("", "")
