"""GPU time on a real cluster: classes, an annotation that is edited, and core limits. The GPU is the fake one.

Compared are the counters of arbiter and fake driver over some seconds, not times that a busy machine stretches.
"""

from __future__ import annotations

import time

import pytest

from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.gpu_time import computing, container_of, gpu_time_of, ran, under_way
from vgpu.protocol.status import GpuTimeStatus

LC, BE = "latency-critical", "best-effort"
WINDOW_S = 4.0


def gpu_time(namespace: str, name: str) -> GpuTimeStatus:
    found = gpu_time_of(namespace, name)
    assert found is not None, f"pod {name} has reported no channels"
    return found


def percents(namespace: str, *names: str) -> list[float]:
    """Of the GPU's time that each pod had in a window, by the fake driver's count."""
    pids = {}
    for name in names:
        found = container_of(namespace, name)
        assert found is not None
        pids[name] = [process.pid for process in found.processes]
    before = ran()
    time.sleep(WINDOW_S)  # what is counted is what happens in this time
    after = ran()
    passed_s = after.at_s - before.at_s
    return [sum(after.us.get(p, 0) - before.us.get(p, 0) for p in pids[name]) / passed_s / 1e4 for name in names]


def test_a_latency_critical_pod_comes_first_and_a_best_effort_pod_has_the_rest(
    cluster: Cluster, namespace: str
) -> None:
    cluster.run(
        namespace,
        computing("be", kernel_us=300_000, service_class=BE),
        computing("lc", kernel_us=3000, rest_s=0.05, service_class=LC),
    )
    assert cluster.assigned(namespace, "be") == cluster.assigned(namespace, "lc"), "on one GPU"
    under_way(namespace, "be", "lc")
    first = [gpu_time(namespace, name) for name in ("be", "lc")]
    most, few = percents(namespace, "be", "lc")
    (be, lc), (be_then, lc_then) = [gpu_time(namespace, name) for name in ("be", "lc")], first
    requests = lc.arrivals - lc_then.arrivals
    assert requests > 10
    assert be.suspends - be_then.suspends > requests / 2, "its kernels of 300 ms are stopped for requests"
    assert lc.suspends == 0
    waited_s = (lc.off_s + lc.clearing_s) - (lc_then.off_s + lc_then.clearing_s)
    assert waited_s / requests < 0.03, "a tenth of a kernel of the other one"
    assert most > 3 * few > 0, "the container that delays no other has the rest"
    assert (be.mode, lc.mode) == ("suspend", "suspend")
    for one in (be, lc):  # the fake driver's kernel side is not in the device plugin's trial
        assert one.trouble == "" or "not tried: no compute channels were seen" in one.trouble
    assert not be.unreported
    assert not lc.unreported
    assert ran().misuses == 0


def test_an_edited_annotation_of_class_takes_effect_on_a_running_pod(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, computing("one", service_class=BE), computing("other"))
    under_way(namespace, "one", "other")

    def waits(name: str) -> bool:
        now = gpu_time(namespace, name)
        return now.working and not now.on

    eventually(lambda: waits("one"), "the best-effort pod waits")
    cluster.kubectl("-n", namespace, "annotate", "pod", "one", "--overwrite", f"tangram.sh/class={LC}")
    eventually(lambda: waits("other"), "the other one waits: two seconds, and what looking takes", timeout_s=5)
    found = container_of(namespace, "one")
    assert found is not None
    assert (found.service_class, found.gpu_time is not None and found.gpu_time.on) == (LC, True)
    cluster.kubectl("-n", namespace, "annotate", "pod", "one", "tangram.sh/class-")
    eventually(lambda: waits("one"), "it is what it was placed as again", timeout_s=5)


@pytest.mark.parametrize("cores", [(20, 50)])
def test_core_limits_of_two_pods_are_enforced_side_by_side(
    cluster: Cluster, namespace: str, cores: tuple[int, int]
) -> None:
    few, many = cores
    cluster.run(namespace, computing("few", core=few), computing("many", kernel_us=5000, core=many))
    under_way(namespace, "few", "many")
    got_few, got_many = percents(namespace, "few", "many")
    assert few / 2 < got_few < few + 4, "less than asked where the machine is busy"
    assert many / 2 < got_many < many + 4
    assert [gpu_time(namespace, name).requested_percent for name in ("few", "many")] == [few, many]
