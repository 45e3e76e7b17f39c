"""The bytes that tensors are made of, and how they are compared.

Every tensor is a stretch of one buffer that was filled once; where it begins follows from its number and
its version, so that what should be there is known without keeping it.  Promises: equal seeds, equal
bytes; neighbours and successive versions differ.  Knows nothing of stores.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable

import torch

PAGE_BYTES = 4096
_PAGES = 4096  # stretches begin at one of so many pages
_INDEX_STRIDE, _VERSION_STRIDE = 1597, 2531  # odd, so that they walk over all pages
_WEIGHT_SCALE = 0.02  # standard deviation of freshly made transformer weights


class VerifyError(Exception):
    """Bytes came back different."""


class Content:
    """Makes tensors.  Safe from any thread once made.

    Args:
        kind: ``noise``, ``weights`` (bf16 numbers, normally distributed) or ``zeros``.
        zero_percent: so much of every page is zeros.
        largest_bytes: of a tensor.
        seed: chooses the bytes.
    """

    def __init__(self, kind: str, zero_percent: int, largest_bytes: int, seed: int = 0) -> None:
        nbytes = -(-largest_bytes // PAGE_BYTES) * PAGE_BYTES + _PAGES * PAGE_BYTES
        self._bytes = _filled(kind, nbytes, seed)
        pages = self._bytes.view(-1, PAGE_BYTES)
        pages[:, PAGE_BYTES - PAGE_BYTES * zero_percent // 100 :] = 0

    def tensor(self, index: int, version: int, nbytes: int) -> torch.Tensor:
        """Return what tensor ``index`` holds in ``version``: a view, not to be changed."""
        start = (index * _INDEX_STRIDE + version * _VERSION_STRIDE) % _PAGES * PAGE_BYTES
        return self._bytes[start : start + nbytes]


def _filled(kind: str, nbytes: int, seed: int) -> torch.Tensor:
    if kind == "zeros":
        return torch.zeros(nbytes, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    if kind == "weights":
        numbers = torch.randn(nbytes // 2, generator=generator) * _WEIGHT_SCALE
        return numbers.to(torch.bfloat16).view(torch.uint8)
    words = torch.randint(-(2**63), 2**63 - 1, (nbytes // 8,), generator=generator)
    return words.view(torch.uint8)


def _crc32c(data: memoryview) -> str:
    import google_crc32c

    return f"{google_crc32c.value(bytes(data)):08x}"


def _xxhash(data: memoryview) -> str:
    import xxhash

    return xxhash.xxh32_hexdigest(data)


def digest(name: str) -> Callable[[torch.Tensor], str]:
    """Return the checksum that fio calls ``name``, over the bytes of a tensor."""
    special: dict[str, Callable[[memoryview], str]] = {
        "crc32": lambda data: f"{zlib.crc32(data):08x}",
        "crc32c": _crc32c,
        "crc32c-intel": _crc32c,
        "xxhash": _xxhash,
    }

    def of(tensor: torch.Tensor) -> str:
        data = tensor.contiguous().view(torch.uint8).numpy().data
        if name in special:
            return special[name](data)
        return hashlib.new(name.replace("sha3-", "sha3_"), data).hexdigest()

    return of


class Tensors:
    """The tensors of one job thread, or of jobs with one ``filename``: their keys, sizes and versions.

    Different threads may touch different tensors.
    """

    def __init__(self, space: str, sizes: list[int], content: Content) -> None:
        self.space = space
        self.sizes = sizes
        self.keys = [f"{space}/{index}" for index in range(len(sizes))]
        self._content = content
        self._versions = [0] * len(sizes)

    def expected(self, index: int) -> torch.Tensor:
        """Return what the tensor holds now."""
        return self._content.tensor(index, self._versions[index], self.sizes[index])

    def renew(self, index: int) -> torch.Tensor:
        """Give the tensor its next version; return what it holds from now on."""
        self._versions[index] += 1
        return self.expected(index)

    def check(self, index: int, found: torch.Tensor, checksum: str) -> None:
        """Compare.

        Raises:
            VerifyError: the checksums differ.
        """
        expected = self.expected(index)
        wanted, got = digest(checksum)(expected), digest(checksum)(found)
        if wanted != got:
            raise VerifyError(
                f"verify: {self.keys[index]!r} came back wrong, {_difference(expected, found)}; "
                f"{checksum} {got}, not {wanted}"
            )


def _difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    if expected.shape != found.shape:
        return f"{found.numel()} bytes instead of {expected.numel()}"
    wrong = torch.nonzero(expected != found.to(expected.device)).flatten()
    return f"{len(wrong)} of {len(expected)} bytes, the first at offset {int(wrong[0])}"


@functools.cache
def shared_content(kind: str, zero_percent: int, largest_bytes: int, seed: int) -> Content:
    """Return a `Content` that jobs share: making one takes a while."""
    return Content(kind, zero_percent, largest_bytes, seed)
