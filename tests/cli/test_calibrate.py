"""An operator and what copies take on his machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kv_connector.cli import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "-1"], "--device=-1 is too small: give at least 0"),
        (["--show", "built-in", "--bytes", "9" * 900], f"is too large: give at most {1 << 40}"),
        (["--show", "built-in", "--bytes", "0"], "--bytes=0 is too small: give at least 1"),
        (["--show", "built-in", "--png", "copies.foo"], "--png='copies.foo': give a name that ends in .png"),
        (["--show", "built-in", "--json", "none/copies"], "--json='none/copies': there is no folder 'none': make it"),
        (["--show", "latin"], "'latin' cannot be read: 'utf-8' codec can't decode"),
        (
            ["--show", "/dev/null"],
            "--show='/dev/null' is no file of at most 1048576 bytes: give one that `kv-connector",
        ),
        (["--show", "deep"], "deep is no result of `kv-connector calibrate`"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin").write_bytes(b"\xe4\xf6\xfc")
    Path("deep").write_text("[" * 60_000)
    assert main(["calibrate", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line


def test_what_copies_take_is_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator looks at a result, keeps it, and looks at the kept one."""
    kept = tmp_path / "costs.json"
    assert main(["calibrate", "--show", "built-in", "--json", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert "64 KiB" in shown and " staged" in shown and " runs" in shown and "layer groups of" in shown
    assert main(["calibrate", "--show", str(kept), "--bytes", "64MiB"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == shown.splitlines()[1:]
    kept.write_text("{}")
    assert main(["calibrate", "--show", str(kept)]) == 2
    assert "measure anew" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_there_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 2
    assert "GPU 0: there are 0 here" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "costs.json"
    assert main(["calibrate", "--json", str(kept)]) == 0
    assert "measured on" in capsys.readouterr().out
    assert main(["calibrate", "--show", str(kept)]) == 0
