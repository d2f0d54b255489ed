"""The limit is enforced by the library for aarch64: tests of the library on this machine's own architecture, with programs that are emulated.

Left out is what rests on memory that a fork wipes (MADV_WIPEONFORK), which qemu's user mode does not, and what needs dozens of processes.
"""

from __future__ import annotations

from tests.integration.shim.test_limits import (
    test_a_block_is_charged_to_the_gpu_it_is_on_and_not_to_the_current_one,
    test_a_block_is_held_until_it_is_released_and_unmapped,
    test_a_gpu_that_the_grant_does_not_name_is_left_alone,
    test_a_pointer_that_is_not_ours_is_answered_by_the_driver,
    test_a_process_gets_its_limit_and_not_one_mib_more,
    test_devices_are_known_by_uuid_whatever_their_number,
    test_rows_are_counted_with_their_padding,
    test_the_memory_of_a_killed_process_is_free,
    test_threads_never_exceed_the_limit_and_leave_nothing_behind,
    test_two_processes_share_one_limit_and_race_for_the_last_page,
)

__all__ = [
    "test_a_block_is_charged_to_the_gpu_it_is_on_and_not_to_the_current_one",
    "test_a_block_is_held_until_it_is_released_and_unmapped",
    "test_a_gpu_that_the_grant_does_not_name_is_left_alone",
    "test_a_pointer_that_is_not_ours_is_answered_by_the_driver",
    "test_a_process_gets_its_limit_and_not_one_mib_more",
    "test_devices_are_known_by_uuid_whatever_their_number",
    "test_rows_are_counted_with_their_padding",
    "test_the_memory_of_a_killed_process_is_free",
    "test_threads_never_exceed_the_limit_and_leave_nothing_behind",
    "test_two_processes_share_one_limit_and_race_for_the_last_page",
]
