"""The end of a run: everything that can be brought back is, whatever failed before.

1. Every part of the end is tried.  A failure is kept, and the next part goes on.
2. What is worth most comes first: parameters, then the optimizers' state, then gradients.
3. A part that fails is tried once more: an interrupt (``KeyboardInterrupt``) was not the part's fault, and
   a medium may have failed only once.
4. What could not be brought back raises when it is used: it never reads as something.
5. In the end one error says what is gone and why.

Knows nothing of stores and bundles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tierstore.errors import StoreClosed, TierStoreError
from tierstore.training.binding import natively, set_data

_TRIES = 2


class Ending:
    """Carries out an end part by part, and keeps what fails.

    Attributes:
        lost: the names of what could not be brought back.
    """

    def __init__(self) -> None:
        self.lost: list[str] = []
        self._failures: list[Exception] = []
        self._interrupts: list[BaseException] = []

    def attempt(self, part: Callable[[], None]) -> BaseException | None:
        """Carry out a part; return why it failed.

        Args:
            part: may be carried out again from its beginning where it was not carried out to its end.
        """
        failure: BaseException | None = None
        for _ in range(_TRIES):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - it is told in the end, and the rest goes on
                failure = error
            except BaseException as error:  # noqa: BLE001 - an interrupt: it is raised in the end
                failure = error
                self._interrupts.append(error)
            else:
                return None
        if isinstance(failure, Exception):
            self._failures.append(failure)
        return failure

    def lose(self, tensor: torch.Tensor, kind: type, name: str, reason: BaseException) -> None:
        """Let every use of a tensor raise: its bytes could not be brought back."""
        lose(tensor, kind, name, reason)
        self.lost.append(name)

    def conclude(self) -> None:
        """Raise if anything failed.

        Raises:
            KeyboardInterrupt: or its like: one came in the midst; nothing is lost by it.
            TierStoreError: it names what is lost; the causes are attached.
            Exception: nothing is lost; it is the first that a part has failed with.
        """
        failures, interrupts = self._failures, self._interrupts
        self._failures, self._interrupts = [], []
        causes = [*interrupts, *failures]
        if not causes:
            return
        if not self.lost:
            raise causes[0]
        why = _enumerate(list(dict.fromkeys(map(_describe, causes))), most=3)
        error = TierStoreError(
            f"{len(self.lost)} tensors could not be brought back and are gone: {_enumerate(self.lost)}. "
            f"Everything else is as it was left. Using them raises StoreClosed; give them other values "
            f"with p.data = values. Why: {why}"
        )
        self.lost = []
        raise error from _cause(causes)


def _describe(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"


def _enumerate(names: Sequence[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more


def _cause(failures: list[BaseException]) -> BaseException:
    return failures[0] if len(failures) == 1 else BaseExceptionGroup("what failed at the end", failures)


# ---------------------------------------------------------------------- what is gone

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
_LOOKS = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "device",
            "layout",
            "ndim",
            "is_leaf",
            "requires_grad",
            "grad_fn",
            "grad",
        )
    ),
    *(
        getattr(torch.Tensor, name)
        for name in ("size", "dim", "numel", "element_size", "nelement", "__len__")
    ),
    _Tensor.grad.__set__,
    _Tensor.grad.__delete__,
}


def lose(tensor: torch.Tensor, kind: type, name: str, reason: BaseException) -> None:
    """Let every use of a tensor raise ``StoreClosed``, until it is pointed at other memory.

    Args:
        tensor: that has no bytes any more.
        kind: its class while it had them; it is that again as soon as ``tensor.data`` is set.
        name: what messages call it.
        reason: why they are gone.
    """
    text = f"the values of {name!r} are gone: they could not be brought back ({_describe(reason)})."

    def refuse(*_: object, **__: object) -> object:
        raise StoreClosed(f"{text} Load them again, or set p.data.", key=name)

    def torch_function(
        cls: type,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        del cls, types
        if func not in _LOOKS:
            refuse()
        with natively():
            return func(*args, **(kwargs or {}))

    def replace(self: torch.Tensor, value: torch.Tensor) -> None:
        with natively():
            set_data(self, value)
        self.__class__ = kind

    tensor.__class__ = type(kind)(
        f"Lost{kind.__name__}",
        (kind,),
        {
            "__doc__": text,
            "__module__": __name__,
            "__torch_function__": classmethod(torch_function),
            "__repr__": lambda _: f"<{text}>",
            "__deepcopy__": refuse,
            "__reduce_ex__": refuse,
            "data": property(refuse, replace),
        },
    )
