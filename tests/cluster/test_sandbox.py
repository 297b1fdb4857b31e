"""Which cgroup hierarchies a host has, read from its mount table."""

from pathlib import Path

import pytest

from e2e.cluster.sandbox import cgroup_roots

V1 = """\
24 21 0:22 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
25 24 0:23 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
26 24 0:24 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
27 24 0:25 / /mnt/odd\\040name rw - cgroup cgroup rw,pids
"""
V2 = "30 21 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    "case, mountinfo, want",
    [
        (
            "version 1, with the unified hierarchy beside it",
            V1,
            [("/sys/fs/cgroup/cpu,cpuacct", False), ("/sys/fs/cgroup/unified", True), ("/mnt/odd name", False)],
        ),
        ("version 2 alone", V2, [("/sys/fs/cgroup", True)]),
        ("none", "21 1 8:1 / / rw,relatime - ext4 /dev/vda rw\n", []),
    ],
)
def test_hierarchies_of_a_host(case, mountinfo, want):
    assert cgroup_roots(mountinfo) == [(Path(path), is_v2) for path, is_v2 in want]
