"""What the library does among a program's operators: nobody sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tierstore.torch_private import is_transformed_tensor
from tierstore.training.pytorch.own_work import detached

SEEN: list[object] = []


class Operators(TorchDispatchMode):
    """Notes operators."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run one."""
        SEEN.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes functions."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - torch's own
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call one."""
        SEEN.append(func)
        return func(*args, **(kwargs or {}))


class Other(Tensor):
    """A class of a program's, which is asked what its operators do."""

    asked: ClassVar[list[object]] = []
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared without its class there
        cls,
        func: Any,  # noqa: ANN401 - torch's own
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run one on the plain tensor."""
        cls.asked.append(func)
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


MODES: list[Callable[[], AbstractContextManager[object]]] = [
    nullcontext,
    Operators,
    Functions,
    torch.inference_mode,
]


@pytest.mark.parametrize("mode", MODES)
def test_an_alias_shares_bytes_and_versions_and_no_mode_sees_it_made(
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    before = tensor._version
    with mode():
        SEEN.clear()
        alias = detached(tensor)
        assert SEEN == []
    assert not alias.requires_grad
    alias.add_(1)
    assert tensor._version == alias._version == before + 1
    assert alias.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_a_class_of_a_program_is_asked_for_its_alias() -> None:
    tensor = torch.ones(3).as_subclass(Other)
    Other.asked.clear()
    detached(tensor)
    assert Other.asked == [torch.ops.aten.detach.default]


def test_an_alias_is_none_of_a_transform() -> None:
    found: list[bool] = []

    def look(x: Tensor) -> Tensor:
        y = x * 2
        found.append(is_transformed_tensor(detached(y)))
        return y.sum()

    torch.func.grad(look)(torch.ones(3))
    assert found == [False]
