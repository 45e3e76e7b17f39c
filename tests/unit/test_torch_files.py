"""Files that are written one tensor at a time: `torch.load` finds what `torch.save` would have written."""

from __future__ import annotations

import collections
import itertools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tierstore.errors import UsageError
from tierstore.formats.torch_files import write_torch_file

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


class Bits:
    """A value as what can be compared: tensors by their looks and bytes, and who shares memory with whom."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    def of(self, value: Any) -> Any:  # noqa: ANN401 - any value
        if isinstance(value, Tensor):
            key = value.untyped_storage().data_ptr()
            shared = self.storages.setdefault(key, len(self.storages)) if value.numel() else None
            plain = (
                value.detach().contiguous().view(-1).view(torch.uint8) if value.numel() else torch.empty(0)
            )
            return (
                type(value).__name__, value.dtype, tuple(value.shape), value.stride(), value.storage_offset(),
                value.requires_grad, shared, bytes(plain.tolist()),
            )  # fmt: skip
        if isinstance(value, dict):
            return type(value).__name__, {key: self.of(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value).__name__, [self.of(each) for each in value]
        return value


def bits(value: Any) -> Any:  # noqa: ANN401
    return Bits().of(value)


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (nbytes,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)


@st.composite
def values(draw: st.DrawFn) -> Any:  # noqa: ANN401
    tensors = [
        random(tuple(draw(st.lists(st.integers(0, 4), max_size=3))), draw(st.sampled_from(DTYPES)))
        for _ in range(draw(st.integers(1, 6)))
    ]
    wide = next((each for each in tensors if each.dim() > 1 and each.numel()), torch.arange(12.0).view(3, 4))
    tensors += [wide.t() if wide.dim() == 2 else wide[0], wide[:1], tensors[0]]
    floating = [each for each in tensors if each.dtype is torch.float32]
    parameters = [nn.Parameter(each, requires_grad=draw(st.booleans())) for each in floating[:1]]
    ordered = collections.OrderedDict((f"t{number}", each) for number, each in enumerate(tensors))
    return {
        "state": ordered,
        "more": [*parameters, 3, "text", None, 1.5, (tensors[-1], True)],
        "n": {0: {"step": tensors[0]}},
    }


@given(value=values(), data=st.data())
def test_what_is_read_is_what_torch_save_would_have_written(
    tmp_path_factory: pytest.TempPathFactory,
    value: Any,  # noqa: ANN401
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("files") / "value.ckpt"
    torch.save(value, path.with_name("expected.ckpt"))
    write_torch_file(path, value, lambda _: False, lambda tensor: tensor)
    is_mapped = data.draw(st.booleans())
    expected = torch.load(path.with_name("expected.ckpt"), weights_only=True)
    assert bits(torch.load(path, weights_only=True, mmap=is_mapped)) == bits(expected)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all((each.header_offset + 30) % 1 == 0 for each in archive.infolist())


def test_tensors_that_come_later_are_asked_for_one_after_another(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.randn(3, 4) for number in range(5)}
    empty = {name: torch.empty(3, 4, device="meta") for name in tensors}
    empty["again"] = empty["t0"]
    asked: list[Tensor] = []

    def read(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        return next(tensors[name] for name, each in empty.items() if each is tensor)

    write_torch_file(tmp_path / "f", empty, lambda tensor: tensor.is_meta, read)
    found = torch.load(tmp_path / "f", weights_only=True)
    assert len(asked) == len(tensors)
    assert all(torch.equal(found[name], each) for name, each in tensors.items())
    assert found["again"].data_ptr() == found["t0"].data_ptr()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_that_comes_later_is_written_in_the_usual_order(transposed: bool, tmp_path: Path) -> None:
    value = torch.arange(6.0).view(2, 3)
    later = torch.empty(3, 2, device="meta").t() if transposed else torch.empty(2, 3, device="meta")
    write_torch_file(
        tmp_path / "f", [later], lambda tensor: tensor is later, lambda _: value.t().contiguous().t()
    )
    (found,) = torch.load(tmp_path / "f", weights_only=True)
    assert torch.equal(found, value)
    assert found.is_contiguous()


def test_storages_begin_where_maps_of_files_want_them(tmp_path: Path) -> None:
    write_torch_file(
        tmp_path / "f", [torch.ones(n) for n in range(1, 9)], lambda _: False, lambda tensor: tensor
    )
    content = (tmp_path / "f").read_bytes()
    with zipfile.ZipFile(tmp_path / "f") as archive:
        for each in archive.infolist():
            at = each.header_offset
            lengths = [int.from_bytes(content[at + place : at + place + 2], "little") for place in (26, 28)]
            assert (at + 30 + sum(lengths)) % 64 == 0


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.ones(2).untyped_storage(),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
    ids=["sparse", "meta", "storage", "conjugated"],
)
def test_what_only_torch_save_writes_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"torch\.save alone"):
        write_torch_file(tmp_path / "f", {"a": [value]}, lambda _: False, lambda tensor: tensor)
    assert list(tmp_path.iterdir()) == []


def test_whatever_fails_a_former_file_is_unharmed(tmp_path: Path) -> None:
    write_torch_file(tmp_path / "f", ["former"], lambda _: False, lambda tensor: tensor)
    tensors = [torch.empty(2, device="meta") for _ in range(3)]
    for fails_at in range(3):
        count = itertools.count()

        def read(tensor: Tensor, fails_at: int = fails_at, count: Any = count) -> Tensor:  # noqa: ANN401
            if next(count) == fails_at:
                raise OSError("the medium has failed")
            return torch.zeros(2)

        with pytest.raises(OSError, match="the medium has failed"):
            write_torch_file(tmp_path / "f", tensors, lambda tensor: tensor.is_meta, read)
        assert torch.load(tmp_path / "f", weights_only=True) == ["former"]
        assert [each.name for each in tmp_path.iterdir()] == ["f"]


def test_what_cannot_be_pickled_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, TypeError, Exception), match="pickle"):
        write_torch_file(tmp_path / "f", lambda: 0, lambda _: False, lambda tensor: tensor)
    assert list(tmp_path.iterdir()) == []
