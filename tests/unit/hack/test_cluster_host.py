"""Processes, groups and rules on the host: found again, ended, cleaned up."""

import json
import os
from pathlib import Path

from hack.cluster import cgroups, network, processes
from hack.cluster.layout import Layout
from hack.cluster.processes import Program


def test_a_program_is_found_again_and_stopped(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    pid = processes.start(layout, Program("sleeper", ["sleep", "600"]))
    try:
        assert processes.pid_of(layout, "sleeper") == pid
        assert processes.start(layout, Program("sleeper", ["sleep", "600"])) == pid
        assert os.getsid(pid) == pid
    finally:
        processes.stop(layout, "sleeper")
    assert processes.pid_of(layout, "sleeper") is None
    os.waitpid(pid, 0)


def test_a_program_that_ignores_the_request_is_ended_all_the_same(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    ready = tmp_path / "ready"
    script = f"trap '' TERM; touch {ready}; exec sleep 600"
    pid = processes.start(layout, Program("stubborn", ["sh", "-c", script]))
    processes.wait_until_exists(ready, timeout_s=10)
    processes.stop(layout, "stubborn", timeout_s=0.05)
    assert processes.start_time_ticks(pid) is None
    os.waitpid(pid, 0)


def test_somebody_elses_process_with_a_reused_pid_is_left_alone(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.run.mkdir()
    (layout.run / "old.json").write_text(json.dumps({"pid": os.getpid(), "started_ticks": 1}))
    assert processes.pid_of(layout, "old") is None
    processes.stop(layout, "old")  # would end this test


def test_a_group_is_made_in_every_hierarchy_of_version_1(tmp_path: Path) -> None:
    for controller in ("cpu", "memory"):
        (tmp_path / controller).mkdir()
        (tmp_path / controller / "cgroup.procs").touch()
    (tmp_path / "cpu,cpuacct").symlink_to("cpu")
    cgroups.make("ours/node1", tmp_path)
    (tmp_path / "cpu/ours/node1/pod").mkdir()
    (tmp_path / "cpu/ours/node1/pod/cgroup.procs").write_text("7\n8\n")
    assert cgroups.hierarchies(tmp_path) == [tmp_path / "cpu", tmp_path / "memory"]
    assert cgroups.processes("ours", tmp_path) == {7, 8}
    (tmp_path / "cpu/ours/node1/pod/cgroup.procs").unlink()
    cgroups.remove("ours", tmp_path)
    assert not list(tmp_path.glob("*/ours"))


def test_controllers_are_handed_down_in_the_one_hierarchy_of_version_2(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    cgroups.make("ours/node1", tmp_path)
    assert (tmp_path / "ours" / "node1").is_dir()
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"  # a plain file keeps the last write


def test_only_the_clusters_rules_are_taken_out() -> None:
    saved = (
        "*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n:DOCKER - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n"
        "-A PREROUTING -j DOCKER\n-A CNI-HOSTPORT-DNAT -p tcp -j CNI-DN-1\nCOMMIT\n"
    )
    assert network.without_cluster_rules(saved) == (
        "*nat\n:PREROUTING ACCEPT [0:0]\n:DOCKER - [0:0]\n-A PREROUTING -j DOCKER\nCOMMIT\n"
    )
