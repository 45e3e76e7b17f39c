"""Headers of safetensors files: written for tensors, and read from files that somebody hands in.

The format (github.com/huggingface/safetensors, section "Format"): eight bytes, little endian, the length of
the header; the header, JSON, from each name to its dtype, shape and range of bytes; then the bytes by rows.
Headers are padded with spaces, so that the bytes begin at a multiple of eight.

1. A header has at most `MOST_BYTES`, as the format says, and lies within its file.
2. It is read as what it may be and not as any JSON: nothing nests, and one tensor is looked at at a time.
3. Every byte after it belongs to exactly one tensor, and a tensor has the bytes of its shape and dtype.
4. A name is given once, and is text that UTF-8 can hold.  ``__metadata__`` is the format's own.
5. A dtype that PyTorch has not, such as ``F4``, is one tensor's matter: the others can be read.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tierstore.errors import UsageError
from tierstore.quoting import named, quoted

MOST_BYTES = 100_000_000
LENGTH_BYTES = 8

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPE_OF = {text: dtype for dtype, text in _DTYPES.items()}
_METADATA = "__metadata__"
_ALIGNMENT_BYTES = 8
_LARGEST = 2**63 - 1  # what a tensor's sizes and strides may be

_GAP = rb"[ \t\n\r]*+"
_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\.)*+"'
_INTS = rb"\[[0-9, \t\n\r]*+\]"
_COLON = _GAP + rb":" + _GAP
_MEMBER = (
    rb'(?:"dtype"' + _COLON + rb'"(?P<dtype>[^"\\]*+)"'
    rb'|"shape"' + _COLON + rb"(?P<shape>" + _INTS + rb")"
    rb'|"data_offsets"'
    + _COLON
    + rb"(?P<offsets>"
    + _INTS
    + rb"))"
    + _GAP
    + rb"(?:,"
    + _GAP
    + rb'(?=")|(?=\}))'
)
_BEGIN = re.compile(_GAP + rb"\{" + _GAP)
_NAME = re.compile(rb"(" + _STRING + rb")" + _COLON)
_TENSOR = re.compile(rb"\{" + _GAP + rb"(?:" + _MEMBER + rb"){3}\}" + _GAP)
_TEXT = re.compile(rb"(" + _STRING + rb")" + _GAP)
_NEXT = re.compile(rb"," + _GAP + rb'(?=")')
_END = re.compile(rb"\}" + _GAP)
_INT = re.compile(rb"(?:0|[1-9][0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file that is written: what it is called and looks like."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> HeaderEntry:
        """Describe a tensor."""
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorLook(NamedTuple):
    """One tensor of a file that is read.

    Attributes:
        dtype: ``None``: one that PyTorch has not.
        kind: the dtype as the file says it.
        shape: its sizes.
        begin, end: where its bytes are, counted from the first of all tensors.
    """

    dtype: torch.dtype | None
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """What a header says: every tensor by name, in the order of their bytes, and the metadata."""

    tensors: Mapping[str, TensorLook]
    metadata: Mapping[str, str]


def build(entries: Sequence[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return a header and its length before it.

    Raises:
        UsageError: a name or a dtype that the format cannot hold, a name twice, or more than a header may
            have; the error has the name.
    """
    for text in (*metadata, *metadata.values()):
        _require_text(text, "metadata")
    table: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for entry in entries:
        _require_nameable(entry, table)
        begin, end = end, end + entry.nbytes
        table[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    content = json.dumps(table, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT_BYTES)
    if len(content) > MOST_BYTES:
        longest = max((entry.name for entry in entries), key=len, default="")
        raise UsageError(
            f"the names and shapes of {len(entries)} tensors take {len(content)} bytes; a safetensors "
            f"file holds {MOST_BYTES}. The longest name, {quoted(longest)}, has {len(longest)} characters.",
            key=longest,
        )
    return struct.pack("<Q", len(content)) + content


def _require_nameable(entry: HeaderEntry, taken: Mapping[str, object]) -> None:
    name = entry.name
    if name == _METADATA:
        raise UsageError(
            f"{name!r} is a name that the safetensors format keeps for itself: give it another one.",
            key=name,
        )
    _require_text(name, "a tensor")
    if name in taken:
        raise UsageError(
            f"{quoted(name)} is the name of two tensors; a safetensors file holds one.", key=name
        )
    if entry.dtype not in _DTYPES:
        raise UsageError(f"{quoted(name)} is {entry.dtype}, which a safetensors file cannot hold.", key=name)


def _require_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise UsageError(
            f"{quoted(text)} cannot be the name of {what} in a safetensors file, which is UTF-8: the "
            f"surrogate at character {cause.start} has no encoding there. Give it another name.",
            key=text,
        ) from cause


def length_of(prefix: bytes, file_bytes: int) -> int:
    """Return the length of a file's header from the eight bytes before it.

    Raises:
        ValueError: the file is too short for it, or it is longer than a header may be.
    """
    if file_bytes < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        raise ValueError(f"header too small: of its {LENGTH_BYTES} bytes of length {file_bytes} are there")
    (nbytes,) = struct.unpack("<Q", prefix)
    most = min(MOST_BYTES, file_bytes - LENGTH_BYTES)
    if nbytes > most:
        raise ValueError(
            f"its header is said to have {nbytes} bytes; accepted, of {file_bytes}: at most {most}"
        )
    return int(nbytes)


def parse(content: bytes, data_bytes: int) -> Header:
    """Return what a header says.

    Args:
        content: of the header, without its length.
        data_bytes: how many bytes come after it.

    Raises:
        ValueError: it is none, or one of bytes that are not there; the message says where and why.
    """
    tensors: dict[str, TensorLook] = {}
    metadata: dict[str, str] | None = None
    at = _after(_BEGIN, content, 0, "a header begins with '{'")
    is_empty = content[at : at + 1] == b"}"
    while not is_empty:
        found = _match(_NAME, content, at, "a name in quotes is due, and a colon")
        name = _text(found[1])
        if name in tensors or (name == _METADATA and metadata is not None):
            raise ValueError(f"{quoted(name)} is there twice")
        if name == _METADATA:
            metadata, at = _metadata(content, found.end())
        else:
            tensors[name], at = _tensor(name, content, found.end())
        if (more := _NEXT.match(content, at)) is None:
            break
        at = more.end()
    if _after(_END, content, at, "'}' is due, or a comma and another name") != len(content):
        raise ValueError("something follows its header's '}'")
    return Header(_in_order(tensors, data_bytes), metadata or {})


def _match(pattern: re.Pattern[bytes], content: bytes, at: int, due: str) -> re.Match[bytes]:
    found = pattern.match(content, at)
    if found is None:
        raise ValueError(f"byte {at} of its header is {quoted(content[at : at + 20])}: {due}")
    return found


def _after(pattern: re.Pattern[bytes], content: bytes, at: int, due: str) -> int:
    return _match(pattern, content, at, due).end()


def _text(quoted_text: bytes) -> str:
    """Return what a string of JSON says."""
    text: str = json.loads(quoted_text) if b"\\" in quoted_text else quoted_text[1:-1].decode()
    text.encode()  # an escaped surrogate is no text
    return text


def _metadata(content: bytes, at: int) -> tuple[dict[str, str], int]:
    metadata: dict[str, str] = {}
    at = _after(_BEGIN, content, at, "metadata is a mapping of texts")
    is_empty = content[at : at + 1] == b"}"
    while not is_empty:
        key = _match(_NAME, content, at, "a key in quotes is due, and a colon")
        value = _match(_TEXT, content, key.end(), "a text in quotes is due")
        if (name := _text(key[1])) in metadata:
            raise ValueError(f"{quoted(name)} is in its metadata twice")
        metadata[name], at = _text(value[1]), value.end()
        if (more := _NEXT.match(content, at)) is None:
            break
        at = more.end()
    return metadata, _after(_END, content, at, "'}' is due, or a comma and another key")


def _tensor(name: str, content: bytes, at: int) -> tuple[TensorLook, int]:
    due = f"of {named(name)} a mapping with dtype, shape and data_offsets is due"
    found = _match(_TENSOR, content, at, due)
    if None in (found["dtype"], found["shape"], found["offsets"]):
        raise ValueError(f"byte {at} of its header: {due}, each once")
    kind = found["dtype"].decode()
    shape, offsets = _ints(found["shape"], name), _ints(found["offsets"], name)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"the data_offsets of {named(name)} are {quoted(offsets)}; accepted: begin and end")
    look = TensorLook(_DTYPE_OF.get(kind), kind, shape, *offsets)
    _check_size(name, look)
    return look, found.end()


def _ints(text: bytes, name: str) -> tuple[int, ...]:
    inner = text[1:-1].strip()
    each = [part.strip() for part in inner.split(b",")] if inner else []
    if not all(_INT.fullmatch(part) for part in each):
        raise ValueError(f"{quoted(text)} of {named(name)} is no list of ints of at most 19 digits")
    return tuple(map(int, each))


def _check_size(name: str, look: TensorLook) -> None:
    """See to it that a tensor's bytes are those of its shape."""
    spread = 1
    for length in look.shape:
        spread *= max(length, 1)
        if spread > _LARGEST:
            raise ValueError(f"{named(name)} has shape {quoted(look.shape)}, more than {_LARGEST} elements")
    if look.dtype is None:
        return
    nbytes = look.dtype.itemsize * math.prod(look.shape)
    if nbytes != look.end - look.begin:
        raise ValueError(
            f"{named(name)} has {look.end - look.begin} bytes; "
            f"{look.kind} of shape {quoted(look.shape)} has {nbytes}"
        )


def _in_order(tensors: Mapping[str, TensorLook], data_bytes: int) -> dict[str, TensorLook]:
    """Return the tensors in the order of their bytes, each of which belongs to one of them."""
    ordered = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    end = 0
    for name, look in ordered:
        if look.begin != end:
            what = "overlap another tensor's" if look.begin < end else f"leave a gap after byte {end}"
            raise ValueError(f"the bytes {look.begin} to {look.end} of {named(name)} {what}")
        end = look.end
    if end != data_bytes:
        raise ValueError(f"its tensors have {end} bytes, and {data_bytes} follow its header")
    return dict(ordered)


def faults_of_dtypes(tensors: Iterable[tuple[str, TensorLook]]) -> list[str]:
    """Return what is said of tensors whose dtype PyTorch has not."""
    return [
        f"{named(name)} is {quoted(look.kind)}, a dtype that PyTorch has not"
        for name, look in tensors
        if look.dtype is None
    ]
