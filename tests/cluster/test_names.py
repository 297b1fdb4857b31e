"""Names of clusters, and the ports that follow from them."""

import socket

import pytest

from e2e.cluster import names
from e2e.cluster.errors import ClusterError
from e2e.cluster.names import ClusterName


@pytest.mark.parametrize("text", ["", "A", "9lives", "-x", "a_b", "a/b", "..", "a" * 32, "a b", "a\n"])
def test_a_name_that_could_leave_its_directory_is_refused(text):
    with pytest.raises(ClusterError, match="lower-case letter"):
        ClusterName(text)


def test_everything_the_host_sees_differs_between_two_names():
    one, other = ClusterName("demo"), ClusterName("second")
    assert one.run_dir != other.run_dir
    assert one.cgroup != other.cgroup
    assert not set(one.preferred_ports(3)) & set(other.preferred_ports(3))


def test_ports_are_the_same_at_each_start_and_below_the_ephemeral_range():
    ports = ClusterName("demo").preferred_ports(3)
    assert ports == ClusterName("demo").preferred_ports(3)
    assert all(names.FIRST_PORT <= port < 32_768 for port in ports)


def test_a_taken_port_is_not_given():
    name = ClusterName("port-test")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        preferred = name.preferred_ports(2)
        taken.close()
        with socket.create_server(("127.0.0.1", preferred[1])):
            given = names.free_ports(name, 2)
    assert preferred[1] not in given
    assert len(set(given)) == 2


def test_sweep_removes_what_a_dead_process_left_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("TKCC_CACHE", str(tmp_path))
    mine, dead, named = ClusterName.unique(), ClusterName("own-999999999-1"), ClusterName("demo")
    for name in (mine, dead, named):
        name.run_dir.mkdir(parents=True)
    ClusterName.sweep()
    assert mine.run_dir.exists() and named.run_dir.exists()
    assert not dead.run_dir.exists()
