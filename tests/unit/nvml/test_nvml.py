"""NVML as the fake driver answers it, and what follows from its answers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvml import utilisation
from nvml.binding import nv
from nvml.errors import NvmlError
from nvml.health import ANSWERS_TO_RECOVER, APPLICATION_XIDS, Health
from nvml.library import LIBRARY_FOLDERS, library_folder, load
from nvml.probe import profile_gb
from nvml.utilisation import Busy, busy
from tests.built import REPOSITORY
from tests.fake import FakeDriver, fake_driver
from vgpu.inventory import Inventory

__all__ = ["fake_driver"]

CARD = "GPU-00000000-0000-0000-0000-000000000001"


def root_of(driver: FakeDriver, folder: Path) -> Path:
    (folder / "lib").symlink_to(driver.libraries)
    return folder


def in_process(driver: FakeDriver, root: Path, code: str) -> str:
    """What a program prints that has NVML open; in a process of its own, because pynvml loads a library once."""
    program = f"from pathlib import Path\nfrom nvml.session import opened\nwith opened(Path({str(root)!r})) as found:\n"
    program += textwrap.indent(textwrap.dedent(code), "    ")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env=driver.env(LD_LIBRARY_PATH=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PROBE = """
import msgspec
from nvml.probe import probe
assert found == "driver root"
print(msgspec.json.encode(probe(unit_mib=1024, access="cdi")).decode())
"""


def probed(driver: FakeDriver, root: Path) -> Inventory:
    return msgspec.json.decode(in_process(driver, root, PROBE), type=Inventory)


def test_cards_are_probed_through_a_driver_root(fake_driver: Callable[[str], FakeDriver], tmp_path: Path) -> None:
    driver = fake_driver("card h200\ncard h200\ncard t4 memory_mib=16384\n")
    inventory = probed(driver, root_of(driver, tmp_path))
    assert [(c.index, c.minor) for c in inventory.cards] == [(0, 0), (1, 1), (2, 2)]
    assert [c.uuid for c in inventory.cards] == [s.uuid for s in driver.status()]
    assert inventory.cards[0].model == "NVIDIA H200"
    assert inventory.cards[0].mib // 1024 in (140, 141)
    assert inventory.cards[0].pci != inventory.cards[1].pci
    assert inventory.driver
    assert all(card.healthy and not card.mig for card in inventory.cards)


def test_mig_instances_have_nvidias_profile_names(fake_driver: Callable[[str], FakeDriver], tmp_path: Path) -> None:
    driver = fake_driver("card a100-40\nmig 0 3g.20gb 1g.5gb.me 1g.5gb\n")
    (card,) = probed(driver, root_of(driver, tmp_path)).cards
    assert card.mig
    assert not card.shareable
    assert sorted(i.profile for i in card.instances) == ["1g.5gb", "1g.5gb.me", "3g.20gb"]
    assert len({i.uuid for i in card.instances}) == 3
    assert all(i.uuid.startswith("MIG-") and i.mib > 0 for i in card.instances)


def test_a_card_that_was_lost_stands_unhealthy_in_the_next_probe(
    fake_driver: Callable[[str], FakeDriver], tmp_path: Path
) -> None:
    driver = fake_driver("card t4\ncard t4\n")
    out = in_process(
        driver,
        root_of(driver, tmp_path),
        f"""
        import subprocess
        from nvml.probe import answers, probe
        first = probe(unit_mib=1024, access="cdi")
        subprocess.run([{str(driver.libraries / "nvidia-fake-driverd")!r}, "ctl", "--socket", {str(driver.socket)!r}, "xid", "1", "79"], check=True, stdout=subprocess.DEVNULL)
        second = probe(unit_mib=1024, access="cdi", last=first)
        print([c.uuid for c in first.cards] == [c.uuid for c in second.cards], [c.healthy for c in second.cards])
        print(answers(first.cards[0].uuid), "|", answers(first.cards[1].uuid))
        """,
    )
    lines = out.splitlines()
    assert lines[0] == "True [True, False]"
    assert lines[1].startswith("None | card GPU-")
    assert "NVML says" in lines[1]


def test_xid_events_reach_who_listens_and_name_the_card(
    fake_driver: Callable[[str], FakeDriver], tmp_path: Path
) -> None:
    driver = fake_driver("card t4\ncard t4\n")
    out = in_process(
        driver,
        root_of(driver, tmp_path),
        f"""
        import subprocess
        from nvml.health import Events
        from nvml.probe import probe
        cards = probe(unit_mib=1024, access="cdi").cards
        events = Events([c.uuid for c in cards])
        assert not events.deaf and events.wait(1) is None
        subprocess.run([{str(driver.libraries / "nvidia-fake-driverd")!r}, "ctl", "--socket", {str(driver.socket)!r}, "xid", "1", "48"], check=True, stdout=subprocess.DEVNULL)
        event = events.wait(10_000)
        print(event.uuid == cards[1].uuid, event.xid)
        events.close()
        """,
    )
    assert out == "True 48\n"


def test_processes_are_listed_with_their_memory(fake_driver: Callable[[str], FakeDriver], tmp_path: Path) -> None:
    driver = fake_driver("card t4 memory_mib=16384 context_mib=0\n")
    driver.ctl("process", 0, 4242, 512, "stranger")
    out = in_process(
        driver,
        root_of(driver, tmp_path),
        """
        from nvml.probe import probe
        from nvml.usage import processes, used_bytes
        (card,) = probe(unit_mib=1024, access="cdi").cards
        print([(p.pid, p.used_bytes // 2**20) for p in processes(card.uuid)], used_bytes(card.uuid) >= 512 * 2**20)
        """,
    )
    assert out == "[(4242, 512)] True\n"


@pytest.mark.parametrize("folder", LIBRARY_FOLDERS)
def test_the_library_is_found_where_installers_put_it(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "libnvidia-ml.so.1").touch()
    assert library_folder(tmp_path) == tmp_path / folder


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libnvidia-ml.so.1").write_text("no library")
    with pytest.raises(NvmlError, match=r"lib/libnvidia-ml.so.1 cannot be loaded"):
        load(tmp_path)


def test_a_machine_without_a_driver_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(NvmlError, match=r"no libnvidia-ml.so.1 in .*/lib64.* is the NVIDIA driver installed"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("instance_mib", "total_mib", "gb"),
    [
        (4864, 40_536, 5),
        (9984, 40_536, 10),
        (19_968, 40_536, 20),
        (40_192, 40_536, 40),
        (9728, 81_920, 10),
        (40_448, 81_920, 40),
        (16_384, 143_771, 18),
    ],
)
def test_profile_sizes_are_as_nvidia_documents_them(instance_mib: int, total_mib: int, gb: int) -> None:
    assert profile_gb(instance_mib * 2**20, total_mib * 2**20) == gb


@given(st.lists(st.one_of(st.integers(1, 120), st.none(), st.just("silent"))))
def test_a_card_is_ill_from_the_first_trouble_until_it_has_answered_often_enough(
    events: list[int | str | None],
) -> None:
    health, ill, answered = Health(), False, 0
    for event in events:
        if isinstance(event, int):
            changed, trouble = health.xid(CARD, event), event not in APPLICATION_XIDS
        else:
            changed, trouble = health.answered(CARD, "it is silent" if event else None), event is not None
        before = ill
        if trouble:
            ill, answered = True, 0
        elif event is None and ill:
            answered += 1
            ill = answered < ANSWERS_TO_RECOVER
        assert (CARD in health.ill) == ill
        assert changed == (before != ill)


class Samples:
    """The binding's module, as far as utilisation asks it: one answer a call, an error where it is one."""

    NVMLError_NotFound, NVMLError_NotSupported = nv.NVMLError_NotFound, nv.NVMLError_NotSupported
    NVMLError_InsufficientSize = nv.NVMLError_InsufficientSize

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - its name
        return uuid

    def nvmlDeviceGetProcessUtilization(self, _handle: str, _since_us: int) -> object:  # noqa: N802 - its name
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def sample(pid: int, percent: int, at_us: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, smUtil=percent, timeStamp=at_us)


def test_samples_count_that_are_new_and_not_of_a_clock_that_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [sample(1, 10, 99), sample(2, 20, 100), sample(3, 30, 101), sample(4, 0, 150), sample(5, 50, 201)]
    told += [sample(6, 4_000_000, 120)]  # one that the driver has lost sight of
    monkeypatch.setattr(utilisation, "nv", Samples(told))
    assert busy(CARD, 100, 200) == Busy({3: 30}, 150)


def test_a_process_more_than_were_counted_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    late = nv.NVMLError_InsufficientSize()
    monkeypatch.setattr(utilisation, "nv", Samples(late, late, [sample(3, 30, 101)]))
    assert busy(CARD, 100, 200) == Busy({3: 30}, 101)
    monkeypatch.setattr(utilisation, "nv", Samples(late, late, late))
    with pytest.raises(NvmlError, match=f"utilisation of card {CARD}"):
        busy(CARD, 100, 200)


def test_a_card_without_samples_has_seen_nobody_and_one_that_does_not_count_by_process_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error, by_process in ((nv.NVMLError_NotFound(), True), (nv.NVMLError_NotSupported(), False)):
        monkeypatch.setattr(utilisation, "nv", Samples(error))
        assert busy(CARD, 100, 200) == Busy({}, 100, by_process=by_process)
