"""The limit is enforced by the library for aarch64: tests of the library on this machine's own architecture, with programs that are emulated."""

from __future__ import annotations

from tests.integration.shim.test_limits import (
    test_a_block_is_charged_to_the_gpu_it_is_on_and_not_to_the_current_one,
    test_a_block_is_held_until_it_is_released_and_unmapped,
    test_a_forked_child_counts_with_its_parent,
    test_a_full_gpu_gives_the_reservation_back,
    test_a_gpu_that_the_grant_does_not_name_is_left_alone,
    test_a_pointer_that_is_not_ours_is_answered_by_the_driver,
    test_a_process_gets_its_limit_and_not_one_mib_more,
    test_a_sibling_hands_over_what_it_does_not_use,
    test_a_stopped_sibling_delays_an_allocation_only_for_a_bounded_time,
    test_an_allocation_beyond_the_limit_is_refused_and_a_smaller_one_goes_through,
    test_devices_are_known_by_uuid_whatever_their_number,
    test_processes_that_start_at_once_get_the_limit_together,
    test_rows_are_counted_with_their_padding,
    test_the_memory_of_a_killed_process_is_free,
    test_threads_never_exceed_the_limit_and_leave_nothing_behind,
    test_two_processes_share_one_limit_and_race_for_the_last_page,
    test_what_is_freed_can_be_had_again,
)
