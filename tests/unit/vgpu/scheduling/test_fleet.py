"""The fleet's records against adding everything up again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory, MigInstance
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.nodes.name_index import Quoted

NODES, ROWS = ("a", "b"), 3
assigned_gpus = st.builds(
    lambda row, mib, percent, whole: AssignedGpu(f"c{row}", row + 2, mib, percent, "whole" if whole else "share"),
    st.integers(0, ROWS), st.integers(1, 50), st.integers(0, 100), st.booleans(),
)  # fmt: skip
inventories = st.permutations(range(ROWS)).flatmap(
    lambda rows: st.tuples(st.integers(0, ROWS), st.sampled_from(("t4", "l4")), st.booleans()).map(
        lambda made: Inventory(
            tuple(Gpu(f"c{row}", row + 2, made[1], 100 + row, healthy=made[2] or row > 0) for row in rows[: made[0]])
        )
    )
)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(NODES), st.one_of(assigned_gpus, inventories, st.just("remove"), st.integers(0, 9)))
    )
)
def test_after_any_events_the_records_equal_the_sum_over_the_pods_that_are_left(
    events: list[tuple[str, object]],
) -> None:
    fleet, held = Fleet(), {node: [] for node in NODES}
    known: dict[str, Inventory] = {}
    for node, event in events:
        if isinstance(event, AssignedGpu):
            held[node].append(event)
            fleet.debit(node, event)
        elif isinstance(event, Inventory):
            known[node] = event
            fleet.set_node(node, event, held[node])
        elif event == "remove":
            known.pop(node, None)
            fleet.remove_node(node)
        elif held[node]:
            fleet.credit(node, held[node].pop(int(str(event)) % len(held[node])))
        for name, inventory in known.items():
            for row, gpu in enumerate(inventory.gpus):
                mine = [assigned for assigned in held[name] if assigned.uuid == gpu.uuid]
                at = fleet.column[name]
                assert fleet.free_mib[row, at] == gpu.mib - sum(gpu.mib if p.kind == "whole" else p.mib for p in mine)
                assert fleet.free_percent[row, at] == 100 - sum(
                    100 if p.kind == "whole" else p.core_percent for p in mine
                )
                assert fleet.containers[row, at] == len(mine)
                assert (name, row) in fleet.homes(gpu.uuid)
        for model, code in fleet.models.items():
            these = fleet.shareable & (fleet.model == code)
            totals = int(these.sum()), int(fleet.total_mib[these].sum()), int(fleet.free_mib[these].sum())
            capacity = fleet.capacity
            assert totals == (capacity.gpus[code], capacity.total_mib[code], capacity.free_mib[code]), model
        found = sum(len(fleet.homes(f"c{row}")) for row in range(ROWS))
        assert found == sum(len(inventory.gpus) for inventory in known.values())
    assert set(fleet.column) == set(known)


def test_a_fleet_grows_past_its_first_capacity_in_nodes_and_gpus() -> None:
    fleet = Fleet()
    for number in range(150):
        fleet.set_node(f"n{number}", Inventory(tuple(Gpu(f"c{row}", row, "t4", number + 1) for row in range(20))))
    fleet.remove_node("n3")
    fleet.remove_node("n3")
    assert len(fleet) == 149
    assert "n3" not in fleet
    assert fleet.free_mib[19, fleet.column["n149"]] == 150


def test_a_node_that_leaves_is_not_among_the_candidates_and_its_column_is_clean_for_the_next() -> None:
    fleet = Fleet()
    fleet.set_node("old", Inventory((Gpu("c", 0, "t4", 10), Gpu("d", 1, "t4", 10))))
    assert fleet.look_up(("old", "new")).unknown == ["new"]
    fleet.remove_node("old")
    fleet.set_node("new", Inventory((Gpu("e", 0, "t4", 10),)))
    assert fleet.look_up(("old", "new")).unknown == ["old"]
    assert not fleet.shareable[1, fleet.column["new"]]


def test_the_known_nodes_of_a_text_are_named_by_the_strings_that_the_fleet_has() -> None:
    fleet = Fleet()
    for name in ("a", "b", "c"):
        fleet.set_node(name, Inventory((Gpu("c", 0, "t4", 10),)))
    fleet.remove_node("b")
    text = b'{"names":["c","b","a"]}'
    known = fleet.known(Quoted(text, 10, len(text) - 2))
    assert sorted(known) == ["a", "c"]
    assert all(
        name is own for name, own in zip(known, [fleet.names[fleet.column[name]] for name in known], strict=True)
    )
    assert fleet.known(("a", "other")) == ["a"]


def test_two_allocated_pods_of_one_gpu_or_instance_are_reported() -> None:
    fleet = Fleet()
    mig = Gpu("m", 1, "h100", 10, mig=True, instances=(MigInstance("i", "1g.10gb", 5, 0, 0),))
    fleet.set_node("n", Inventory((Gpu("c", 0, "t4", 10), mig)))
    for assigned in (AssignedGpu("c", 0, 6, 60), AssignedGpu("i", 1, 5, 100, "mig", "1g.10gb")):
        fleet.debit("n", assigned)
        assert fleet.overcommitted() == []
    for assigned in (AssignedGpu("c", 0, 6, 60), AssignedGpu("i", 1, 5, 100, "mig", "1g.10gb")):
        fleet.debit("n", assigned)
    assert fleet.overcommitted() == [("n", "c", -2, -20), ("n", "i", -5, -100)]


def test_known_nodes_keep_their_names_when_another_node_has_their_column() -> None:
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.set_node(name, Inventory((Gpu("c", 0, "t4", 10),)))
    before = fleet.known(("a", "b"))
    fleet.remove_node("a")
    fleet.set_node("c", Inventory((Gpu("c", 0, "t4", 10),)))
    assert (sorted(before), sorted(fleet.known(("a", "b", "c")))) == (["a", "b"], ["b", "c"])
    assert [fleet.column_names[at] for at in fleet.column.values()] == list(fleet.column)


def test_callers_that_name_the_same_nodes_in_any_order_share_them() -> None:
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.set_node(name, Inventory((Gpu("c", 0, "t4", 10),)))
    both, one = fleet.known(("a", "b")), fleet.known(("b",))
    assert fleet.known(("b",)) is one
    assert (sorted(both), list(one), sorted(fleet.known(("b", "a", "a")))) == (["a", "b"], ["b"], ["a", "b"])
    fleet.remove_node("a")
    fleet.set_node("c", Inventory((Gpu("c", 0, "t4", 10),)))
    assert list(fleet.known(("b",))) == ["b"]
    assert (sorted(fleet.known(("b", "c"))), sorted(both)) == (["b", "c"], ["a", "b"])
