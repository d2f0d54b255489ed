"""How a program ends."""

from __future__ import annotations

import pytest

from observe.options import ProgramSettings, config
from observe.program import run_program
from vgpu.api.errors import Refused


class Example(ProgramSettings):
    """An example."""

    model_config = config("tangram-example", "TANGRAM_EXAMPLE_")

    fault: str = ""


async def work(settings: Example) -> None:
    match settings.fault:
        case "refused":
            raise Refused("there is no cluster")
        case "port":
            raise OSError("cannot listen on port 80")
        case "bug":
            raise KeyError("unforeseen")


@pytest.mark.parametrize(("fault", "line"), [("refused", "there is no cluster"), ("port", "cannot listen on port 80")])
def test_what_is_refused_ends_it_with_one_line(fault: str, line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run_program(Example, work, ["--fault", fault])
    assert ended.value.code == f"tangram-example: {line}"


def test_a_bug_is_not_dressed_up_as_a_refusal() -> None:
    with pytest.raises(KeyError):
        run_program(Example, work, ["--fault", "bug"])


def test_work_that_ends_ends_the_program() -> None:
    used: list[str] = []

    def loop(task: object) -> None:
        used.append(type(task).__name__)
        getattr(task, "close")()  # noqa: B009 - a coroutine that is not awaited

    run_program(Example, work, [], loop=loop)
    assert used == ["coroutine"]
