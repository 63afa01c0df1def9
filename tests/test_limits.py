"""What limits host memory: read from made-up machines and from this one, and what is said of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from offplan.measured import HostLimit, HostLimits
from offplan.replay import limits
from offplan.replay.limits import (
    HostMemoryError,
    ceiling_bytes,
    check_room,
    least,
    read_limits,
    reserved_bytes,
    with_trial,
)
from offplan.report.device import render_host

KIB, MIB, GIB = 1024, 1024**2, 1024**3
ROOT = Path(__file__).parent.parent
MEMINFO = "MemTotal:       24683652 kB\nMemFree:        16458696 kB\nMemAvailable:   24083176 kB\n"
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         {soft}              unlimited            bytes
Max address space         unlimited            unlimited            bytes
"""
# All capabilities but CAP_IPC_LOCK, and all.
UNPRIVILEGED, PRIVILEGED = "000001ffffffbfff", "000001ffffffffff"
V2_MOUNT = "30 23 0:26 {top} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {top} {point} rw,relatime - cgroup cgroup rw,memory\n"
V1_UNLIMITED = 9223372036854771712


class Machine:
    """Files of a machine below ``root``, as its kernel would show them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def v2(self, group: str, *, top: str = "/", point: str = "/sys/fs/cgroup") -> None:
        self.write("proc/self/cgroup", f"0::{group}")
        self.write("proc/self/mountinfo", V2_MOUNT.format(top=top, point=point))

    def v1(self, group: str, *, top: str = "/", point: str = "/sys/fs/cgroup/memory") -> None:
        self.write("proc/self/cgroup", f"9:name=systemd:/\n4:cpu,memory:{group}\n0::/")
        self.write("proc/self/mountinfo", V1_MOUNT.format(top=top, point=point))

    def lock(self, soft: object, used_kib: int = 0, capabilities: str = UNPRIVILEGED) -> None:
        self.write("proc/self/limits", LIMITS.format(soft=soft))
        self.write("proc/self/status", f"VmLck:\t {used_kib} kB\nCapEff:\t{capabilities}")

    def found(self, name: str) -> list[HostLimit]:
        return [limit for limit in read_limits(self.root).limits if limit.name == name]


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def group_v2(machine: Machine, folder: str, most: object, current: int, **stat: int) -> None:
    machine.write(f"{folder}/memory.max", most)
    machine.write(f"{folder}/memory.current", current)
    machine.write(f"{folder}/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))


def group_v1(machine: Machine, folder: str, most: int, usage: int, **stat: int) -> None:
    machine.write(f"{folder}/memory.limit_in_bytes", most)
    machine.write(f"{folder}/memory.usage_in_bytes", usage)
    machine.write(f"{folder}/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))


# --- memory of the machine ------------------------------------------------------------------------


def test_what_is_available_is_free_memory_and_not_what_lies_idle(machine):
    machine.write("proc/meminfo", MEMINFO)
    (found,) = machine.found("free memory")
    assert (found.left_bytes, found.limit_bytes) == (24083176 * KIB, 24683652 * KIB)
    assert found.used_bytes == (24683652 - 24083176) * KIB


def test_an_old_kernel_says_only_what_lies_idle(machine):
    machine.write("proc/meminfo", MEMINFO.replace("MemAvailable", "Buffers"))
    (found,) = machine.found("free memory")
    assert found.left_bytes == 16458696 * KIB


def test_what_cannot_be_read_limits_nothing(machine):
    found = read_limits(machine.root)
    assert found == HostLimits()
    assert ceiling_bytes(found, "register") is None
    check_room(found, 10**15, "register")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("proc/meminfo", "MemAvailable: many kB"),
        ("proc/self/cgroup", "nothing of the kind"),
        ("proc/self/mountinfo", "1 2 - cgroup2"),
        ("proc/self/limits", "Max locked memory"),
        ("sys/fs/cgroup/memory.max", "-1"),
    ],
)
def test_files_that_are_not_understood_limit_nothing(machine, path, text):
    machine.v2("/")
    machine.write("sys/fs/cgroup/memory.current", 0)
    machine.write(path, text)
    assert read_limits(machine.root).limits == ()


# --- control groups -------------------------------------------------------------------------------


def test_every_group_above_the_process_limits_in_version_2(machine):
    machine.v2("/pod/job/step")
    group_v2(machine, "sys/fs/cgroup/pod/job/step", "max", GIB)
    group_v2(machine, "sys/fs/cgroup/pod/job", 8 * GIB, 3 * GIB)
    group_v2(machine, "sys/fs/cgroup/pod", 64 * GIB, 61 * GIB)
    # The topmost group of a machine has no such files.
    machine.write("sys/fs/cgroup/cgroup.procs", 1)
    found = {limit.where: limit.left_bytes for limit in machine.found("cgroup")}
    assert found == {
        "/sys/fs/cgroup/pod/job/memory.max": 5 * GIB,
        "/sys/fs/cgroup/pod/memory.max": 3 * GIB,
    }
    limit = least(read_limits(machine.root), "register")
    assert limit is not None
    assert limit.where == "/sys/fs/cgroup/pod/memory.max"


def test_every_group_above_the_process_limits_in_version_1(machine):
    machine.v1("/docker/abc")
    group_v1(machine, "sys/fs/cgroup/memory/docker/abc", 2 * GIB, GIB)
    group_v1(machine, "sys/fs/cgroup/memory/docker", V1_UNLIMITED, 9 * GIB)
    group_v1(machine, "sys/fs/cgroup/memory", 16 * GIB, 15 * GIB + 512 * MIB)
    found = {limit.where: limit.left_bytes for limit in machine.found("cgroup")}
    assert found == {
        "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": GIB,
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": 512 * MIB,
    }


def test_a_group_of_version_1_that_counts_only_itself_does_not_limit_those_below(machine):
    machine.v1("/one")
    group_v1(machine, "sys/fs/cgroup/memory/one", 2 * GIB, GIB)
    group_v1(machine, "sys/fs/cgroup/memory", GIB, 0)
    machine.write("sys/fs/cgroup/memory/one/memory.use_hierarchy", 0)
    assert [limit.limit_bytes for limit in machine.found("cgroup")] == [2 * GIB]
    machine.write("sys/fs/cgroup/memory/one/memory.use_hierarchy", 1)
    assert [limit.limit_bytes for limit in machine.found("cgroup")] == [2 * GIB, GIB]


def test_file_pages_do_not_count_unless_they_wait_to_be_written(machine):
    machine.v2("/")
    stat = {"anon": GIB, "inactive_file": 4 * GIB, "active_file": GIB, "file_dirty": GIB}
    group_v2(machine, "sys/fs/cgroup", 8 * GIB, 7 * GIB, **stat)
    (found,) = machine.found("cgroup")
    assert (found.used_bytes, found.left_bytes) == (3 * GIB, 5 * GIB)
    # Counts are of different moments: more file pages than there is usage is no credit.
    group_v2(machine, "sys/fs/cgroup", 8 * GIB, GIB, inactive_file=2 * GIB)
    (found,) = machine.found("cgroup")
    assert (found.used_bytes, found.left_bytes) == (0, 8 * GIB)


def test_file_pages_of_a_version_1_group_are_those_of_all_below_it(machine):
    machine.v1("/")
    stat = {"inactive_file": 5, "total_inactive_file": 4 * GIB, "total_dirty": GIB}
    group_v1(machine, "sys/fs/cgroup/memory", 8 * GIB, 7 * GIB, **stat)
    assert [limit.left_bytes for limit in machine.found("cgroup")] == [4 * GIB]


def test_a_group_over_its_limit_leaves_nothing(machine):
    machine.v2("/")
    group_v2(machine, "sys/fs/cgroup", GIB, 2 * GIB)
    assert [limit.left_bytes for limit in machine.found("cgroup")] == [0]


def test_what_holds_a_process_up_limits_as_what_kills_it(machine):
    machine.v2("/")
    group_v2(machine, "sys/fs/cgroup", 8 * GIB, GIB)
    machine.write("sys/fs/cgroup/memory.high", 4 * GIB)
    assert [limit.left_bytes for limit in machine.found("cgroup")] == [7 * GIB, 3 * GIB]


@pytest.mark.parametrize(
    ("group", "top"),
    [
        # Its own group is the top that a container sees; it is told so, or the host's name of it.
        ("/docker/abc", "/docker/abc"),
        ("/", "/"),
        ("/docker/abc", "/"),
        ("/../other", "/"),
        ("/kubepods/pod1/abc", "/docker"),
    ],
)
def test_a_container_finds_its_own_group_at_the_top_of_the_mount(machine, group, top):
    machine.v2(group, top=top)
    group_v2(machine, "sys/fs/cgroup", 2 * GIB, GIB)
    (found,) = machine.found("cgroup")
    assert (found.left_bytes, found.where) == (GIB, "/sys/fs/cgroup/memory.max")


def test_a_group_below_a_mounted_one_that_is_not_the_top(machine):
    machine.v2("/user/job/step", top="/user", point="/cgroups/my\\040mount")
    group_v2(machine, "cgroups/my mount/job/step", 2 * GIB, GIB)
    group_v2(machine, "cgroups/my mount", 4 * GIB, GIB)
    assert [limit.left_bytes for limit in machine.found("cgroup")] == [GIB, 3 * GIB]


def test_both_versions_at_once_each_limit(machine):
    machine.v1("/old")
    mounts = V1_MOUNT.format(top="/", point="/v1") + V2_MOUNT.format(top="/", point="/v2")
    machine.write("proc/self/mountinfo", mounts)
    group_v1(machine, "v1/old", 2 * GIB, 0)
    group_v2(machine, "v2", GIB, 0)
    assert [limit.limit_bytes for limit in machine.found("cgroup")] == [2 * GIB, GIB]


# --- locked memory --------------------------------------------------------------------------------


def test_locked_bytes_count_against_the_lock_limit(machine):
    machine.lock(256 * MIB, used_kib=56 * KIB)
    (found,) = machine.found("ulimit -l")
    assert (found.limit_bytes, found.used_bytes) == (256 * MIB, 56 * MIB)
    assert found.left_bytes == 200 * MIB


@pytest.mark.parametrize("soft", [256 * MIB, "unlimited"])
def test_the_lock_limit_does_not_hold_for_who_may_lock_anything(machine, soft):
    machine.lock(soft, capabilities=PRIVILEGED)
    (found,) = machine.found("ulimit -l")
    assert found.left_bytes is None
    assert "CAP_IPC_LOCK" in found.note
    machine.lock("unlimited")
    assert [limit.left_bytes for limit in machine.found("ulimit -l")] == [None]


def test_the_lock_limit_holds_for_pages_that_are_locked_only(machine):
    machine.write("proc/meminfo", MEMINFO)
    machine.lock(256 * MIB)
    found = read_limits(machine.root)
    available = 24083176 * KIB - limits.MARGIN_BYTES
    assert ceiling_bytes(found, "register") == 256 * MIB
    assert ceiling_bytes(found, "torch") == available
    assert ceiling_bytes(found, "off") == available
    check_room(found, 256 * MIB, "register")
    check_room(found, GIB, "torch")
    with pytest.raises(HostMemoryError):
        check_room(found, 256 * MIB + 1, "register")


# --- the ceiling and its message ------------------------------------------------------------------


def test_the_message_names_host_pinned_memory_the_amount_and_the_limit(machine):
    machine.write("proc/meminfo", MEMINFO)
    machine.lock(256 * MIB)
    with pytest.raises(HostMemoryError) as raised:
        check_room(read_limits(machine.root), GIB, "register")
    assert raised.value.what == (
        "1GiB of host pinned memory do not fit: ulimit -l leaves 256MiB of 256MiB"
    )
    assert "--pin torch" in raised.value.fix
    assert "CUDA out of memory" not in str(raised.value)
    machine.v2("/job")
    group_v2(machine, "sys/fs/cgroup/job", 2 * GIB, 1932735284)
    with pytest.raises(HostMemoryError) as raised:
        check_room(read_limits(machine.root), GIB, "torch")
    assert raised.value.what == (
        "1GiB of host pinned memory do not fit: cgroup leaves 214.75 MB (214748364 bytes) of 2GiB "
        "(/sys/fs/cgroup/job/memory.max)"
    )
    assert f"--host-budget {214748364 - limits.MARGIN_BYTES}" in raised.value.fix


def test_a_trial_that_was_refused_limits_and_another_does_not(machine):
    machine.write("proc/meminfo", MEMINFO)
    found = read_limits(machine.root)
    assert ceiling_bytes(with_trial(found, GIB, is_limit=True), "torch") == GIB
    assert ceiling_bytes(with_trial(found, GIB, is_limit=False), "torch") > GIB
    assert ceiling_bytes(with_trial(found, 0, is_limit=True), "torch") == 0


@pytest.mark.parametrize(
    ("asked", "register", "torch"),
    [(0, 0, 0), (1, 4096, 4096), (4097, 8192, 8192), (129_500_000, 129_503_232, 128 * MIB)],
)
def test_pages_are_taken_whole_and_by_torch_in_powers_of_two(monkeypatch, asked, register, torch):
    monkeypatch.setattr(limits, "PAGE_BYTES", 4096)
    assert reserved_bytes(asked, "register") == reserved_bytes(asked, "off") == register
    assert reserved_bytes(asked, "torch") == torch
    assert reserved_bytes(135_000_000, "torch") == 256 * MIB


# --- this machine ---------------------------------------------------------------------------------


def test_the_limits_of_this_machine_leave_something():
    found = read_limits()
    by_name = {limit.name: limit for limit in found.limits}
    assert 0 < by_name["free memory"].left_bytes < by_name["free memory"].limit_bytes
    assert "ulimit -l" in by_name
    assert 0 < found.map_count < found.max_map_count
    assert ceiling_bytes(found, "off") > 0


def test_limits_are_read_without_torch():
    program = "import sys, offplan.replay.limits; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_lock_limit_of_a_process_is_found_in_it():
    """In a process of its own, which lowers its limit for good."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
        "from offplan.replay.limits import read_limits\n"
        "(found,) = [l for l in read_limits().limits if l.name == 'ulimit -l']\n"
        "print(found.limit_bytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{1 << 20}\n"


# --- what is printed ------------------------------------------------------------------------------

PRINTED = """\
Host memory
  limit           leaves         of     in use  from
  free memory   24.66 GB   25.28 GB  614.89 MB  /proc/meminfo
  cgroup         3.22 GB    8.59 GB    5.37 GB  /sys/fs/cgroup/job/memory.max
  ulimit -l    209.72 MB  268.44 MB   58.72 MB  /proc/self/limits
  trial pin          any    1.07 GB
  ceiling    209.72 MB (ulimit -l)
  ulimit -l  holds for --pin register
  trial pin  no size was refused
  mappings   150 of 65,530 (vm.max_map_count)
"""


def test_the_limits_are_printed_with_the_least_of_them(machine):
    machine.write("proc/meminfo", MEMINFO)
    machine.v2("/job")
    group_v2(machine, "sys/fs/cgroup/job", 8 * GIB, 5 * GIB)
    machine.lock(256 * MIB, used_kib=56 * KIB)
    machine.write("proc/self/maps", "\n".join(["7f00-7f01 r--p"] * 150))
    machine.write("proc/sys/vm/max_map_count", 65530)
    found = with_trial(read_limits(machine.root), GIB, is_limit=False, note="no size was refused")
    assert render_host(found, "text", 80) == PRINTED
    assert '"max_map_count": 65530' in render_host(found, "json", 80)
    assert "| ulimit -l |" in render_host(found, "markdown", 80)
