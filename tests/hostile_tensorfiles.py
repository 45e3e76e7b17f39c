"""Hostile safetensors files, as bytes: each with what a refusal says of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_of(header: bytes | object, data: bytes = bytes(8), length: int | None = None) -> bytes:
    """Return a file with a header, as JSON or as bytes, that is said to have ``length`` bytes."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def one(**changes: object) -> bytes:
    """Return a file of one tensor that is right but for some members; ``...``: it has not that member."""
    look = {key: value for key, value in (F32 | changes).items() if value is not ...}
    return file_of({"w": look})


def many_empty(count: int = 100_000) -> bytes:
    """Return a file of many tensors without bytes: right, and to be read within seconds."""
    look = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return file_of({f"layers.{number}.weight": look for number in range(count)}, b"")


FILES: Mapping[str, tuple[bytes, str]] = {
    "nothing": (b"", "header too small"),
    "half a length": (b"\x08\0\0\0", "header too small"),
    "a length beyond the file": (file_of({"w": F32}, length=1_000), "is said to have 1000 bytes"),
    "the largest length": (file_of({"w": F32}, length=2**64 - 1), f"is said to have {2**64 - 1} bytes"),
    "no header": (file_of(b""), "a header begins with '{'"),
    "no JSON": (file_of(b"weights!"), "a header begins with '{'"),
    "a list": (file_of([F32]), "a header begins with '{'"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "can't decode byte"),
    "deep lists": (file_of(b"[" * 1_000_000), "a header begins with '{'"),
    "deep mappings": (file_of(b'{"w":' * 1_000_000), "a mapping with dtype, shape and data_offsets is due"),
    "many lists": (file_of(b'{"w":[' + b"[]," * 1_000_000 + b"]}"), "a mapping with dtype"),
    "deep shapes": (one(shape=[[2]]), "a mapping with dtype"),
    "a comma too many": (file_of(b'{"w":' + json.dumps(F32).encode() + b",}"), "'}' is due"),
    "something behind": (file_of(json.dumps({"w": F32}).encode() + b"x"), "something follows"),
    "a quote that does not end": (file_of(b'{"w'), "a name in quotes is due"),
    "backslashes": (file_of(b'{"' + b"\\" * 1_000_000), "a name in quotes is due"),
    "a name twice": (
        file_of(b'{"w":' + json.dumps(F32).encode() + b',"w":' + json.dumps(F32).encode() + b"}"),
        "'w' is there twice",
    ),
    "a name that is no text": (file_of({"\ud800": F32}), "surrogates not allowed"),
    "metadata that is no mapping": (file_of({"__metadata__": 1, "w": F32}), "metadata is a mapping"),
    "metadata that is no text": (file_of({"__metadata__": {"a": 1}, "w": F32}), "a text in quotes is due"),
    "metadata twice": (
        file_of(b'{"__metadata__":{},"__metadata__":{},"w":' + json.dumps(F32).encode() + b"}"),
        "'__metadata__' is there twice",
    ),
    "no dtype": (one(dtype=...), "a mapping with dtype"),
    "no shape": (one(shape=...), "a mapping with dtype"),
    "no offsets": (one(data_offsets=...), "a mapping with dtype"),
    "another member": (one(strides=[1]), "a mapping with dtype"),
    "a member twice": (
        file_of(b'{"w":{"dtype":"F32","dtype":"F32","shape":[2]}}'),
        "a mapping with dtype, shape and data_offsets is due, each once",
    ),
    "a dtype that is no text": (one(dtype=1), "a mapping with dtype"),
    "a dtype of other size": (one(dtype="F64"), "F64 of shape (2,) has 16"),
    "a negative length": (one(shape=[-2]), "a mapping with dtype"),
    "a fraction": (one(shape=[2.0]), "a mapping with dtype"),
    "a length of many digits": (one(shape=[10**4_000]), "is no list of ints of at most 19 digits"),
    "a zero before": (file_of(b'{"w":{"dtype":"F32","shape":[02],"data_offsets":[0,8]}}'), "no list of ints"),
    "a hole in a list": (
        file_of(b'{"w":{"dtype":"F32","shape":[2,],"data_offsets":[0,8]}}'),
        "no list of ints",
    ),
    "a product beyond 64 bits": (one(shape=[2**62, 2**62]), "more than 9223372036854775807 elements"),
    "one that becomes right when it overflows": (
        one(shape=[2**33, 2**31, 2]),
        "more than 9223372036854775807",
    ),
    "one that is nothing": (one(shape=[2**62, 2**62, 0]), "more than 9223372036854775807 elements"),
    "many lengths": (one(shape=[2] * 100_000), "more than 9223372036854775807 elements"),
    "more than the bytes": (one(shape=[3]), "F32 of shape (3,) has 12"),
    "offsets of one": (one(data_offsets=[8]), "accepted: begin and end"),
    "offsets of three": (one(data_offsets=[0, 8, 8]), "accepted: begin and end"),
    "offsets backwards": (one(data_offsets=[8, 0]), "accepted: begin and end"),
    "a negative offset": (one(data_offsets=[-8, 0]), "a mapping with dtype"),
    "offsets beyond the file": (one(data_offsets=[8, 16]), "leave a gap after byte 0"),
    "bytes beyond the file": (file_of({"w": F32}, b""), "have 8 bytes, and 0 follow"),
    "bytes of nobody behind": (file_of({"w": F32}, bytes(9)), "have 8 bytes, and 9 follow"),
    "bytes of nobody": (file_of({}), "have 0 bytes, and 8 follow"),
    "bytes of two": (file_of({"w": F32, "v": F32}), "overlap another tensor's"),
    "a gap": (
        file_of({"w": F32, "v": F32 | {"data_offsets": [16, 24]}}, bytes(24)),
        "leave a gap after byte 8",
    ),
    "huge offsets": (one(shape=[2**60], data_offsets=[0, 2**62]), f"have {2**62} bytes, and 8 follow"),
}
"""By name: a file, and what the refusal says."""

UNKNOWN_DTYPES = (
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "F8_E4M3FNUZ",
    "I4",
    "",
    "f32",
    "OBJECT",
    "__class__",
    "X" * 10_000,
)
