"""The end of a run: everything that can be brought back is, whatever failed before.

1. Every part of the end is tried.  A failure is kept, and the next part goes on.
2. What is worth most comes first: parameters, then the optimizers' state, then gradients.
3. A part that fails is tried once more: an interrupt (``KeyboardInterrupt``) was not the part's fault, and
   a medium may have failed only once.
4. What is lost raises when it is used: it never reads as something.  What counts as that is decided by
   whoever ends the run: see `tierstore.training.leaving`.
5. In the end one error says what is gone and why.

Knows nothing of stores and bundles.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import torch

from tierstore.errors import TierStoreError
from tierstore.training.bundles.placeholders import Placeholder

_TRIES = 2


class RunEnding:
    """Carries out an end part by part, and keeps what fails.

    Attributes:
        lost: the names of what could not be brought back.
    """

    def __init__(self) -> None:
        self.lost: list[str] = []
        self._failures: list[Exception] = []
        self._interrupts: list[BaseException] = []

    def attempt(self, part: Callable[[], object]) -> BaseException | None:
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
            traceback.clear_frames(failure.__traceback__)  # they may have the memory that the next try needs
        if isinstance(failure, Exception):
            self._failures.append(failure)
        return failure

    def lose(
        self, tensor: torch.Tensor, kind: type, name: str, looks: torch.Tensor, reason: BaseException
    ) -> None:
        """Let every use of a tensor raise: its bytes could not be brought back.

        Args:
            tensor: that has no bytes any more.
            kind: its class while it had them.
            name: what messages call it.
            looks: see `placeholders.looks_of`.
            reason: why they are gone.
        """
        text = (
            f"the values of {name!r} are gone: they could not be brought back ({_describe(reason)}). "
            "Load them again, or set p.data."
        )
        Placeholder(kind, name, text, looks, tensor.device).put_on(tensor)
        self.lost.append(name)

    @property
    def interrupts(self) -> int:
        """How many interrupts came so far."""
        return len(self._interrupts)

    def take_causes(self) -> list[BaseException]:
        """Return what has failed, interrupts first, and know nothing of it any more."""
        causes = [*self._interrupts, *self._failures]
        self._failures, self._interrupts = [], []
        return causes

    def conclude(self) -> None:
        """Raise if anything failed.

        Raises:
            KeyboardInterrupt: or its like: one came in the midst; nothing is lost by it.
            TierStoreError: it names what is lost; the causes are attached.
            Exception: nothing is lost; it is the first that a part has failed with.
        """
        causes = self.take_causes()
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
