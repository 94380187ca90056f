"""What a machine and a container say of their memory."""

from __future__ import annotations

from pathlib import Path

from kv_connector.machine import cgroup_memory, machine_memory


def test_what_is_free_is_what_the_system_could_give(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    total, free = machine_memory(meminfo)
    assert total == free > 0, "a system that does not say has all"
    meminfo.write_text("MemTotal:       99 kB\nMemFree:        1 kB\nMemAvailable:   7 kB\n")
    assert machine_memory(meminfo) == (total, 7 << 10)
    meminfo.write_text(f"MemAvailable:   {total} kB\n")
    assert machine_memory(meminfo) == (total, total), "no more is free than there is"


def test_the_least_limit_of_all_cgroups_counts(tmp_path: Path) -> None:
    """Of both kinds of hierarchies, and of those above."""
    own = tmp_path / "own"
    unified = tmp_path / "cgroup/kube/pod"
    unified.mkdir(parents=True)
    (unified / "memory.max").write_text("max\n")
    (tmp_path / "memory.max").write_text("4096\n")  # in front of the root, and nobody's limit
    (unified.parent / "memory.max").write_text(f"{8 << 30}\n")
    (unified.parent / "memory.current").write_text(f"{1 << 30}\n")
    own.write_text("0::/kube/pod\n")
    assert cgroup_memory(tmp_path / "cgroup", own) == (8 << 30, 1 << 30)
    older = tmp_path / "cgroup/memory/docker"
    older.mkdir(parents=True)
    (older / "memory.limit_in_bytes").write_text(f"{2 << 30}\n")
    own.write_text("4:cpu,memory:/docker\n0::/kube/pod\n")
    assert cgroup_memory(tmp_path / "cgroup", own) == (2 << 30, 0)
    (older / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    own.write_text("4:memory:/docker\n")
    assert cgroup_memory(tmp_path / "cgroup", own) == (None, 0)
