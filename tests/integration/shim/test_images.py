"""Images of modules as compilers pack them: what compressed parts of a fatbin take is read as if they were not compressed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import cast

import lz4.block
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from tests.built import REPOSITORY
from tests.images import CUBIN, PTX, cubin, fatbin, part
from tests.integration.shim.reader import Reader

GIB = 1 << 30
ROOM = 1 << 20
MODULES = REPOSITORY / "tests/modules"


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
    assert reader.unpack(b"z", packed, len(data) - 1) == b"", "it does not fit"


@given(data=DATA)
def test_lz4_comes_out_as_it_went_in(reader: Reader, data: bytes):
    packed = lz4_block(data)
    assert reader.unpack(b"l", packed, len(data)) == data
    assert reader.unpack(b"l", packed, len(data) - 1) == b"", "it does not fit"


@given(data=DATA, level=LEVELS, how=st.sampled_from((b"z", b"l")), seed=st.integers(0, 2**32))
def test_damaged_data_is_refused_or_fills_at_most_the_buffer(
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
    ids=["too short", "no length", "too long", "an unknown way", "another way than it states"],
)
def test_what_cannot_be_unpacked_is_unknown(reader: Reader, flag: int, whole: int):
    image = cubin(large=GIB)
    needs = reader.needs(fatbin(part(CUBIN, 90, zstd(3)(image), flag, whole)))
    assert not needs.known
    assert needs.code > 0


@given(seed=st.integers(0, 2**32))
def test_a_compressed_cubin_that_lies_about_itself_is_read_within_its_bytes(reader: Reader, seed: int):
    """The driver gets no length with an image; of what was compressed it is known."""
    random, lying = Random(seed), bytearray(cubin(large=GIB, small=7))
    for _ in range(random.randint(1, 8)):
        lying[random.randrange(16, len(lying))] = random.choice((0, 255, random.randrange(256)))
    needs = reader.needs(fatbin(part(CUBIN, 90, zstd(3)(bytes(lying)), 0x8000, len(lying))))
    assert needs.known in (0, 1)


# PTX as compilers and people write it, with anything between its words that means nothing.

NAMES = st.from_regex(r"[a-z_$][a-z0-9_$]{0,6}", fullmatch=True)
QUIET = st.text(st.sampled_from("abc .;,{}()[]=<>#0x1\\\"'/*\t"), max_size=20)
"""Of comments and strings: what the words of PTX are made of, above all."""
BLANKS = st.one_of(
    st.sampled_from(["", " ", "\n", "\t "]),
    QUIET.map(lambda text: f"/*{text.replace('*/', '')}*/".replace("**/", "*/")).filter(
        lambda text: text.find("*/", 2) == len(text) - 2
    ),
    QUIET.map(lambda text: f"//{text}\n"),
)
TYPES = {".b8": 1, ".u16": 2, ".s32": 4, ".f32": 4, ".b64": 8, ".f64": 8, ".b128": 16}
COUNTS = st.recursive(
    st.integers(0, 4000).flatmap(
        lambda n: st.sampled_from([(str(n), n), (f"0x{n:x}", n), (f"{n}U", n), (f"0b{n:b}", n), (f"0{n:o}", n)])
    ),
    lambda one: st.builds(
        lambda left, sign, right: (
            f"({left[0]}{sign}{right[0]})",
            left[1] * right[1] if sign == "*" else left[1] + right[1],
        ),
        one,
        st.sampled_from("*+"),
        one,
    ),
    max_leaves=3,
)
OTHERS = st.one_of(
    st.sampled_from([
        [".extern", ".global", ".b8", "e", "[", "]", ";"], [".file", "1", '"a/*b//c .global .b8 x[7];"'],
        [".version", "8.0"], [".pragma", '"nounroll"', ";"], [".shared", ".b8", "s", "[", "77", "]", ";"],
        [".visible", ".entry", "k", "(", ".param", ".u64", ".ptr", ".global", "p", ")", "{", "ld.global.u32", "%r1", ",", "[", "%rd1", "]", ";", "}"],
    ])
)  # fmt: skip


@st.composite
def ptx(draw: st.DrawFn) -> tuple[str, int]:
    """A text, and the bytes of its variables."""
    words, total = [".version", "8.0"], 0
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            words += draw(OTHERS)
            continue
        kind = draw(st.sampled_from(list(TYPES)))
        words += [*draw(st.sampled_from([[], [".visible"], [".weak"], [".common"], [".extern"]])), ".global", kind]
        names = draw(st.lists(st.tuples(NAMES, COUNTS, st.integers(0, 4)), min_size=1, max_size=3))
        for at, (name, (count, value), elements) in enumerate(names):
            words += [","] * (at > 0) + [name, "["]
            if elements > 0:  # as many as the initialiser has
                listed = ",".join(draw(st.sampled_from(["1", "{2, 3}", "f(4)"])) for _ in range(elements))
                words += ["]", "=", "{", listed, "}"]
                total += TYPES[kind] * elements
            else:
                words += [count, "]"]
                total += TYPES[kind] * value
        words += [";"]
    between = [draw(BLANKS) for _ in words]
    apart = (one + (" " if one == "" or one[-1] not in "\n\t /" else "") for one in between)
    return " " + "".join(word + blank for word, blank in zip(words, apart, strict=True)), total


@given(made=ptx())
def test_the_variables_of_a_text_are_read_whatever_stands_between_its_words(reader: Reader, made: tuple[str, int]):
    text, total = made
    needs = reader.needs(text.encode() + b"\0")
    assert (needs.variables, needs.known) == (total, 1)


@given(
    made=ptx(),
    junk=st.lists(st.tuples(st.integers(0, 2000), st.sampled_from(list('"/*\\\n.;(){}[]=#<0')))),
    cut=st.integers(0, 2000),
)
def test_a_large_variable_behind_any_damage_is_seen_or_the_text_is_unknown(
    reader: Reader, made: tuple[str, int], junk: list[tuple[int, str]], cut: int
):
    """Damage may open a comment or a string; the variable stands on a line of its own behind the end of any comment."""
    text = made[0][: cut or None]
    for at, mark in junk:
        text = text[: at % len(text)] + mark + text[at % len(text) :]
    needs = reader.needs(f"{text}\n/**/;\n.visible .global .b8 large[{GIB}];\n".encode())
    assert needs.variables >= GIB or not needs.known


@given(made=ptx(), before=st.integers(0, 10))
def test_a_text_without_an_end_is_read_within_its_bytes(reader: Reader, made: tuple[str, int], before: int):
    needs = reader.needs(made[0][: len(made[0]) - before].encode())
    assert needs.known in (0, 1)


@given(seed=st.integers(0, 2**32), kind=st.sampled_from([CUBIN, PTX]))
def test_a_damaged_image_is_read_within_its_bytes(reader: Reader, seed: int, kind: int):
    random = Random(seed)
    image = bytearray(fatbin((kind, 90, IMAGES[kind])) if random.random() < 0.5 else IMAGES[kind])
    for _ in range(random.randint(0, 8)):
        image[random.randrange(len(image))] = random.choice((0, 255, random.randrange(256)))
    del image[random.randint(4, 2 * len(image)) :]
    assert reader.needs(bytes(image)).known in (0, 1)
