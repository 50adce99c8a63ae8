"""How much memory this process may use: control groups of both versions, ranks, its own limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import run_python

import ptsave
from ptsave.background.saves import StagingBudget
from ptsave.deltas import Publisher
from ptsave.errors import StagingFullError
from ptsave.support import config
from ptsave.support.config import available_nbytes, dirty_nbytes, limit_nbytes, share_nbytes
from ptsave.writing import targets as writing

MIB = 1 << 20
PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
UNLIMITED_V1 = "9223372036854771712"


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


class System:
    """A made ``/proc`` and ``/sys``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mounts: list[str] = []
        self.write("proc/self/cgroup", "")
        self.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable:   {8 << 10} kB\n")

    def write(self, path: str, text: str | int | bytes) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else str(text).encode())

    def member_of(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def mount_v2(self, target: str = "/sys/fs/cgroup", source: str = "/") -> None:
        self._mount(source, target, "cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot")

    def mount_v1(self, target: str = "/sys/fs/cgroup/memory", source: str = "/") -> None:
        self._mount(source, target, "cgroup cgroup rw,memory")

    def _mount(self, source: str, target: str, kind: str) -> None:
        place = f"30 23 0:26 {source} {target} rw,nosuid shared:9 master:1 - {kind}"
        self._mounts.append(place)
        self.write("proc/self/mountinfo", "".join(f"{line}\n" for line in self._mounts))


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


# ---------------------------------------------------------------------------------------- limits


def test_none(system: System) -> None:
    assert limit_nbytes(system.root) == PHYSICAL
    assert limit_nbytes(system.root / "nowhere") == PHYSICAL
    assert available_nbytes(system.root / "nowhere") == PHYSICAL


@pytest.mark.parametrize("limited", ["/", "/a.slice", "/a.slice/b.slice", "/a.slice/b.slice/c"])
@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
def test_v2_and_its_ancestors(system: System, limited: str, name: str) -> None:
    system.member_of("0::/a.slice/b.slice/c")
    system.mount_v2()
    for folder in ("/a.slice", "/a.slice/b.slice", "/a.slice/b.slice/c", "/a.slice/other"):
        system.write(f"/sys/fs/cgroup{folder}/memory.max", "max\n")
    system.write("/sys/fs/cgroup/a.slice/other/memory.max", MIB)  # not ours
    system.write(f"/sys/fs/cgroup{limited}/{name}", f"{512 * MIB}\n")
    assert limit_nbytes(system.root) == 512 * MIB


def test_v2_the_least_counts(system: System) -> None:
    system.member_of("0::/a/b")
    system.mount_v2()
    system.write("/sys/fs/cgroup/a/memory.max", 300 * MIB)
    system.write("/sys/fs/cgroup/a/memory.high", 200 * MIB)
    system.write("/sys/fs/cgroup/a/b/memory.max", 250 * MIB)
    assert limit_nbytes(system.root) == 200 * MIB


@pytest.mark.parametrize("limited", ["/", "/docker", "/docker/1234"])
def test_v1_and_its_ancestors(system: System, limited: str) -> None:
    system.member_of("5:devices:/elsewhere", "4:cpu,memory:/docker/1234", "0::/docker/1234")
    system.mount_v1()
    for folder in ("", "/docker", "/docker/1234"):
        system.write(f"/sys/fs/cgroup/memory{folder}/memory.limit_in_bytes", UNLIMITED_V1)
    system.write(f"/sys/fs/cgroup/memory{limited}/memory.limit_in_bytes", f"{512 * MIB}\n")
    assert limit_nbytes(system.root) == 512 * MIB


def test_v1_ancestors_outside_the_mount(system: System) -> None:
    system.member_of("4:memory:/pod/1234")
    system.mount_v1(source="/pod/1234")
    system.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED_V1)
    statistics = f"cache 0\nhierarchical_memory_limit {256 * MIB}\nhierarchical_memsw_limit 1\n"
    system.write("/sys/fs/cgroup/memory/memory.stat", statistics)
    assert limit_nbytes(system.root) == 256 * MIB


def test_hybrid(system: System) -> None:
    """The memory controller is version 1's; version 2 is mounted beside it."""
    system.member_of("4:memory:/job", "1:name=systemd:/job", "0::/job")
    system.mount_v1()
    system.mount_v2("/sys/fs/cgroup/unified")
    system.write("/sys/fs/cgroup/unified/job/cgroup.procs", "")
    system.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", 128 * MIB)
    assert limit_nbytes(system.root) == 128 * MIB


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/", "/"),  # a name space of its own
        ("/docker/1234", "/docker/1234"),  # the host's names, the container's part mounted
        ("/docker/1234/init.scope", "/docker/1234"),
        ("/", "/docker/1234"),  # mounted from outside
        ("/docker/1234", "/other"),
        ("/", "/.."),
        ("/../../job", "/"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_containers(system: System, path: str, source: str, version: int) -> None:
    if version == 1:
        system.member_of(f"9:memory:{path}")
        system.mount_v1(source=source)
        system.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", 512 * MIB)
    else:
        system.member_of(f"0::{path}")
        system.mount_v2(source=source)
        system.write("/sys/fs/cgroup/memory.max", 512 * MIB)
    assert limit_nbytes(system.root) == 512 * MIB


def test_another_container_is_mounted_as_well(system: System) -> None:
    system.member_of("0::/job")
    system.mount_v2("/run/other", source="/docker/1234")
    system.mount_v2()
    system.write("/run/other/memory.max", MIB)
    system.write("/sys/fs/cgroup/job/memory.max", 512 * MIB)
    assert limit_nbytes(system.root) == 512 * MIB


def test_odd_names(system: System) -> None:
    system.member_of("0::/a b:c,memory/d")
    system.mount_v2(r"/mnt/with\040space\134and")
    system.write("/mnt/with space\\and/a b:c,memory/d/memory.max", 512 * MIB)
    assert limit_nbytes(system.root) == 512 * MIB


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"max", UNLIMITED_V1.encode(), b"-1", b"0", b"0x10"),
        *(b"1 2", b"1e9", b"\xff\x00", b"9" * 5000),
    ],
)
def test_no_limit(system: System, text: bytes) -> None:
    """Unlimited, malformed, or impossible."""
    system.member_of("4:memory:/", "0::/")
    system.mount_v1()
    system.mount_v2()
    system.write("/sys/fs/cgroup/memory.max", text)
    system.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", text)
    system.write("/sys/fs/cgroup/memory/memory.stat", b"hierarchical_memory_limit " + text)
    assert limit_nbytes(system.root) == PHYSICAL
    assert available_nbytes(system.root) == 8 * MIB


@pytest.mark.parametrize(
    "garbage",
    [
        *(b"", b"\n\n", b"::", b"0:", b"0::job", b"4:memory:"),
        *(b"\xff\xfe\x00", b"0::/\x00", b"- - -\n - cgroup2"),
    ],
)
def test_malformed_proc(system: System, garbage: bytes) -> None:
    system.mount_v2()
    system.write("proc/self/cgroup", garbage)
    assert limit_nbytes(system.root) == PHYSICAL
    system.member_of("0::/")
    for line in (garbage, b"1 2 3 rel rel - cgroup2 x rw", b"1 2 3 / - cgroup2 cgroup2 rw"):
        system.write("proc/self/mountinfo", line)
        assert limit_nbytes(system.root) == PHYSICAL
    (system.root / "proc/self/mountinfo").unlink()
    (system.root / "proc/self/mountinfo").mkdir()
    assert limit_nbytes(system.root) == PHYSICAL


# ------------------------------------------------------------------------------------- what is free


def test_available(system: System) -> None:
    system.write("proc/meminfo", f"MemAvailable: {900 << 10} kB\n")
    assert available_nbytes(system.root) == 900 * MIB
    system.member_of("0::/job")
    system.mount_v2()
    system.write("/sys/fs/cgroup/job/memory.max", 512 * MIB)
    system.write("/sys/fs/cgroup/job/memory.current", 400 * MIB)
    assert available_nbytes(system.root) == 112 * MIB
    statistics = f"file {300 * MIB}\ninactive_file {20 * MIB}\nactive_file {10 * MIB}\nshmem 7\n"
    system.write("/sys/fs/cgroup/job/memory.stat", statistics)
    assert available_nbytes(system.root) == 142 * MIB
    system.write("/sys/fs/cgroup/job/memory.current", 700 * MIB)
    assert available_nbytes(system.root) == 0


def test_available_v1(system: System) -> None:
    system.write("proc/meminfo", f"MemAvailable: {900 << 10} kB\n")
    system.member_of("4:memory:/job/step")
    system.mount_v1()
    system.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", 512 * MIB)
    system.write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", 400 * MIB)
    statistics = f"inactive_file 1\ntotal_inactive_file {20 * MIB}\ntotal_active_file {10 * MIB}\n"
    system.write("/sys/fs/cgroup/memory/job/memory.stat", statistics)
    assert available_nbytes(system.root) == 142 * MIB


# -------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("8", 8), ("1", 1), ("0", 1), ("-2", 1), ("", 1), ("many", 1), ("9" * 99, 1)],
)
def test_ranks(system: System, monkeypatch: pytest.MonkeyPatch, text: str, ranks: int) -> None:
    system.member_of("0::/")
    system.mount_v2()
    system.write("/sys/fs/cgroup/memory.max", 512 * MIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert share_nbytes(config.local_world_size(), system.root) == 512 * MIB // ranks
    assert share_nbytes(ranks) <= PHYSICAL // ranks


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_own_limits(monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    """They are not shared by the ranks."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (8 * MIB, 9 * MIB) if which == kind else unlimited
    )
    assert share_nbytes(4) == 8 * MIB


def test_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fsync a file larger than what a container may cache goes past the page cache."""
    _, plentiful = writing._dirty_limits()
    monkeypatch.setattr(config, "available_nbytes", lambda: 10 * MIB)
    begin, limit = writing._dirty_limits()
    assert begin < limit <= min(plentiful, 10 * MIB)


def test_past_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers go there before the kernel makes them wait, counting what is dirty already."""
    monkeypatch.setattr(writing, "_dirty_limits", lambda: (60 * MIB, 120 * MIB))
    monkeypatch.setattr(config, "dirty_nbytes", lambda: 20 * MIB)
    assert writing.direct_nbytes(70 * MIB, fsync=False) == 0
    assert writing.direct_nbytes(71 * MIB, fsync=False) == MIB
    assert writing.direct_nbytes(60 * MIB, fsync=False, in_background=True) == 0
    assert writing.direct_nbytes(61 * MIB, fsync=False, in_background=True) == 61 * MIB
    assert writing.direct_nbytes(50 * MIB, fsync=True) == 50 * MIB
    assert writing.direct_nbytes(1, fsync=True) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert writing.direct_nbytes(18 * MIB, fsync=False) == MIB // 2
    monkeypatch.setattr(config, "dirty_nbytes", lambda: 200 * MIB)
    assert writing.direct_nbytes(18 * MIB, fsync=False) == 18 * MIB


def test_dirty(system: System) -> None:
    assert dirty_nbytes(system.root) == 0
    system.write("proc/meminfo", "Dirty:    12 kB\nWriteback:    4 kB\nWritebackTmp:   64 kB\n")
    assert dirty_nbytes(system.root) == 16 << 10


def test_room() -> None:
    """What is free delays a reservation while there are others, and refuses none for good."""
    budget = StagingBudget()
    asked: list[int] = []

    def room() -> int:
        asked.append(1)
        return 150 * MIB

    first = budget.reserve(200 * MIB, 400 * MIB, wait=False, room=room)
    assert asked == []
    with pytest.raises(StagingFullError) as caught:
        budget.reserve(100 * MIB, 400 * MIB, wait=False, room=room)
    assert (caught.value.staged_nbytes, caught.value.max_staged_bytes) == (200 * MIB, 150 * MIB)
    budget.reserve(100 * MIB, 400 * MIB, wait=False).release()  # the user's word alone counts
    first.release()
    first = budget.reserve(100 * MIB, 400 * MIB, wait=False, room=room)
    budget.reserve(50 * MIB, 400 * MIB, wait=False, room=room)
    with pytest.raises(StagingFullError, match="400"):
        budget.reserve(500 * MIB, 400 * MIB, wait=True, room=room)


def test_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.current().max_pinned_nbytes == min(64 * MIB, share_nbytes(1) // 8)
    monkeypatch.setattr(config, "share_nbytes", lambda _: 160 * MIB)
    assert config.current().max_pinned_nbytes == 20 * MIB
    monkeypatch.setenv("PTSAVE_MAX_PINNED_BYTES", str(40 * MIB))
    assert config.current().max_pinned_nbytes == 40 * MIB


# -------------------------------------------------------------------------- a control group's limit

SAVES = """
import sys, torch, ptsave
from ptsave.support import config
torch.set_num_threads(1)
print(config.limit_nbytes() >> 20)
tensor = torch.ones(64 << 20)  # 256 MiB
futures = [ptsave.async_save(tensor, f"{sys.argv[1]}/{i % 2}.pt", fsync=True) for i in range(6)]
for future in futures: future.result()
try:
    ptsave.async_save(torch.empty(256 << 20), f"{sys.argv[1]}/large.pt")
except ptsave.StagingFullError as error:
    print(error.max_staged_bytes >> 20)
"""


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Yield the folder of a new control group that is limited to 1 GiB, or to a given size."""
    nbytes: int = getattr(request, "param", 1 << 30)
    parents = {
        Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
        Path("/sys/fs/cgroup"): "memory.max",
    }
    for parent, limit in parents.items():
        folder = parent / f"ptsave-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(nbytes))
        except OSError:
            folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("control groups are not writable here")


def run_in(group: Path, program: str, *arguments: object) -> str:
    """Run a program in a control group, and return its output."""

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    result = run_python(program, *arguments, preexec_fn=enter)
    assert (result.stderr, result.returncode) == ("", 0)
    return str(result.stdout)


def test_a_container_is_not_killed_for_memory(group: Path, tmp_path: Path) -> None:
    assert run_in(group, SAVES, tmp_path) == "1024\n512\n"


SAVE_WITH_BASE = """
import sys, torch, ptsave
torch.set_num_threads(1)
tensors = {str(i): torch.full((8 << 20,), i, dtype=torch.uint8) for i in range(32)}  # 256 MiB
tensors["3"] += 1
print(ptsave.save(tensors, f"{sys.argv[1]}/new.pt", base=f"{sys.argv[1]}/old.pt").shared >> 20)
"""


@pytest.mark.parametrize("group", [640 * MIB], indirect=True)
def test_a_base_needs_no_memory(group: Path, shared: Path) -> None:
    tensors = {str(i): torch.full((8 * MIB,), i, dtype=torch.uint8) for i in range(32)}
    torch.save(tensors, shared / "old.pt")
    os.sync()
    assert int(run_in(group, SAVE_WITH_BASE, shared)) >= 240


APPLY = """
import sys, torch
from ptsave.deltas import apply
torch.set_num_threads(1)
print(apply(f"{sys.argv[1]}/versions", f"{sys.argv[1]}/served"))
"""


@pytest.mark.parametrize("group", [512 * MIB], indirect=True)
@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_patched_files_may_be_larger_than_memory(
    group: Path, tmp_path: Path, encoding: Any
) -> None:
    tensors = {str(i): torch.full((8 * MIB,), i, dtype=torch.uint8) for i in range(72)}
    ptsave.save_model(tensors, tmp_path / "served")
    publisher = Publisher(tmp_path / "versions", tensors, encoding=encoding)
    for tensor in tensors.values():
        tensor[::200] += 1
    publisher.publish(tensors)
    os.sync()
    assert run_in(group, APPLY, tmp_path) == "1\n"
    found = ptsave.load(tmp_path / "served", mmap=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
