"""Parts of gpu.sh, gpu_vllm.sh and gpu_sglang.sh on a machine with several GPUs, each part on a GPU of its own.

    python3 integration/gpu_queue.py OUT [--vllm SITE] [--peers FOLDER] [--sglang SITE] [--gpus N] [--first M]
        [--seconds S] PART...

A part is `gpu:PART`, `vllm:PART` or `sglang:PART`, as those scripts name them, and with `=SECONDS` behind it takes no
longer than so many; `vllm:ranks`, `vllm:families` and `vllm:replicas` take two GPUs. They begin in the order in which
they are named, as GPUs are free, and one that waits for two holds up those behind it. After `--seconds` none begins,
and what runs then is ended: what it had written until then is in its folder, OUT/SCRIPT_PART, with all that it printed
in `log`. Parts share the machine's cores and host memory, which a figure that depends on them should say. The exit
status says whether a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PART_SECONDS = 590
_GRACE_SECONDS = 20  # that a script has to end its part itself
_TWO_GPUS = {"vllm:ranks", "vllm:families", "vllm:replicas"}


@dataclass(frozen=True, slots=True)
class Part:
    """What is to run, and for how long at most."""

    name: str
    seconds: int

    @property
    def num_gpus(self) -> int:
        return 2 if self.name in _TWO_GPUS else 1

    @property
    def folder(self) -> str:
        return self.name.replace(":", "_")

    def command(self, sites: Mapping[str, str], out: Path) -> list[str]:
        script, part = self.name.split(":")
        if script == "gpu":
            return ["bash", str(HERE / "gpu.sh"), str(out), part]
        peers = [sites["peers"]] if script == "vllm" else []
        return ["bash", str(HERE / f"gpu_{script}.sh"), sites[script], str(out), *peers, part]


def parse_part(text: str) -> Part:
    """Raises ValueError for what is none."""
    found = re.fullmatch(r"((?:gpu|vllm|sglang):[\w.]+)(?:=(\d+))?", text)
    if not found:
        raise ValueError(
            f"{text!r} is no part: give gpu:PART, vllm:PART or sglang:PART, and =SECONDS if it has a limit"
        )
    return Part(found[1], int(found[2] or PART_SECONDS))


class Running:
    """A part that has begun."""

    def __init__(self, part: Part, gpus: Sequence[int], sites: Mapping[str, str], out: Path, seconds: float) -> None:
        self.part, self.gpus = part, gpus
        folder = out / part.folder
        folder.mkdir(parents=True, exist_ok=True)
        limit = int(min(part.seconds, seconds))
        self._until = time.monotonic() + limit + _GRACE_SECONDS
        environment = os.environ | {"GPU": ",".join(map(str, gpus)), "PART_SECONDS": str(limit)}
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                part.command(sites, folder), env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def ended(self) -> int | None:
        """Its exit status, or None; one that takes too long is ended, and so is what one has left running."""
        if self._process.poll() is not None or time.monotonic() > self._until:
            self.kill()
        return self._process.poll()

    def kill(self) -> None:
        """End it with all that it has started: an engine that lived on would keep its GPU."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                if stat.read_text().rsplit(")", 1)[1].split()[3] == str(self._process.pid):  # its session
                    os.kill(int(stat.parent.name), signal.SIGKILL)
        self._process.wait()


def run(parts: Sequence[Part], gpus: Sequence[int], sites: Mapping[str, str], out: Path, seconds: float) -> int:
    """Run them. Returns how many failed or never began."""
    begin = time.monotonic()
    free, waiting, running, num_failed = list(gpus), list(parts), list[Running](), 0

    def say(what: str) -> None:
        print(f"{time.monotonic() - begin:6.0f} s  {what}", flush=True)

    try:
        while waiting or running:
            for one, status in [(one, status) for one in running if (status := one.ended()) is not None]:
                running.remove(one)
                free = sorted([*free, *one.gpus])
                num_failed += status != 0
                say(f"{one.part.name} has ended with status {status}")
            left = seconds - (time.monotonic() - begin)
            if waiting and left <= 0:
                say(f"no time for {', '.join(part.name for part in waiting)}")
                num_failed += len(waiting)
                waiting = []
            while waiting and len(free) >= waiting[0].num_gpus:
                part = waiting.pop(0)
                taken, free = free[: part.num_gpus], free[part.num_gpus :]
                running.append(Running(part, taken, sites, out, left))
                say(f"{part.name} begins on {taken}")
            time.sleep(0.2)
    finally:
        for one in running:
            one.kill()
    return num_failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("parts", type=parse_part, nargs="+", metavar="PART")
    parser.add_argument("--vllm", default="", metavar="SITE", help="where vLLM was unpacked; installed, unless given")
    parser.add_argument("--peers", default="", metavar="FOLDER", help="with LMCache")
    parser.add_argument("--sglang", default="", metavar="SITE", help="where SGLang was unpacked")
    parser.add_argument("--gpus", type=int, default=1, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="M", help="the first of them, by the driver's number")
    parser.add_argument("--seconds", type=float, default=86400.0, metavar="S")
    options = parser.parse_args(arguments)
    if most := max((part.num_gpus for part in options.parts if part.num_gpus > options.gpus), default=0):
        parser.error(f"a part needs {most} GPUs: give --gpus {most} or leave it out")
    names = [part.name for part in options.parts]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        parser.error(f"{twice} is named twice, and both would write to OUT/{twice.replace(':', '_')}: name it once")
    named = {"vllm": options.vllm, "peers": options.peers, "sglang": options.sglang}
    sites = {name: folder and str(Path(folder).resolve()) for name, folder in named.items()}
    gpus = range(options.first, options.first + options.gpus)
    return 1 if run(options.parts, gpus, sites, options.out.resolve(), options.seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
