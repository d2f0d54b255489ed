"""Images of modules as compilers pack them: what compressed parts of a fatbin take is read as if they were not compressed."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable, Iterator
from random import Random
from typing import IO, NamedTuple, cast

import lz4.block
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from tests.built import REPOSITORY, shim_build
from tests.images import CUBIN, PTX, cubin, fatbin, part

GIB = 1 << 30
ROOM = 1 << 20
MODULES = REPOSITORY / "tests/modules"


class Needs(NamedTuple):
    """What the library reads from an image. Bytes, but for the last two."""

    variables: int
    code: int
    function: int
    known: int
    heap: int


class Reader:
    """The library's own reading, in a process: one that is asked to read too far dies, and says so under the sanitizers."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [shim_build() / "tests" / "images"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._in, self._out = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)

    def ask(self, how: bytes, number: int, data: bytes) -> None:
        """One request; what comes back is read by the caller."""
        self._in.write(how + struct.pack("=QQ", number, len(data)) + data)
        self._in.flush()

    def take(self, length: int) -> bytes:
        """So many bytes of the answer."""
        answer = self._out.read(length)
        assert len(answer) == length, f"the reader ended: {self.process.wait()}"
        return answer

    def unpack(self, how: bytes, data: bytes, room: int) -> bytes:
        """What comes out, nothing where the data is damaged."""
        self.ask(how, room, data)
        return self.take(*struct.unpack("=Q", self.take(8)))

    def end(self) -> None:
        """It ends with its input."""
        self._in.close()

    def needs(self, image: bytes, capability: int = 90) -> Needs:
        """What a module of this image takes on such a GPU."""
        self.ask(b"i", capability, image)
        return Needs(*struct.unpack("=5Q", self.take(40)))


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    made = Reader()
    with made.process as process:
        yield made
        made.end()
    assert process.returncode == 0


def zstd(level: int) -> Callable[[bytes], bytes]:
    """Zstandard at a level, as nvcc's modes `size` and `balance` use it."""
    return zstandard.ZstdCompressor(level=level, write_checksum=level % 2 == 0).compress


def lz4_block(data: bytes) -> bytes:
    """What nvcc's mode `speed` and older fatbinary's -compress-all use."""
    return cast(bytes, lz4.block.compress(data, store_size=False))


def grown(seed: int, words: int, letters: int, length: int) -> bytes:
    """Data that repeats itself more or less: its words are drawn again and again, at odd distances."""
    random = Random(seed)
    known = [random.randbytes(random.randint(1, letters)) for _ in range(words)]
    data = b""
    while len(data) < length:
        data += random.choice(known) if random.random() < 0.9 else random.randbytes(random.randint(1, 30))
    return data[:length]


DATA = st.one_of(
    st.binary(min_size=1, max_size=2000),
    st.builds(grown, st.integers(0, 2**32), st.integers(1, 200), st.integers(1, 300), st.integers(1, 300_000)),
    st.builds(lambda byte, length: bytes([byte]) * length, st.integers(0, 255), st.integers(1, 400_000)),
)
LEVELS = st.sampled_from((-5, 1, 2, 3, 6, 12, 19, 22))


@given(data=DATA, level=LEVELS)
@example(data=bytes(range(256)) * 700, level=19)
def test_zstd_comes_out_as_it_went_in(reader: Reader, data: bytes, level: int):
    packed = zstd(level)(data)
    assert reader.unpack(b"z", packed, len(data)) == data
    assert reader.unpack(b"z", packed, len(data) - 1) == b"", "no room for it"


@given(data=DATA)
def test_lz4_comes_out_as_it_went_in(reader: Reader, data: bytes):
    packed = lz4_block(data)
    assert reader.unpack(b"l", packed, len(data)) == data
    assert reader.unpack(b"l", packed, len(data) - 1) == b"", "no room for it"


@given(data=DATA, level=LEVELS, how=st.sampled_from((b"z", b"l")), seed=st.integers(0, 2**32))
def test_damaged_data_is_refused_or_gives_no_more_than_there_is_room_for(
    reader: Reader, data: bytes, level: int, how: bytes, seed: int
):
    random, packed = Random(seed), bytearray(zstd(level)(data) if how == b"z" else lz4_block(data))
    for _ in range(random.randint(1, 4)):
        packed[random.randrange(len(packed))] = random.randrange(256)
    del packed[random.randint(1, 2 * len(packed)) :]
    assert len(reader.unpack(how, bytes(packed), ROOM)) <= ROOM


PACKED = {"lz4": (0x2000, lz4_block), "zstd": (0x8000, zstd(3)), "zstd, small": (0x8000, zstd(19))}
IMAGES = {
    CUBIN: cubin(large=3 * GIB, small=100),
    PTX: b".version 8.0\n.target sm_90\n.visible .global .b8 large[3221225472];\n.global .u64 small;\n"
    + b"// filler\n" * 100,
}


@pytest.mark.parametrize("how", PACKED)
@pytest.mark.parametrize("kind", IMAGES)
def test_variables_of_a_compressed_part_are_seen(reader: Reader, kind: int, how: str):
    plain = reader.needs(fatbin((kind, 90, IMAGES[kind])))
    flag, pack = PACKED[how]
    packed = reader.needs(fatbin(part(kind, 90, pack(IMAGES[kind]), flag, len(IMAGES[kind]))))
    assert plain.known
    assert plain.variables >= 3 * GIB
    assert packed == plain


@pytest.mark.parametrize("packed", ["lz4", "zstd"])
def test_variables_are_seen_in_what_nvcc_packed(reader: Reader, packed: str):
    needs = reader.needs((MODULES / f"large-{packed}.fatbin").read_bytes())
    assert needs.known
    assert needs.variables == 3 * GIB


def test_only_the_part_that_suits_the_gpu_counts_compressed_or_not(reader: Reader):
    other, ours = cubin(large=2 * GIB), cubin(small=64)
    image = fatbin(
        part(CUBIN, 80, zstd(3)(other), 0x8000, len(other)), part(CUBIN, 90, lz4_block(ours), 0x2000, len(ours))
    )
    assert reader.needs(image, 90).variables == 64
    assert reader.needs(image, 80).variables == 2 * GIB


@pytest.mark.parametrize(
    ("flag", "whole"),
    [(0x8000, 10), (0x8000, 0), (0x8000, 1 << 40), (0x4000, 500), (0x2000, 500)],
    ids=["too short", "no length", "too long", "a way that nobody names", "another way than it says"],
)
def test_what_cannot_be_unpacked_is_unknown(reader: Reader, flag: int, whole: int):
    image = cubin(large=GIB)
    needs = reader.needs(fatbin(part(CUBIN, 90, zstd(3)(image), flag, whole)))
    assert not needs.known
    assert needs.code > 0


@given(seed=st.integers(0, 2**32))
def test_a_compressed_cubin_that_lies_about_itself_is_read_within_its_bytes(reader: Reader, seed: int):
    """The driver gets no length with an image; of what was compressed we know it."""
    random, lying = Random(seed), bytearray(cubin(large=GIB, small=7))
    for _ in range(random.randint(1, 8)):
        lying[random.randrange(16, len(lying))] = random.choice((0, 255, random.randrange(256)))
    needs = reader.needs(fatbin(part(CUBIN, 90, zstd(3)(bytes(lying)), 0x8000, len(lying))))
    assert needs.known in (0, 1)
