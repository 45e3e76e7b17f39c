"""Files of safetensors: read as the format's own library reads them, or refused.

An input is a header and what follows it, with ``FF FF`` between them, so that the header's length is right
whatever is changed; or ``=`` and a whole file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save

from tests.fuzz import Judge
from tests.hostile_tensorfiles import FILES, file_of
from tests.property.test_tensorheader import judge

_MOST_BYTES = 4000

_RIGHT = save({"w": torch.arange(3.0), "b": torch.ones(2, 1, dtype=torch.bfloat16)}, {"format": "pt"})
_BEHIND = b"\xff\xff"

SEEDS = {
    "right": _RIGHT[8:].replace(b"}}", b"}}" + _BEHIND, 1),
    "right, as it is": b"=" + _RIGHT,
    **{name: b"=" + content for name, (content, _) in FILES.items() if len(content) < _MOST_BYTES},
}
TOKENS = (
    *(b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b'"F32"', b'"BF16"', b'"BOOL"', b'"F4"'),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\\u",
        b"[0,8]",
        b"[2]",
        b"-1",
        b"1e3",
        b"0",
        b"18446744073709551616",
    ),
)


@contextlib.contextmanager
def prepared(directory: Path) -> Iterator[Judge]:
    def one(content: bytes) -> None:
        header, _, data = content.partition(_BEHIND)
        judge(content[1:] if content[:1] == b"=" else file_of(header, data), directory / "w.safetensors")

    yield one
