"""Sees the operators of a thread, where nothing can see that somebody looks.

A dispatch mode is seen itself: PyTorch asks whether one is on, takes other kernels then and compiles nothing.
So PyTorch's operators have a kernel in Python at a dispatch key that PyTorch has for its own tests and uses
nowhere, above autograd and all else.  It is in a thread's dispatch while there are observers.

1. A call goes on at the keys below: it ends where it would end without this.
2. Operators that make no storage, or only by calling others, pass by.  PyTorch makes objects of subclasses
   from what some of them return (``nn.Parameter``), and nobody may have seen that before.  Where a program
   has subclasses of tensors that are made by ``Subclass(2, 3)``, ``empty`` passes by as well.
3. What runs inside of an operator is seen, too: derivatives that go along with it are made there.
4. The compiler compares the keys of a thread whenever it asks whether what it has compiled still holds.  So
   whoever sees that it begins sees nothing from then on.
5. Inside a ``torch.func`` transform nobody sees anything: it wraps numbers as well, and PyTorch hands no
   kernel in Python a number that is wrapped (its derivatives would raise).
6. A storage that somebody has looked at is referred to by its object in Python as long as it lives.  So
   autograd adds up out of place what flows together, as it does under a dispatch mode: the same numbers.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from tierstore.modes import OBSERVERS_KEY_NAME
from tierstore.torch_private import (
    OpOverload,
    TensorBase,
    compiler_callbacks,
    dispatch_key,
    dispatch_keys_below,
    fallthrough_keys,
    higher_order_operators,
    innermost_transform,
    is_dispatch_key_included,
    names_of_operators,
    set_dispatch_key_included,
    takes_numbers_as_tensors,
)
from tierstore.uncompiled import uncompiled

log = logging.getLogger("tierstore")

Operator = OpOverload

_KEY = dispatch_key(OBSERVERS_KEY_NAME)
_BELOW = dispatch_keys_below(_KEY)
_COMPOSITE = torch.DispatchKey.CompositeImplicitAutograd


class Observer(Protocol):
    """Is told of operators.

    Attributes:
        is_over: whether it wants to be told of nothing any more.
        is_blind: whether it can be told of nothing any more, as the program compiles; set by this module.
    """

    is_over: bool
    is_blind: bool

    def see(self, given: Sequence[object], result: object) -> None:
        """Take in an operator that has run, with what it was given and has returned."""
        ...

    def see_within(self, given: Sequence[object], result: object) -> None:
        """Take in an operator that has run inside of another one, before that one is seen."""
        ...


class _Thread(threading.local):
    """Who sees this thread's operators, and how deep it is in them."""

    def __init__(self) -> None:
        self.observers: tuple[Observer, ...] = ()
        self.depth = 0

    @property
    def is_seen(self) -> bool:
        """Whether there is somebody to be told."""
        return any(not each.is_blind for each in self.observers)


class _Kernels:
    """What is registered with PyTorch, once in a process, as soon as there is a first observer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by _lock, as is the next: a library's end ends its kernels.
        self._libraries: list[torch.library.Library] = []
        self._of_empty: torch.library.Library | None = None

    def register(self) -> None:
        """Register the kernel for PyTorch's operators: those of libraries call them."""
        with self._lock:
            if self._libraries:
                return
            # PyTorch would look for kernels of theirs; what they run is seen.
            fallthrough_keys.append(_KEY)
            for function in higher_order_operators.values():  # such as ``torch.cond``
                function.fallthrough(_KEY)
            everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
            self._of_empty = torch.library.Library("aten", "IMPL")
            everything.fallback(torch.library.fallthrough_kernel, OBSERVERS_KEY_NAME)
            for each in _operators_of_pytorch():
                if _makes_storage(each):
                    # A fallback for all of them is not found where a dispatch mode of somebody's is on.
                    library = self._of_empty if each is torch.ops.aten.empty.memory_format else aten
                    library.impl(each, functools.partial(_run, each), OBSERVERS_KEY_NAME, with_keyset=True)
            self._libraries += [everything, aten]

    def let_empty_pass(self) -> None:
        """Do so where a program's subclasses of tensors need it."""
        if self._of_empty is not None and any(map(_is_made_from_empty, _subclasses(torch.Tensor))):
            with self._lock:
                of_empty, self._of_empty = self._of_empty, None
                if of_empty is not None:
                    of_empty._destroy()  # noqa: SLF001 - what its finaliser does, now


_thread = _Thread()
_kernels = _Kernels()


def prepare() -> None:
    """Import what tells when the compiler begins, for `observe`.

    That is the compiler: it takes seconds, unless a program has made an optimizer or uses checkpoints, for
    which PyTorch itself has imported it.  To be called where a program has no modes in force.
    """
    compiler_callbacks()


def observe(observer: Observer) -> None:
    """Tell ``observer`` of the operators of this thread, backward included, until it is over."""
    _kernels.register()
    _kernels.let_empty_pass()
    callbacks = compiler_callbacks()
    if _begin_compiling not in callbacks.start_callbacks:  # whoever resets the compiler clears them
        callbacks.register_start_callback(_begin_compiling)
    if observer not in _thread.observers:
        _thread.observers = (*_thread.observers, observer)
    end_unseen()


def ignore(observer: Observer) -> None:
    """Tell ``observer`` of nothing in this thread any more."""
    _thread.observers = tuple(each for each in _thread.observers if each is not observer)
    end_unseen()


def begin_unseen() -> bool:
    """Let nobody see what runs in this thread; return whether `end_unseen` is due."""
    if not is_dispatch_key_included(_KEY):
        return False
    set_dispatch_key_included(_KEY, False)  # noqa: FBT003
    return True


def end_unseen() -> None:
    """Let observers see again what runs in this thread."""
    set_dispatch_key_included(_KEY, _thread.is_seen and innermost_transform() is None)


def _begin_compiling(arguments: object) -> None:
    """Tell nobody of this thread's operators any more: the compiler begins."""
    del arguments
    set_dispatch_key_included(_KEY, False)  # noqa: FBT003 - PyTorch's signature
    if _thread.is_seen:
        log.warning("parts of the program are compiled: what they have on the device is not measured")
    for each in _thread.observers:
        each.is_blind = True


# ---------------------------------------------------------------------- the kernel


@uncompiled  # what is not compiled may run among what is
def _run(operator: Operator, keys: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Run an operator, and tell of it."""
    thread = _thread
    if not thread.is_seen or innermost_transform() is not None:  # autograd goes on with what was included
        set_dispatch_key_included(_KEY, False)  # noqa: FBT003
        return _go_on(keys, operator, args, kwargs)
    thread.depth += 1
    try:
        result = _go_on(keys, operator, args, kwargs)
    finally:
        thread.depth -= 1
    for observer in thread.observers:
        if observer.is_over:
            ignore(observer)
        elif observer.is_blind:
            continue
        elif thread.depth:
            observer.see_within((args, kwargs), result)
        else:
            observer.see((args, kwargs), result)
    return result


def _go_on(keys: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Call the kernel that would have been called without ours."""
    if not any(map(_is_number, _for_tensors(operator, args, kwargs))):
        return operator.redispatch(keys & _BELOW, *args, **kwargs)
    # A number that is in a tensor's place was a tensor that remembers to be a number.  Where that counts, the
    # call has to begin again, as that makes one anew, at whichever overload takes numbers.
    is_unseen = begin_unseen()
    try:
        if _takes_numbers(operator):
            with torch.DisableTorchFunction():
                return operator.overloadpacket(*args, **kwargs)
        args, kwargs = _with_tensors(operator, args, kwargs)
    finally:
        if is_unseen:
            end_unseen()
    return operator.redispatch(keys & _BELOW, *args, **kwargs)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | complex)


@functools.cache
def _takes_numbers(operator: Operator) -> bool:
    """Say whether an operator, or an overload of it, takes numbers in the places of tensors."""
    if takes_numbers_as_tensors(operator._schema.name.partition("::")[2]):  # noqa: SLF001
        return True
    places = [place for place in _places_of_tensors(operator) if isinstance(place, int)]
    packet = operator.overloadpacket
    schemas = [getattr(packet, name)._schema for name in packet.overloads()]  # noqa: SLF001
    return any(
        str(each.arguments[place].type) == "number"
        for each in schemas
        for place in places
        if place < len(each.arguments)
    )


def _with_tensors(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with a tensor of PyTorch's type for each number in a tensor's place."""
    places = _places_of_tensors(operator)
    all_args = [_as_tensor(each) if at in places else each for at, each in enumerate(args)]
    return tuple(all_args), {at: _as_tensor(each) if at in places else each for at, each in kwargs.items()}


def _as_tensor(value: object) -> object:
    if not _is_number(value):
        return value
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
    with torch.DisableTorchFunction():
        return torch.tensor(value, dtype=dtypes[type(value)], device="cpu")


def _for_tensors(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[object]:
    """Yield what is in the places of tensors, one each."""
    for place in _places_of_tensors(operator):
        if isinstance(place, str):
            yield kwargs.get(place)
        elif place < len(args):
            yield args[place]


@functools.cache
def _places_of_tensors(operator: Operator) -> tuple[int | str, ...]:
    """Return where an operator takes a tensor each: numbers, or names of what only has one."""
    return tuple(
        argument.name if argument.kwarg_only else number
        for number, argument in enumerate(operator._schema.arguments)  # noqa: SLF001
        if str(argument.type) in ("Tensor", "Optional[Tensor]")
    )


# ---------------------------------------------------------------------- what passes by


def _operators_of_pytorch() -> Iterator[Operator]:
    for name in names_of_operators():
        library, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if library == "aten":
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if operator is not None:  # some have a name in C++ alone
                yield operator


def _makes_storage(operator: Operator) -> bool:
    """Say whether an operator returns what it has made itself."""
    if operator.has_kernel_for_dispatch_key(_COMPOSITE):
        return False
    returned = [each for each in operator._schema.returns if "Tensor" in str(each.type)]  # noqa: SLF001
    return any(each.alias_info is None for each in returned)


def _subclasses(kind: type) -> Iterator[type]:
    known: list[type] = kind.__subclasses__()
    for each in known:
        yield each
        yield from _subclasses(each)


def _is_made_from_empty(kind: type) -> bool:
    """Say whether a class of tensors leaves it to PyTorch how one is made; guards are never made."""
    is_left: bool = vars(TensorBase)["__new__"] is kind.__new__
    return is_left and not kind.__module__.startswith(("torch.", "tierstore."))
