"""Any header: what the format's own library reads is read the same, all else is one typed error.

The oracle is the library ``safetensors``; where we are stricter the test says in what.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

from tests.hostile_tensorfiles import FILES, file_of
from tierstore.errors import UsageError
from tierstore.formats.safetensors_files import HeaderEntry, TensorFile, pack, unpack

_DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.int64, torch.uint16]
_NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name != "__metadata__"
)
_SHAPES = st.lists(st.integers(0, 3), max_size=3)
_INTS = st.integers(-1, 40) | st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64, 10**30])
_JUNK = st.recursive(
    st.none() | st.booleans() | _INTS | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_KINDS = st.sampled_from(["F32", "F64", "U8", "BOOL", "BF16", "I64", "F4", "C64", "f32", ""])
_LOOKS = st.fixed_dictionaries(
    {
        "dtype": _KINDS | _JUNK,
        "shape": st.lists(st.integers(0, 3) | _INTS, max_size=3) | _JUNK,
        "data_offsets": st.lists(st.integers(0, 40) | _INTS, min_size=2, max_size=2) | _JUNK,
    }
)
_HEADERS = st.dictionaries(_NAMES | st.just("__metadata__"), _LOOKS | _JUNK, max_size=3) | _JUNK


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@st.composite
def _states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(_NAMES, max_size=5, unique=True))
    state = {}
    for name in names:
        shape, dtype = draw(_SHAPES), draw(st.sampled_from(_DTYPES))
        size = torch.Size(shape).numel() * dtype.itemsize
        filled = torch.arange(size, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
        state[name] = filled.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    return state


def _same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(
        (mine[name].dtype, mine[name].shape, _bytes(mine[name])) == (each.dtype, each.shape, _bytes(each))
        for name, each in theirs.items()
    )


@given(_states(), st.dictionaries(_NAMES, _NAMES, max_size=2))
def test_what_the_library_writes_is_read_and_what_we_write_it_reads(
    state: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    read, told = unpack(torch.frombuffer(bytearray(save(state, metadata or None)), dtype=torch.uint8))
    assert _same(read, state)
    assert told == metadata
    ours = pack([HeaderEntry.of(name, each) for name, each in state.items()], state.values(), metadata)
    assert _same(load(ours.numpy().tobytes()), state)


def judge(content: bytes, path: Path) -> None:
    """Read a file both ways."""
    path.write_bytes(content)
    try:
        with TensorFile(path) as file:
            mine = {name: file.read(name) for name in file.names}
    except UsageError:
        return  # we may be stricter than the library, never laxer
    assert _same(mine, load(content))


@given(_HEADERS, st.binary(max_size=16))
def test_any_json_as_a_header_is_read_as_the_library_reads_it_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: object, data: bytes
) -> None:
    judge(file_of(header, data), tmp_path_factory.getbasetemp() / "any.safetensors")


@given(st.data())
def test_a_damaged_file_is_read_as_the_library_reads_it_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(save(data.draw(_states())))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"9", b"0"])
        )
    judge(bytes(content), tmp_path_factory.getbasetemp() / "damaged.safetensors")


@given(st.data())
def test_a_right_file_is_never_refused(data: st.DataObject) -> None:
    """Spaces, the order of members and escapes are the writer's choice."""
    state = data.draw(_states())
    saved = save(state)
    (length,) = struct.unpack_from("<Q", saved)
    table = json.loads(saved[8 : 8 + length])
    shuffled = {name: dict(data.draw(st.permutations(list(table[name].items())))) for name in table}
    indent, is_ascii = data.draw(st.sampled_from([None, 0, 2, "\t"])), data.draw(st.booleans())
    header = json.dumps(shuffled, indent=indent, ensure_ascii=is_ascii).encode()
    read, _ = unpack(torch.frombuffer(bytearray(file_of(header, saved[8 + length :])), dtype=torch.uint8))
    assert _same(read, state)


@pytest.mark.long
@settings(max_examples=100_000)
@given(st.binary(max_size=400))
def test_any_bytes_as_a_header_are_read_as_the_library_reads_them_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: bytes
) -> None:
    judge(file_of(header, bytes(8)), tmp_path_factory.getbasetemp() / "bytes.safetensors")


def test_the_library_reads_none_of_the_hostile_files_or_we_say_why_we_do_not() -> None:
    stricter = set()
    for name, (content, _) in FILES.items():
        try:
            load(content)
        except (SafetensorError, ValueError, RuntimeError, KeyError, UnicodeDecodeError, OverflowError):
            continue
        stricter.add(name)
    assert stricter == {"another member", "a name twice"}
