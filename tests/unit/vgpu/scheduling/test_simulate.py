"""Workloads from CSV, and what a replay reports of them."""

from __future__ import annotations

import pytest

from vgpu.scheduling.policies.registry import POLICIES
from vgpu.scheduling.simulate import arrivals, replay, too_large
from vgpu.scheduling.workload import BadWorkload, read_nodes, read_pods

NODES = "sn,cpu_milli,memory_mib,gpu,model\na,8000,1000,2,T4\nb,8000,1000,1,P100\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"


def run(pods: str, nodes: str = NODES, policy: str = "binpack", arrive: float = 1.0) -> float:
    hosts, jobs = read_nodes(nodes, "nodes.csv"), read_pods(PODS + pods, "pods.csv", policy)
    return replay(hosts, jobs, 42, arrive).at(round(100 * arrive)).allocation


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_pods_that_fit_exactly_fill_the_cluster(policy: str) -> None:
    assert run("x,0,0,1,500,\n", policy=policy) == 100


def test_cpu_memory_and_model_keep_pods_out() -> None:
    assert run("x,0,0,1,1000,P100\n") == pytest.approx(100 / 3)
    assert run("x,8000,0,1,1000,\n") == pytest.approx(200 / 3)
    assert run("x,0,1000,1,1000,\n") == pytest.approx(200 / 3)
    assert run("x,0,0,2,1000,T4|P100\n") == pytest.approx(200 / 3)


def test_pods_that_no_host_could_take_if_it_were_empty_are_found() -> None:
    pods = "fits,0,0,1,1000,P100\nmodel,0,0,2,500,P100\ngpus,0,0,3,500,\ncpu,8001,0,0,0,\nmemory,0,1001,1,1,\nas,0,0,3,500,\n"
    jobs = read_pods(PODS + pods, "pods.csv", "binpack")
    assert too_large(read_nodes(NODES, "nodes.csv"), jobs * 2) == ["model", "gpus", "cpu", "memory", "as"] * 2


def test_a_pod_without_a_gpu_takes_the_cpu_of_a_host_and_no_gpu() -> None:
    jobs = read_pods(PODS + "x,8000,0,0,0,\ny,1,0,1,1000,\n", "pods.csv", "binpack")
    hosts = read_nodes("sn,cpu_milli,memory_mib,gpu,model\na,8000,1000,1,T4\n", "nodes.csv")
    assert {replay(hosts, jobs, seed, 1.0).at(100).allocation for seed in range(8)} == {0.0, 100.0}


def test_the_same_seed_gives_the_same_run_and_another_one_another_order() -> None:
    hosts = read_nodes(NODES, "nodes.csv")
    jobs = read_pods(PODS + "".join(f"p{n},0,0,1,{100 + 10 * n},\n" for n in range(40)), "pods.csv", "fragmentation")
    assert replay(hosts, jobs, 42, 1.3) == replay(hosts, jobs, 42, 1.3)
    assert arrivals(jobs, 42, 3000, 1.3) != arrivals(jobs, 43, 3000, 1.3)


def test_arrivals_request_the_given_amount_and_no_pod_more() -> None:
    jobs = read_pods(PODS + "x,0,0,1,300,\ny,0,0,1,700,\n", "pods.csv", "binpack")
    arrived = arrivals(jobs, 42, 3000, 1.3)
    requested = [job.gpu_mib for job in arrived]
    assert sum(requested) >= 3900 > sum(requested[:-1])
    assert {job.name for job in arrived[:2]} == {"x", "y"}


def test_gpus_of_ones_own_have_their_size_in_mib() -> None:
    hosts = read_nodes("name,gpu,model,gpu_mib\na,1,T4,16384\n", "nodes.csv")
    jobs = read_pods("name,num_gpu,gpu_mib,gpu_core\nx,1,8192,60\n", "pods.csv", "binpack")
    assert replay(hosts, jobs, 42, 1.0).at(100).allocation == 50


def test_each_line_of_a_pods_file_has_mib_or_thousandths() -> None:
    text = "name,num_gpu,gpu_milli,gpu_mib\nx,1,,300\ny,2,200,\nz,1, ,100\nnone,0,0,0\n"
    assert [job.gpu_mib for job in read_pods(text, "pods.csv", "binpack")] == [300, 400, 100, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x,1,500,300", "columns gpu_mib and gpu_milli are '300' and '500': one of the two must be empty"),
        ("x,1,0,300", "columns gpu_mib and gpu_milli are '300' and '0': one of the two must be empty"),
        ("x,1,,", "column gpu_mib is '': it must be a whole number from 1 to 16777215"),
    ],
)
def test_a_line_with_both_or_neither_is_refused(line: str, message: str) -> None:
    with pytest.raises(BadWorkload) as refused:
        read_pods(f"name,num_gpu,gpu_milli,gpu_mib\n{line}\n", "pods.csv", "binpack")
    assert str(refused.value) == f"pods.csv: line 2, {message}"


@pytest.mark.parametrize(
    ("nodes", "pods", "message"),
    [
        ("sn,gpu\na,1\n", "", r"nodes.csv: line 1 has no column model"),
        (NODES + "c,1,1,x,T4\n", "", r"nodes.csv: line 4, column gpu is 'x': it must be a whole number from 0 to 64"),
        (NODES + "a,1,1,1,T4\n", "", r"nodes.csv: line 4, column sn is 'a': .* of no other line"),
        ("", "", r"nodes.csv has no header line: line 1 must name the columns sn or name, gpu, model$"),
        ("\n" + NODES, "", r"nodes.csv has no header line"),
        (",,\n", "", r"nodes.csv has no header line"),
        (NODES + "c,1\n", "", r"nodes.csv: line 4, column memory_mib: the line has 2 cells: it must have 5"),
        ("sn,gpu,model\na,0,T4\n", "", r"nodes.csv: no node has a GPU"),
        (NODES, "x,0,0,1,1001,\n", r"pods.csv: line 2, column gpu_milli is '1001': .* from 1 to 1000"),
        (NODES, "x,0,0,17,1000,\n", r"pods.csv: line 2, column num_gpu is '17'"),
        (NODES, "x,-1,0,1,1000,\n", r"pods.csv: line 2, column cpu_milli is '-1'"),
        (NODES, "x,0,0,0,0,\n", r"pods.csv: no pod requests a GPU"),
    ],
)
def test_a_malformed_file_is_named_with_line_and_column(nodes: str, pods: str, message: str) -> None:
    with pytest.raises(BadWorkload, match=message):
        run(pods or "x,0,0,1,1,\n", nodes)
