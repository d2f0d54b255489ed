from vgpu.memory.capacity import GpuCapacity


def test_what_others_use_is_not_for_containers() -> None:
    assert GpuCapacity().read(100, 30, 20) == 90


def test_memory_that_a_process_leaves_behind_for_a_moment_stays_with_the_containers() -> None:
    capacity = GpuCapacity()
    assert [capacity.read(100, *reading) for reading in ((30, 20), (30, 0), (30, 0), (10, 0))] == [90, 90, 90, 90]


def test_what_others_keep_counts_after_three_readings() -> None:
    capacity = GpuCapacity()
    assert [capacity.read(100, used, 0) for used in (0, 40, 40, 40, 10)] == [100, 100, 100, 60, 90]


def test_containers_that_allocated_after_the_count_of_the_gpu_make_no_more_than_all() -> None:
    assert GpuCapacity().read(100, 10, 20) == 100
