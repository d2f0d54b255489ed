"""Attacks that other tests show: those that need no cluster, and those that need a real driver."""

from __future__ import annotations

from typing import Final

from tests.e2e.attacks.attack import Attack, Level, Outcome, Where

OBSERVE: Final = "tests/unit/observe"
SHIM: Final = "tests/integration/shim"
GPU_TIME: Final = "tests/integration/gputime"


def _below(name: str, does: str, outcome: Outcome, test: str) -> Attack:
    return Attack(name=name, does=does, outcome=outcome, levels=(Level.RESTRICTED,), where=Where.BELOW, test=test)


def _gpu(name: str, does: str, outcome: Outcome, test: str) -> Attack:
    return Attack(name=name, does=does, outcome=outcome, levels=(Level.RESTRICTED,), where=Where.H200, test=test)


ATTACKS: Final = (
    _below(
        "large-thread-storage", "A program has thread-local variables so large that the library's thread does not start on a stack of usual size.",
        Outcome.HARMLESS, f"{SHIM}/test_link.py::test_the_helper_starts_beside_large_thread_local_variables",
    ),
    _below(
        "cancelled-thread", "A program cancels its threads in the middle of allocations.",
        Outcome.HARMLESS, f"{SHIM}/test_robust_threads.py::test_a_cancelled_thread_leaves_no_lock_behind",
    ),
    _below(
        "cancelled-launch", "A program cancels its threads in the middle of kernel launches.",
        Outcome.HARMLESS, f"{SHIM}/test_link.py::test_a_thread_cancelled_in_a_launch_leaves_no_lock_behind",
    ),
    _below(
        "shared-memory-process", "A process shares its parent's memory and not its descriptors (CLONE_VM).",
        Outcome.HARMLESS, f"{SHIM}/test_robust_processes.py::test_a_process_that_shares_its_parents_memory_counts_with_it",
    ),
    _below(
        "fork-storm", "A program forks while its threads launch kernels.",
        Outcome.HARMLESS, f"{SHIM}/test_link.py::test_forks_in_a_storm_of_launches_neither_hang_nor_escape_the_limit",
    ),
    _below(
        "detached-grant", "A program's grant is mounted nowhere any more, and it maps the library's file.",
        Outcome.KILLED, f"{SHIM}/test_bypass.py::test_a_program_whose_grant_mount_was_detached_is_killed",
    ),
    _below(
        "beside-a-share", "A container without a share takes memory through the driver's socket of another container of its pod.",
        Outcome.KILLED, f"{SHIM}/test_bypass.py::test_a_program_of_a_container_without_a_grant_counts_against_the_grant_of_its_pod",
    ),
    _below(
        "hidden-burst", "A user hides a burst limit above the namespace's largest behind a container's own one, and removes that one later.",
        Outcome.HARMLESS,
        "tests/unit/deviceplugin/pods/test_burst.py::test_a_limit_that_the_containers_own_annotation_hid_from_admission_does_not_count",
    ),
    _below(
        "ungranted", "A process of the node, in no container, uses memory of a shared GPU.",
        Outcome.REPORTED, f"{SHIM}/test_bypass.py::test_memory_that_belongs_to_no_grant_is_in_the_status_within_5_s",
    ),
    _below(
        "unlisted", "A program uses memory of a shared GPU without a context, so that NVML lists it for no process.",
        Outcome.REPORTED, f"{SHIM}/test_unlisted.py::test_memory_that_nvml_lists_for_no_process_is_in_the_status_within_5_s",
    ),
    _below(
        "endless-request", "A client sends headers or a body without an end to an HTTP port.",
        Outcome.REFUSED, f"{OBSERVE}/test_observe_serving.py::test_a_request_beyond_a_bound_is_refused_and_never_reaches_the_program",
    ),
    _below(
        "silent-clients", "A client opens connections to an HTTP port until none is free, and sends nothing.",
        Outcome.HARMLESS, f"{OBSERVE}/test_observe_connections.py::test_when_all_are_taken_the_oldest_without_a_request_goes_and_last_one_that_was_served",
    ),
    _below(
        "new-connections", "A client opens and closes connections to an HTTP port without a pause.",
        Outcome.HARMLESS, f"{OBSERVE}/test_observe_acceptor.py::test_an_address_that_opens_connections_too_fast_is_dropped_by_the_kernel_and_others_are_served",
    ),
    _below(
        "request-flood", "A client sends requests for metrics without a pause.",
        Outcome.HARMLESS, f"{OBSERVE}/test_observe_serving.py::test_requests_of_a_flood_wait_and_a_request_from_elsewhere_comes_before_them",
    ),
    _below(
        "made-up-tokens", "A client requests a node's metrics with one made-up token after another, each of which the API server would review.",
        Outcome.HARMLESS, f"{OBSERVE}/test_observe_access.py::test_made_up_tokens_are_reviewed_slowly_and_a_new_client_comes_before_the_flood",
    ),
    _below(
        "unreported-work", "A program launches kernels past the library and reports that it is idle.",
        Outcome.REPORTED, f"{GPU_TIME}/test_liars.py::test_a_container_that_computes_without_a_report_is_found_and_capped_and_no_other_is_accused",
    ),
    _below(
        "stopped-channels", "A process stops the GPU work of another container, as any process with the GPU may on a stock driver.",
        Outcome.REPORTED, f"{GPU_TIME}/test_liars.py::test_somebody_else_stopped_a_containers_channels_and_it_runs_again",
    ),
    _below(
        "mps-client", "A program computes on the channels of an MPS server.",
        Outcome.REPORTED, f"{GPU_TIME}/test_enforcement.py::test_a_client_of_mps_is_reported_and_has_its_launches_delayed",
    ),
    _gpu(
        "real-static", "A static program takes memory of a real driver, and another one without LD_PRELOAD.",
        Outcome.REPORTED, "tests/gpu/test_guard.py::test_the_arbiter_ends_what_goes_past_the_grant_and_nothing_else",
    ),
    _gpu(
        "raw-ioctl", "A static program takes memory by the kernel driver's own requests on /dev/nvidiactl, without libcuda.",
        Outcome.REPORTED, "tests/gpu/test_guard.py::test_the_arbiter_ends_what_goes_past_the_grant_and_nothing_else",
    ),
)  # fmt: skip
