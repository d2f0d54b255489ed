"""What an operator may be warned by, for the metrics that are worth it. Expressions are PromQL; times and limits are guesses to start from.

The chart's PrometheusRule has a rule for each (prometheusRule.enabled); a test compares the two.
"""

from __future__ import annotations

from typing import Final

ALERTS: Final = {
    "tangram_webhook_admissions_total": '`rate(...{result="error"}[5m]) > 0` for 10 min: it refuses pods because of faults of its own',
    "tangram_webhook_admission_duration_seconds": "99th percentile > 0.1 s for 10 min: the API server waits for it with each pod that requests GPUs",
    "tangram_webhook_certificate_not_after_timestamp_seconds": "`... - time() < 7 * 86400`: the certificate was not renewed",
    "tangram_webhook_certificate_failures_total": "`increase(...[1h]) > 10`: certificates cannot be kept; the one in use stays until it expires",
    "tangram_webhook_refused_total": "`increase(...[10m]) > 100`: a listener is flooded, or refuses clients that it should serve; the label gives the reason",
    "tangram_extender_request_duration_seconds": '99th percentile of `verb="filter"` > 0.05 s for 10 min: scheduling is slow',
    "tangram_extender_requests_total": '`rate(...{outcome="error"}[5m]) > 0` for 10 min: calls of kube-scheduler fail',
    "tangram_extender_reservations": '`...{stage="in_doubt"} > 0` for 5 min: the API server does not answer whether pods were bound',
    "tangram_extender_reservations_expired_total": "`rate(...[10m]) > 0.1`: kube-scheduler chooses nodes and then does not bind",
    "tangram_extender_unassigned_pods": "`> 0` for 5 min: something else than Tangram's scheduler binds pods that request GPUs",
    "tangram_extender_excluded_nodes": "`> 0` for 15 min: an inventory or an assignment cannot be read; the log names the node",
    "tangram_extender_overcommitted_gpus": "`> 0` for 5 min: a GPU went or shrank under running pods",
    "tangram_extender_node_repairs_total": "`increase(...[1h]) > 0`: the records were wrong, which is a fault of Tangram: please report it",
    "tangram_extender_cache_age_seconds": "`> 120`: the API server sends nothing, and placement goes by old facts",
    "tangram_extender_cache_synced": "`== 0` of nodes or pods for 5 min: it cannot list them, and answers no filter call",
    "tangram_extender_cache_unknown_objects": "`> 0` for 15 min: objects that this version cannot decode; their last known state counts",
    "tangram_extender_refused_total": "`increase(...[10m]) > 100`: a listener is flooded, or refuses clients that it should serve; the label gives the reason",
    "tangram_deviceplugin_call_duration_seconds": "99th percentile > 1 s for 10 min: containers start slowly; the kubelet gives up at 30 s (PreStartContainer)",
    "tangram_deviceplugin_calls_refused_total": "`increase(...[10m]) > 0`: containers do not start; an Event on the pod gives the reason",
    "tangram_deviceplugin_gpu_healthy": "`== 0` for 5 min: a GPU that `node.gpus` selects is out of use, and no operator cordoned it",
    "tangram_gpu_cordoned": "`testing` for 15 min: a GPU has not passed its self-test",
    "tangram_deviceplugin_drift_devices": "`!= 0` for 15 min: the kubelet and the assignments disagree about a GPU",
    "tangram_deviceplugin_nvml_processes_abandoned": "`> 0` for 5 min: a call hangs in the driver and cannot be killed",
    "tangram_deviceplugin_nvml_processes_ended_total": '`increase(...{reason=~"died|hung|malformed"}[30m]) > 3`: calls of NVML hang, or its process dies, again and again',
    "tangram_deviceplugin_pod_removals_failed_total": "`increase(...[10m]) > 0`: a pod that is over its limit, or on the wrong devices, stays",
    "tangram_deviceplugin_xids_total": "`increase(...[10m]) > 0`: NVIDIA's list of XIDs shows whether hardware or a program is at fault",
    "tangram_deviceplugin_refused_total": "`increase(...[10m]) > 100`: a listener is flooded, or refuses clients that it should serve; the label gives the reason",
    "tangram_arbiter_refused_total": "`increase(...[10m]) > 100`: a listener is flooded, or refuses clients that it should serve; the label gives the reason",
    "tangram_container_throttles_total": "`increase(...[10m]) > 100`: a container sends the arbiter more than its part, and its processes wait",
    "tangram_container_gpu_memory_leased_bytes": "`... > tangram_container_gpu_memory_limit_bytes` for 5 min: processes had more than their limit when the arbiter came back",
    "tangram_container_gpu_memory_over_limit_bytes": "`> 0` for 1 min: a container goes around the library; `arbiter.guard.policy` decides what happens to it",
    "tangram_container_stranded": "`> 0` for 5 min: memory of a container cannot come back to the GPU, and the container does not run",
    "tangram_arbiter_swap_kills_total": "`increase(...[10m]) > 0`: a container did not give way to the guarantee of another and was killed",
    "tangram_gpu_swap_ready": "`== 0` for 10 min: containers have their guarantees alone, and what is in host memory stays there",
    "tangram_gpu_memory_ungranted_bytes": "`> 0` for 5 min: a process uses a shared GPU without a grant",
    "tangram_gpu_memory_unlisted_bytes": "`> 0` for 5 min: memory of a shared GPU is in use that NVML lists for no process",
    "tangram_arbiter_nvml_up": "`== 0` for 10 min: contexts are not counted, and no container is found over its limit",
    "tangram_container_suspend_blocked": "`> 0` for 10 min: its GPU time is not enforced, at the cost of the containers beside it",
    "tangram_container_unenforced": "`> 0` for 10 min: a limit of a container is not enforced; the label gives the reason",
    "tangram_container_connections": "`> 1000`: near the 1,024 processes that one container may have",
    "tangram_arbiter_bad_packets_total": "`increase(...[10m]) > 0`: a process in a container sends the arbiter packets that the library never sends",
}  # fmt: skip
