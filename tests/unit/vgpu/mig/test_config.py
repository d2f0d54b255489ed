"""The file of MIG layouts: NVIDIA's own forms are read, and each mistake names its line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.mig.config import LARGEST_BYTES, BadMigFile, read

GOOD = """\
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  all-enabled:
    - devices: all
      mig-enabled: true
      mig-devices: {}
  all-1g.10gb.me:
    - devices: all
      mig-enabled: true
      mig-devices:
        "1g.10gb+me": 1
  all-1g.10gb:
    - device-filter: ["0x233010DE", "0x20B210DE"]
      devices: all
      mig-enabled: true
      mig-devices:
        "1g.10gb": 7
    - device-filter: "0x20B010DE"
      devices: all
      mig-enabled: true
      mig-devices:
        "1g.10gb": 4
  custom:
    - devices: [0, 1]
      mig-enabled: false
    - devices: [2]
      mig-enabled: true
      mig-devices:
        "1g.10gb": 2
        "2g.20gb": 1
        "3g.40gb": 1
  rtx:
    - devices: all
      mig-enabled: true
      mig-devices: {"1g.24gb-me": 2, "2g.48gb+gfx": 1, "1g.24gb": 0}
"""


def entry(devices: str = "all", enabled: str = "true", instances: str = "{}", more: str = "") -> str:
    return f"""\
version: v1
mig-configs:
  one:
    - devices: {devices}
      mig-enabled: {enabled}
      mig-devices: {instances}
{more}"""


def test_a_file_in_nvidias_format_is_read():
    file = read(GOOD, "mig.yaml")
    assert list(file.configs) == ["all-disabled", "all-enabled", "all-1g.10gb.me", "all-1g.10gb", "custom", "rtx"]
    assert file.named("all-disabled").of_gpus({0: "0x233010de"})[0].mig is False
    assert file.named("all-1g.10gb.me").entries[0].counts == {"1g.10gb.me": 1}
    of = file.named("all-1g.10gb").of_gpus({0: "0x233010de", 1: "0x20b010DE", 2: "0x26b910de"})
    assert {index: one.counts for index, one in of.items()} == {0: {"1g.10gb": 7}, 1: {"1g.10gb": 4}}
    of = file.named("custom").of_gpus({0: "0x1", 1: "0x1", 2: "0x1", 3: "0x1"})
    assert {index: one.mig for index, one in of.items()} == {0: False, 1: False, 2: True}
    assert file.named("rtx").entries[0].counts == {"1g.24gb-me": 2, "2g.48gb.gfx": 1}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "the file is empty"),
        ("- 1", 1, "the file is no mapping"),
        ("version: v2\nmig-configs: {}", 1, "version is 'v2', must be v1"),
        ("version: v1", 1, "the file has no mig-configs"),
        ("version: v1\nmig-configs: {}", 2, "mig-configs is empty"),
        ("version: v1\nmig-config: {}", 2, "'mig-config', must be one of version, mig-configs"),
        ("version: v1\nversion: v1", 2, "'version' twice, the other is in line 1"),
        ("version: v1\nmig-configs: [", 2, "this is no YAML"),
        ("version: v1\nmig-configs:\n  a: []", 3, "layout 'a' is empty"),
        ("version: v1\nmig-configs:\n  a: {}", 3, "layout 'a' is no list"),
        ("version: v1\nmig-configs:\n  a:\n    - devices: all", 4, "an entry has no mig-enabled"),
        ("version: v1\nmig-configs:\n  a:\n    - mig-enabled: true", 4, "an entry has no devices"),
        (entry(devices="every"), 4, "devices is 'every', must be all"),
        (entry(devices="[0, x]"), 4, "devices is 'x', must be a number from 0 to 63"),
        (entry(devices="[-1]"), 4, "devices is '-1'"),
        (entry(devices="[64]"), 4, "devices is '64'"),
        (entry(devices="[1, 1]"), 4, "GPU 1 twice"),
        (entry(devices="{}"), 4, "devices is no list"),
        (entry(enabled="yes please"), 5, "mig-enabled is 'yes please', must be true or false"),
        (entry(enabled='"true"'), 5, "mig-enabled is 'true', must be true or false"),
        (entry(enabled="false", instances='{"1g.10gb": 1}'), 6, "mig-enabled is false: it must be true"),
        (entry(instances="[1g.10gb]"), 6, "mig-devices is no mapping"),
        (entry(instances='\n        "1g.10gb": 1\n        "1g.11gb+gfx": 1'), 8, "no GPU is known that has the profile '1g.11gb+gfx'"),
        (entry(instances='\n        "1g.10gb.me": 1'), 7, "profile is '1g.10gb.me', must be one as NVIDIA writes it"),
        (entry(instances='\n        "1c.2g.20gb": 1'), 7, "write '2g.20gb'"),
        (entry(instances='\n        "1g.10gb": 8'), 7, "the number is '8', must be a number from 0 to 7"),
        (entry(instances='\n        "1g.10gb": many'), 7, "the number is 'many'"),
        (entry(instances='\n        "1g.10gb": 1.0'), 7, "the number is '1.0'"),
        (entry(instances='\n        "1g.10gb": 1\n        "1g.10gb": 1'), 8, "'1g.10gb' twice, the other is in line 7"),
        (entry(instances='\n        "3g.40gb": 2\n        "1g.10gb": 1'), 7, "no GPU can have mig-devices 2 x 3g.40gb, 1 x 1g.10gb"),
        (entry(instances='\n        "4g.40gb": 2'), 7, "no GPU can have"),
        (entry(instances='\n        "1g.5gb": 1\n        "7g.80gb": 1'), 7, "no GPU can have"),
        (entry(more='      device-filter: "H100"'), 7, "device-filter has 'H100', must be a PCI device ID"),
        (entry(more="      device-filter: []"), 7, "device-filter is empty"),
        (entry(more="      profile: 1"), 7, "an entry has 'profile', must be one of device-filter"),
        ("[" * 5000, 1, "this is no YAML"),
    ],
)  # fmt: skip
def test_each_mistake_names_its_line(text, line, words):
    with pytest.raises(BadMigFile) as caught:
        read(text, "mig.yaml")
    assert str(caught.value).startswith(f"mig.yaml:{line}: ")
    assert words in str(caught.value)


def test_a_file_that_is_too_large_is_refused():
    with pytest.raises(BadMigFile, match=f"more than {LARGEST_BYTES} bytes"):
        read("#" * (LARGEST_BYTES + 1), "mig.yaml")


def test_a_layout_that_is_not_there_is_answered_with_those_that_are():
    with pytest.raises(BadMigFile, match=r"no 'x', must be one of one$"):
        read(entry(), "mig.yaml").named("x")


def test_a_gpu_with_two_entries_and_one_that_is_not_there_are_refused():
    twice = entry(devices="[0]", more="    - devices: all\n      mig-enabled: false")
    with pytest.raises(BadMigFile, match=r"mig.yaml:7: GPU 0 has two entries in 'one', the other is in line 4"):
        read(twice, "mig.yaml").named("one").of_gpus({0: "0x0"})
    with pytest.raises(BadMigFile, match=r"mig.yaml:4: devices has GPU 3, this node has 0, 1"):
        read(entry(devices="[3]"), "mig.yaml").named("one").of_gpus({0: "0x0", 1: "0x0"})


def test_a_profile_that_only_the_nodes_driver_has_is_read_when_it_is_named():
    text = entry(instances='{"1g.99gb": 1}')
    with pytest.raises(BadMigFile, match="no GPU is known"):
        read(text, "mig.yaml")
    from vgpu.api.mig import MigProfile, MigTable

    table = MigTable.of((MigProfile("1g.99gb", 19, 1, 1, (0,)),))
    assert read(text, "mig.yaml", ["1g.99gb"], [table]).named("one").entries[0].counts == {"1g.99gb": 1}


PIECES = st.sampled_from(
    ["version: v1\n", "mig-configs:\n", "  a:\n", "    - devices: all\n", "      mig-enabled: true\n", "      mig-devices:\n",
     '        "1g.10gb": 7\n', "&a ", "*a", "{", "}", "[", "]", ": ", "- ", "!!int ", "\t", "\n", "? ", "<<: ", "\x00", "\ud800", "é", "1g.10gb"]
)  # fmt: skip


@given(st.one_of(st.text(max_size=200), st.lists(PIECES, max_size=20).map("".join)))
def test_no_text_leads_to_another_error(text):
    said = "mig.yaml:"
    try:
        read(text, "mig.yaml")
    except BadMigFile as error:
        said = str(error)
    assert said.startswith("mig.yaml:")
