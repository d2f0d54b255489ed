"""For all tests."""

import signal
from contextlib import suppress

import pytest

from tests.loop import EndingLoop

with suppress(ModuleNotFoundError):  # tests of a GPU run without hypothesis
    from hypothesis import settings

    import tests.examples

    settings.load_profile(tests.examples.SAME)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: what tests start would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # tests of a GPU run without pytest-asyncio
def pytest_asyncio_loop_factories() -> dict[str, type[EndingLoop]]:
    return {"test": EndingLoop}
