"""What so much host memory would bring, by a trace."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from integration.bench import policies
from kv_connector.cli import main
from kv_connector.replay import Trace, read_trace


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Chats of a few users, whose turns have all that was said before, and prompts that come once."""
    rng, names, chats = random.Random(5), iter(range(1 << 30)), [[user] for user in range(-8, 0)]
    lines = []
    for number in range(300):
        if rng.random() < 0.3:
            ids = [next(names) for _ in range(rng.randint(5, 30))]
        else:
            ids = chats[rng.randrange(8)]
            ids += [next(names) for _ in range(rng.randint(1, 4))]
        lines.append({"timestamp": number, "input_length": 512 * len(ids) - 100, "hash_ids": list(ids)})
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def simulate(file: Path, *arguments: str) -> dict[str, dict[int, float]]:
    """Host hits in per cent, by policy and blocks."""
    found = file.with_suffix(".json")
    assert main(["simulate", str(file), "--json", str(found), *arguments]) == 0
    hits: dict[str, dict[int, float]] = {}
    for row in json.loads(found.read_text())["rows"]:
        hits.setdefault(row["policy"], {})[row["host_blocks"]] = row["host_hits_percent"]
    return hits


def test_figures_are_those_of_the_benchmark(file: Path) -> None:
    """To the last digit, every policy at every size: it is the same replay."""
    trace = read_trace(file)
    found = simulate(file, "--sizes", "2", "10", "40")
    rows = policies.replay_trace(trace, (2, 10, 40))
    for name, theirs in zip(("adaptive", "write_through", "write_through_selective"), policies.OURS, strict=True):
        assert found[name] == {row["host_blocks"]: row["host_hits_percent"][theirs] for row in rows}


def test_memory_is_counted_in_blocks_of_the_trace(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(file, "--host-memory", "64MiB", "1GiB", "--bytes-per-token", "16KiB", "--policy", "adaptive")
    assert list(found) == ["adaptive"] and list(found["adaptive"]) == [8, 128]
    assert found["adaptive"][8] < found["adaptive"][128]
    text = capsys.readouterr().out
    assert "64.0 MiB" in text and "1.0 GiB" in text and "write_through" not in text


def test_saved_tokens_are_those_of_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block that the prompt fills in part saves no more than it has, and one token is always computed."""
    file = tmp_path / "short.jsonl"
    lines = [{"timestamp": n, "input_length": 700, "hash_ids": [1, 2]} for n in range(2)]
    lines.insert(1, {"timestamp": 0.5, "input_length": 100 * 512, "hash_ids": [*range(10, 110)]})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Trace.of("x", [[1, 2]]).num_tokens == 1024
    found = tmp_path / "found.json"
    arguments = ["--sizes", "100", "--policy", "write_through", "--json", str(found), "--device-share", "1"]
    assert main(["simulate", str(file), *arguments]) == 0
    (row,) = json.loads(found.read_text())["rows"]
    assert (row["hit_blocks"], row["saved_tokens"]) == (2, 699)
    assert "699" in capsys.readouterr().out


def test_a_picture_is_drawn(file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "host.png"
    assert main(["simulate", str(file), "--sizes", "5", "50", "--share", "30", "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "0"], "--sizes=0.0: give per cent, above 0 and at most 100"),
        (["--share", "101"], "--share=101.0: give per cent"),
        (["--host-memory", "1GiB"], "--host-memory needs --bytes-per-token"),
        (["--host-memory", "1GiB", "--sizes", "5"], "give one of --sizes and --host-memory"),
        (["--host-memory", "1KiB", "--bytes-per-token", "1KiB"], "one block of 512 tokens"),
        (["--host-memory", "much", "--bytes-per-token", "1KiB"], "--host-memory='much' is not a size"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    arguments: list[str], words: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(file), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--png", "host.foo", "give a name that ends in .png"),
        ("--png", "none/host.png", "there is no folder"),
        ("--json", "none/found.json", "there is no folder"),
        ("--json", ".", "is a folder: name a file in it"),
    ],
)
def test_what_could_not_be_written_is_told_before_anything_is_replayed(
    option: str, name: str, words: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(file), option, str(tmp_path / name)]) == 2
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith(f"error: {option}=") and words in line and not told.out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there are no requests in it"),
        ("[]\n", "line 1: give one JSON object a line"),
        ('{"hash_ids": [1]}\nnonsense\n', "line 2: give one JSON object a line"),
        ('{"hash_ids": [[1]]}\n', "line 1: give one JSON object a line, with hash_ids, a list of names"),
        ('{"hash_ids": []}\n', "there are no requests in it, or none that has a block"),
        ('{"hash_ids": [1], "input_length": -5}\n', "line 1: input_length=-5: give a number of at least 0 and up to"),
        ('{"hash_ids": [1], "timestamp": "noon"}\n', "line 1: timestamp='noon': give a number up to"),
        ('{"hash_ids": [1], "input_length": Infinity}\n', "line 1: input_length=inf: give a number"),
        ('{"hash_ids": [1], "timestamp": NaN}\n', "line 1: timestamp=nan: give a number"),
        ('{"hash_ids": [1], "input_length": 1' + "0" * 400 + "}\n", "line 1: input_length=1000"),
        ('{"format": "kv-connector trace", "version": 2, "block_tokens": 4}\n', "is no header"),
    ],
)
def test_what_is_no_trace_is_said_with_its_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    assert main(["simulate", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_what_is_no_text_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(b"\x1f\x8b\x08\x00\xa0\xff")
    assert main(["simulate", str(file)]) == 2
    assert capsys.readouterr().err == f"error: {file} is no text: give a trace, with one JSON object a line\n"
