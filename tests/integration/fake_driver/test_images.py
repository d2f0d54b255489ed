"""A damaged image is refused, or loads; the process that loads it does not crash."""

from __future__ import annotations

import struct
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.fake import start_fake_driver
from tests.images import CUBIN, PTX, cubin, fatbin

from .conftest import Worker

SUCCESS, OUT_OF_MEMORY, INVALID_IMAGE, NO_BINARY = 0, 2, 200, 209
TEXT = b".version 8.0\n.target sm_80\n.visible .global .align 4 .b8 table[12];\n.visible .entry f() { ret; }\n\0"
ELF = cubin(table=12, large=4096)
IMAGES = {
    "cubin": ELF,
    "fatbin of a cubin": fatbin((CUBIN, 90, ELF)),
    "fatbin of ptx": fatbin((PTX, 90, TEXT)),
    "fatbin of both": fatbin((PTX, 80, TEXT), (CUBIN, 90, ELF)),
}
HUGE = struct.pack("<Q", 1 << 62)


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    """A process with a context; it has to survive all of the module's tests."""
    driver = start_fake_driver("gpu h200", tmp_path_factory.mktemp("images"))
    one = Worker(driver)
    one.must("cuInit")
    one.must("context", 0)
    yield one
    one.end()
    driver.stop()


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(IMAGES)))
def test_a_damaged_image_crashes_no_process(loader, seed, kind):
    random = Random(seed)
    image = bytearray(IMAGES[kind])
    for _ in range(random.randint(1, 8)):
        image[random.randrange(4, len(image))] = random.choice((0, 255, random.randrange(256)))
    rc, module = loader.request("load_bytes", bytes(image).hex())
    assert rc in (SUCCESS, OUT_OF_MEMORY, INVALID_IMAGE, NO_BINARY)
    if rc == SUCCESS:
        loader.must("unload", module)


@pytest.mark.parametrize("kind", IMAGES)
def test_every_field_of_an_image_may_be_huge(loader, kind):
    for at in range(4, len(IMAGES[kind]) - 8):
        image = IMAGES[kind][:at] + HUGE + IMAGES[kind][at + 8 :]
        rc, module = loader.request("load_bytes", image.hex())
        assert rc in (SUCCESS, OUT_OF_MEMORY, INVALID_IMAGE, NO_BINARY), at
        if rc == SUCCESS:
            loader.must("unload", module)


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("cubin", 40),  # where the sections are
        ("fatbin of a cubin", 8),  # how long all parts are
        ("fatbin of a cubin", 16 + 8),  # how long the part is
        ("fatbin of both", 16 + 8),
    ],
)
def test_an_image_that_does_not_end_where_it_states_is_refused(loader, kind, at):
    image = IMAGES[kind][:at] + HUGE + IMAGES[kind][at + 8 :]
    assert loader.request("load_bytes", image.hex())[0] == INVALID_IMAGE


def test_a_wrapper_of_no_fatbin_is_refused(loader):
    wrapper = struct.pack("<IIQQ", 0x466243B1, 1, 0x1000, 0)
    assert loader.request("load_bytes", wrapper.hex())[0] == INVALID_IMAGE
