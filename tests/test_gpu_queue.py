"""Parts of the scripts for a GPU, each on its own: here each is a line of a shell that notes what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from integration import gpu_queue
from integration.gpu_queue import Part, parse_part

NOTE = 'echo "$0 $GPU $PART_SECONDS" >>noted; '


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """By part: what the shell is to do behind the note."""
    found: dict[str, str] = {}

    def command(part: Part, sites: Mapping[str, str], out: Path) -> list[str]:
        return ["bash", "-c", NOTE + found.get(part.name, ""), part.name]

    monkeypatch.setattr(Part, "command", command)
    monkeypatch.chdir(tmp_path)
    return found


def noted() -> list[str]:
    return Path("noted").read_text().splitlines()


def has_ended(process: str) -> bool:
    stat = Path("/proc", process.strip(), "stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"  # which nobody has asked about yet


def test_parts_begin_in_their_order_as_gpus_are_free_and_one_for_two_holds_up_the_others(lines: dict[str, str]) -> None:
    lines["gpu:copies"] = "until [ -e go ]; do :; done"
    lines["vllm:misses"] = "touch go"
    names = ["gpu:copies", "vllm:misses", "vllm:ranks", "vllm:replicas", "sglang:ttft"]
    assert gpu_queue.main(["out", "--gpus", "2", *names]) == 0
    assert sorted(noted()[:2]) == ["gpu:copies 0 590", "vllm:misses 1 590"]
    assert noted()[2:] == ["vllm:ranks 0,1 590", "vllm:replicas 0,1 590", "sglang:ttft 0 590"]


def test_two_queues_share_a_machine_where_one_begins_behind_the_gpus_of_the_other(lines: dict[str, str]) -> None:
    assert gpu_queue.main(["out", "--gpus", "2", "--first", "2", "vllm:ranks", "gpu:pd"]) == 0
    assert noted() == ["vllm:ranks 2,3 590", "gpu:pd 2 590"]


def test_one_that_fails_stops_no_other_and_what_it_printed_is_kept(lines: dict[str, str]) -> None:
    lines["gpu:copies"] = "echo of no use; exit 3"
    assert gpu_queue.main(["out", "gpu:copies", "gpu:pd=60"]) == 1
    assert noted() == ["gpu:copies 0 590", "gpu:pd 0 60"]
    assert Path("out/gpu_copies/log").read_text() == "of no use\n"


def test_one_that_hangs_is_ended_with_all_that_it_started(
    lines: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what has a process group of its own, as behind `timeout`."""
    monkeypatch.setattr(gpu_queue, "_GRACE_SECONDS", 0)
    lines["gpu:pd"] = "timeout 3600 bash -c 'echo $$ >child; sleep 3600'"
    assert gpu_queue.main(["out", "gpu:pd=1"]) == 1
    assert has_ended(Path("child").read_text())


def test_what_a_part_leaves_running_is_ended_with_it(lines: dict[str, str]) -> None:
    """An engine whose benchmark failed would keep its GPU from the next part."""
    lines["gpu:pd"] = "sleep 3600 & echo $! >child; exit 1"
    assert gpu_queue.main(["out", "gpu:pd"]) == 1
    assert has_ended(Path("child").read_text())


def test_what_there_is_no_time_for_does_not_begin_and_counts(
    lines: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_queue.main(["out", "--seconds", "0", "gpu:pd"]) == 1
    assert not Path("noted").exists() and "no time for gpu:pd" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["gpu.pd"], ["other:pd"], ["gpu:pd=x"], ["vllm:ranks"], ["gpu:copies=60"]])
def test_what_cannot_run_is_told_at_once(lines: dict[str, str], wrong: list[str]) -> None:
    """The last is named twice, and both would write to one folder."""
    with pytest.raises(SystemExit) as error:
        gpu_queue.main(["out", "gpu:copies", *wrong])
    assert error.value.code == 2 and not Path("noted").exists()


def test_a_part_is_one_of_its_script(tmp_path: Path) -> None:
    sites = {"vllm": "/v", "peers": "/p", "sglang": ""}
    names = "gpu:pd", "vllm:serving_24_12", "sglang:ttft=60"
    commands = [parse_part(name).command(sites, tmp_path) for name in names]
    assert [[Path(words[1]).name, *words[2:]] for words in commands] == [
        ["gpu.sh", str(tmp_path), "pd"],
        ["gpu_vllm.sh", "/v", str(tmp_path), "/p", "serving_24_12"],
        ["gpu_sglang.sh", "", str(tmp_path), "ttft"],
    ]
