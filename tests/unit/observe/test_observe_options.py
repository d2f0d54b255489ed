"""Settings from flags and environment variables, and the message for a wrong one."""

from __future__ import annotations

import pytest
from pydantic import Field, field_validator

from observe.options import ProgramSettings, config, read
from vgpu.api.quantity import whole_number


class Example(ProgramSettings):
    """An example."""

    model_config = config("tangram-example", "TANGRAM_EXAMPLE_")

    node_name: str = Field(min_length=1, description="name")
    port: int = Field(80, le=65535, description="port")
    size: str = Field("1Gi", description="bytes")
    names: list[str] = Field([], description="names")

    @field_validator("size")
    @classmethod
    def _is_bytes(cls, text: str) -> str:
        if whole_number(text, what="size") < 2:
            raise ValueError(f"{text} is too few")
        return text


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines on standard error of a start that ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        read(Example, arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_a_flag_goes_before_the_environment_which_goes_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_EXAMPLE_PORT", "81")
    monkeypatch.setenv("TANGRAM_EXAMPLE_NODE_NAME", "of-the-environment")
    settings = read(Example, ["--node-name", "n1"])
    assert (settings.node_name, settings.port, settings.size) == ("n1", 81, "1Gi")


def test_lists_are_repeated_flags_or_json_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(Example, ["--node-name", "n", "--names", "a", "--names", "b"]).names == ["a", "b"]
    monkeypatch.setenv("TANGRAM_EXAMPLE_NAMES", '["c"]')
    assert read(Example, ["--node-name", "n"]).names == ["c"]


def test_each_wrong_setting_has_a_line_with_its_name_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "--port", "70000") == [
        "tangram-example: node_name: Field required",
        "tangram-example: port is '70000': Input should be less than or equal to 65535",
    ]


def test_a_refusal_of_our_own_keeps_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "--node-name", "n", "--size", "1") == ["tangram-example: size is '1': 1 is too few"]
    (line,) = complaint(capsys, "--node-name", "n", "--size", "1GB")
    assert line.startswith("tangram-example: ")
    assert "1GB" in line


def test_a_list_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TANGRAM_EXAMPLE_NAMES", "a,b")
    (line,) = complaint(capsys, "--node-name", "n")
    assert "names" in line


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unrecognized arguments: --prot 1" in complaint(capsys, "--node-name", "n", "--prot", "1")[-1]
