"""For all tests."""

import signal

import pytest

from tests.loop import EndingLoop

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: what tests start would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # tests of a GPU run without pytest-asyncio
def pytest_asyncio_loop_factories() -> dict[str, type[EndingLoop]]:
    return {"test": EndingLoop}
