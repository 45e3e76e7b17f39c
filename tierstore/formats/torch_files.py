"""Files that `torch.load` reads, written with tensors that come one at a time.

`torch.save` needs all tensors of what it writes at once, and so does whoever calls it.  Here each is asked
for when
its turn comes, and let go of before the next.  The files are those of PyTorch's format of 2020 (a ZIP archive
without compression, of a pickle and one entry for each storage; pytorch/caffe2/serialize/inline_container.h),
and `torch.load` reads them like any other, also mapped into memory.

1. What a pickle refers to is a storage, and so is what an entry holds: tensors that share one share it in
   the file.
2. A tensor that comes later is written in the usual order of its elements, as a storage of its own.
3. The file is there as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from tierstore.errors import UsageError

_ARCHIVE = "archive"
_VERSION = b"3\n"
_PROTOCOL = 2  # torch.save's
_ALIGNED_BYTES = 64  # where storages begin, for who maps the file
_LOCAL_HEADER_BYTES, _ZIP64_BYTES, _EXTRA_HEADER_BYTES = 30, 20, 4
_PADDING = 0x4246  # the extra field that PyTorch pads with
_PIECE_BYTES = 1 << 26

_KINDS: Mapping[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}
"""What the format calls a storage of numbers; of others it says the bytes, and the tensor says the rest."""

Later = Callable[[torch.Tensor], bool]
Read = Callable[[torch.Tensor], torch.Tensor]


class _StorageRecord(NamedTuple):
    """A storage that the pickle refers to: an entry of the archive.

    Attributes:
        key: its number, and the name of the entry.
        kind: what the format calls it.
        location: the device that it is of.
        elements: how many it has.
        nbytes: of the entry.
        source: the tensor whose bytes they are; kept, so that nothing else gets its id.
        is_later: whether it is read when it is written.
    """

    key: str
    kind: type
    location: str
    elements: int
    nbytes: int
    source: torch.Tensor
    is_later: bool


def write_torch_file(path: Path, value: object, later: Later, read: Read) -> None:
    """Write ``value`` for `torch.load`, and bring it to the disk.

    Args:
        path: of the file; one that is there is replaced when the new one is whole.
        value: what is to be written.
        later: says whether a tensor of it is read when its turn comes.
        read: returns such a tensor's values, in host memory.

    Raises:
        UsageError: it holds tensors without plain bytes, or bare storages.
        AttributeError, TypeError, PicklingError: it cannot be pickled.
        OSError: the file system failed; a former file is unharmed.
    """
    content = io.BytesIO()
    pickler = _TensorPickler(content, later)
    pickler.dump(value)
    fresh = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            _write_archive(file, content.getbuffer(), pickler.records.values(), read)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _TensorPickler(pickle.Pickler):
    """Pickles as `torch.save` does, and notes which storages are to be written.

    Attributes:
        records: the storages, in the order of their entries.
    """

    def __init__(self, file: IO[bytes], later: Later) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._later = later
        self.records: dict[tuple[object, ...], _StorageRecord] = {}

    def persistent_id(self, obj: object) -> object:
        """Return what stands for a storage."""
        if isinstance(obj, _StorageRecord):
            return ("storage", obj.kind, obj.key, obj.location, obj.elements)
        if isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage):
            raise UsageError(f"a bare {type(obj).__name__} is written by torch.save alone")
        return None

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401 - what pickle takes
        """Return how a tensor is made again."""
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if self._later(obj):
            return _rebuilt(self._record_later(obj), 0, obj.shape, _usual_strides(obj.shape), obj.dtype)
        if type(obj) is not torch.Tensor or vars(obj):
            return NotImplemented  # PyTorch's own way, which leads to a tensor that has neither
        if not _is_plain(obj):
            raise UsageError(
                f"a tensor without plain bytes ({obj.layout}, on {obj.device}) is written by torch.save alone"
            )
        record = self._record_of(obj)
        return _rebuilt(
            record, int(obj.storage_offset()), obj.shape, obj.stride(), obj.dtype, obj.requires_grad
        )

    def _record_later(self, tensor: torch.Tensor) -> _StorageRecord:
        nbytes = tensor.numel() * tensor.element_size()
        return self._recorded(("later", id(tensor)), tensor, "cpu", nbytes, is_later=True)

    def _record_of(self, tensor: torch.Tensor) -> _StorageRecord:
        storage = tensor.untyped_storage()
        key = ("here", tensor.device, storage.data_ptr()) if storage.nbytes() else ("empty", id(tensor))
        return self._recorded(
            (*key, tensor.dtype), tensor, str(tensor.device), storage.nbytes(), is_later=False
        )

    def _recorded(
        self, key: tuple[object, ...], tensor: torch.Tensor, location: str, nbytes: int, *, is_later: bool
    ) -> _StorageRecord:
        if key not in self.records:
            kind = _KINDS.get(tensor.dtype)
            count = nbytes if kind is None else nbytes // tensor.element_size()
            number = str(len(self.records))
            self.records[key] = _StorageRecord(
                number, kind or torch.UntypedStorage, location, count, nbytes, tensor, is_later
            )
        return self.records[key]


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def _usual_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _rebuilt(
    record: _StorageRecord,
    offset: int,
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool = False,
) -> tuple[Any, ...]:
    """Return the function that PyTorch makes such a tensor with, and its arguments, of another storage."""
    function, arguments, *rest = torch.empty(0, dtype=dtype, device="cpu").__reduce_ex__(_PROTOCOL)
    _, _, _, _, _, *others = arguments
    return (function, (record, offset, tuple(shape), strides, requires_grad, *others), *rest)


# ---------------------------------------------------------------------- the archive


def _write_archive(
    file: IO[bytes], content: memoryview, records: Iterable[_StorageRecord], read: Read
) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _write_entry(archive, "data.pkl", [content])
        _write_entry(archive, "byteorder", [memoryview(sys.byteorder.encode())])
        for record in records:
            _write_entry(archive, f"data/{record.key}", _pieces(_bytes_of(record, read)))
        _write_entry(archive, "version", [memoryview(_VERSION)])


def _write_entry(archive: zipfile.ZipFile, name: str, pieces: Iterable[memoryview]) -> None:
    full = f"{_ARCHIVE}/{name}"
    info = zipfile.ZipInfo(full)
    assert archive.fp is not None
    header_bytes = _LOCAL_HEADER_BYTES + len(full) + _ZIP64_BYTES + _EXTRA_HEADER_BYTES
    padding = -(archive.fp.tell() + header_bytes) % _ALIGNED_BYTES
    info.extra = struct.pack("<HH", _PADDING, padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as entry:
        for piece in pieces:
            entry.write(piece)


def _pieces(content: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(content), _PIECE_BYTES):
        yield content[begin : begin + _PIECE_BYTES]


def _bytes_of(record: _StorageRecord, read: Read) -> memoryview:
    """Return a storage's bytes, in host memory."""
    if not record.nbytes:
        return memoryview(b"")
    if record.is_later:
        values = read(record.source).detach().to("cpu").contiguous()
        flat = values.view(-1).view(torch.uint8) if values.dim() else values.view(1).view(torch.uint8)
    else:
        storage = record.source.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).to("cpu")
    array: Any = flat.numpy()
    content = memoryview(array)
    assert len(content) == record.nbytes, (len(content), record.nbytes)
    return content
