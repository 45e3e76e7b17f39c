"""Which buffers travel: large tensors of modules that are no parameters.

1. A buffer that takes as many bytes as `buffer_min_size` says travels as parameters do: a bundle by itself,
   brought for its modules' forward, written back only if it was changed.  Smaller ones, and those without
   dimensions, stay where the model computes.
2. What shares memory travels together, if all of it are buffers that may, and none is a view of another.
3. A buffer stays as it is, whatever its size, if its memory could not be taken without somebody's notice, or
   nobody could tell when it is used: something else refers to it, it shares memory with what does not
   travel, is in memory shared with other processes, needs gradients, is of a class of its own, sparse,
   quantised, made under ``torch.inference_mode()``, belongs to a script of ``torch.jit``, or is sent to other
   processes by a ``DistributedDataParallel``.
4. A module that replaces its buffer (``self.mask = other``) has an ordinary tensor from then on.  When nobody
   has the former one any more, its bytes are dropped.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from tierstore.training.autograd.shared_memory import has_bytes, referred_to_by_none
from tierstore.training.bundles.binding import Binding, natively
from tierstore.training.bundles.ending import RunEnding
from tierstore.training.bundles.grouping import Content, Group
from tierstore.training.bundles.layout import lay_out, overlapping, span_of
from tierstore.training.bundles.placeholders import has_no_values, placeholder_of
from tierstore.training.faults import guard
from tierstore.training.modules.adopter import Adopter, is_deserted
from tierstore.training.modules.hooks import ModuleWindows
from tierstore.training.modules.host_modules import PlacedModules
from tierstore.training.modules.tensor_names import buffer_names
from tierstore.units import format_bytes

log = logging.getLogger("tierstore")

_SHOWN = 4


def names_of_buffers(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return every name of every buffer, the first one first: those of the state dict before others."""
    names = buffer_names(model)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            full = f"{path}.{name}" if path else name
            if full not in names.setdefault(buffer, []):
                names[buffer].append(full)
    return names


def ordinary_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that are none of the store's, with their names."""
    for name, buffer in model.named_buffers():
        if guard.guarded_tensor_of(buffer) is None:
            yield name, buffer


# ---------------------------------------------------------------------- which travel


def group_buffers(
    model: nn.Module,
    min_bytes: int | None,
    *,
    ignored: Container[torch.Tensor] = (),
    pinned: Container[torch.Tensor] = (),
    on_host: Container[torch.Tensor] = (),
) -> list[Group]:
    """Group the buffers of ``model`` that travel, in the order of its modules.

    Args:
        model: whose buffers; its parameters are ordinary tensors yet.
        min_bytes: what one takes at least; ``None``: none travels.
        ignored: those that stay as they are.
        pinned: those that stay in the fastest tier.
        on_host: those that are used on the host, beside a device.
    """
    names = names_of_buffers(model)
    large = {} if min_bytes is None else {each: None for each in names if _takes(each, min_bytes)}
    if not large:
        return []
    unseen = _used_by_scripts(model)
    plain = [each for each in names if each not in ignored and each not in unseen and _is_plain(each)]
    free = {each for each in plain if has_no_values(each)}
    free |= referred_to_by_none([each for each in plain if not has_no_values(each)], model)
    kept = buffer_names(model)
    groups = [
        _group(part, model, names, kept, pinned, on_host)
        for part in _sharing_memory(model, names)
        if any(each in large for each in part) and free.issuperset(part) and not _is_by_views(part)
    ]
    _say_what_stays(large, groups, names, ignored)
    return groups


def _is_by_views(part: Sequence[torch.Tensor]) -> bool:
    """Whether tensors share memory, and their version counters, as views: they cannot be made anew."""
    return len(part) > 1 and any(each._base is not None for each in part)  # noqa: SLF001 - nobody else tells


def _takes(buffer: torch.Tensor, min_bytes: int) -> bool:
    is_strided = buffer.layout is torch.strided and not buffer.is_nested
    return is_strided and buffer.dim() > 0 and span_of(buffer) >= min_bytes


def _is_plain(buffer: torch.Tensor) -> bool:
    """Whether a buffer can get other memory without anybody's notice, as far as it tells itself."""
    if placeholder_of(buffer) is not None:  # it was plain before
        return True
    if type(buffer) is not torch.Tensor or buffer.layout is not torch.strided or buffer.is_nested:
        return False
    if buffer.requires_grad or buffer.is_quantized or buffer.is_inference():
        return False
    if buffer._is_view() and weakref.getweakrefs(buffer):  # noqa: SLF001 - it cannot be made anew
        return False
    return buffer.is_meta or (has_bytes(buffer) and not (buffer.device.type == "cpu" and buffer.is_shared()))


def _used_by_scripts(model: nn.Module) -> set[torch.Tensor]:
    """Return the buffers that code in C++ uses by itself."""
    scripts = (module for module in model.modules() if isinstance(module, torch.jit.ScriptModule))
    return {buffer for script in scripts for buffer in script.buffers()}


def _sharing_memory(model: nn.Module, names: Container[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Part the model's tensors by the memory that they share; return the parts that have buffers."""
    tensors = [
        each
        for each in (*model.parameters(), *model.buffers())
        if (has_no_values(each) or has_bytes(each)) and each.layout is torch.strided
    ]
    with natively():  # another run may have offloaded some
        parts = [[tensors[number] for number in part] for part in overlapping(tensors)]
    return [part for part in parts if any(each in names for each in part)]


def _group(
    part: list[torch.Tensor],
    model: nn.Module,
    names: Mapping[torch.Tensor, Sequence[str]],
    kept: Container[torch.Tensor],
    pinned: Container[torch.Tensor],
    on_host: Container[torch.Tensor],
) -> Group:
    members = set(part)
    return Group(
        names=[names[each][0] for each in part],
        tensors=list(part),
        modules=[m for m in model.modules() if not members.isdisjoint(m.buffers(recurse=False))],
        is_pinned=any(each in pinned for each in part),
        content=Content.BUFFERS if any(each in kept for each in part) else Content.PASSING_BUFFERS,
        repeated_bytes=sum(map(span_of, part)) - lay_out(("", each) for each in part)[1] if part[1:] else 0,
        is_on_host=any(each in on_host for each in part),
    )


def _say_what_stays(
    large: Iterable[torch.Tensor],
    groups: Sequence[Group],
    names: Mapping[torch.Tensor, Sequence[str]],
    ignored: Container[torch.Tensor],
) -> None:
    """Log which large buffers do not travel though nobody asked for that."""
    travelling = {each for group in groups for each in group.tensors}
    staying = [each for each in large if each not in travelling and each not in ignored]
    if staying:
        some = ", ".join(names[each][0] for each in staying[:_SHOWN])
        log.warning(
            "%d large buffers (%s) stay where the model computes, and are not offloaded: %s%s. Something "
            "else refers to their memory, or uses them where nobody can tell.",
            len(staying),
            format_bytes(sum(map(span_of, staying))),
            some,
            ", ..." if len(staying) > _SHOWN else "",
        )


# ---------------------------------------------------------------------- while they travel


class TravelingBuffers:
    """The buffers of one model: those that travel, and those that were brought to where it computes.

    Args:
        model: whose.
        adopter: that gives them back.
        windows: of the model's modules.
        device: where the model computes.
        placed: which of its modules compute on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        adopter: Adopter,
        windows: ModuleWindows,
        device: torch.device,
        placed: PlacedModules,
    ) -> None:
        self._model = model
        self._adopter = adopter
        self._windows = windows
        self._device = device
        self._placed = placed
        self._moved: list[tuple[torch.Tensor, torch.device]] = []
        self._content: dict[Binding, Content] = {}
        self._modules: dict[Binding, Sequence[nn.Module]] = {}

    def __iter__(self) -> Iterator[Binding]:
        """Go through the bundles of those that travel."""
        return iter(list(self._content))

    def add(self, binding: Binding, group: Group) -> None:
        """Take in what has been adopted.  The group is not kept: nobody would miss a buffer that it holds."""
        self._content[binding] = group.content
        self._modules[binding] = tuple(group.modules)

    def kept(self) -> list[Binding]:
        """Return the bundles that a checkpoint holds."""
        return [binding for binding, content in self._content.items() if content is Content.BUFFERS]

    def forget_replaced(self) -> None:
        """Drop the bytes of those that no module has any more, and nobody else."""
        for binding in self:
            modules = self._modules[binding]
            there = {id(buffer) for module in modules for buffer in module._buffers.values()}  # noqa: SLF001
            if not any(id(tensor) in there for tensor in binding.tensors) and is_deserted(binding):
                self._leave_out(binding)
                self._adopter.forget(binding)

    def release(self, buffers: Iterable[torch.Tensor]) -> None:
        """Make some of them ordinary tensors, where the model computes."""
        wanted = set(buffers)
        for binding in self:
            if not wanted.isdisjoint(binding.tensors):
                self._leave_out(binding)
                self._adopter.restore(binding)
        self.move()

    def move(self) -> None:
        """Bring those that do not travel to where their modules compute; `end` brings them back."""
        on_host = self._placed.tensors_on_host(self._model)
        for _, buffer in ordinary_buffers(self._model):
            device = torch.device("cpu") if buffer in on_host else self._device
            if buffer.device != device:
                self._moved.append((buffer, buffer.device))
                buffer.data = buffer.data.to(device)

    def end(self, ending: RunEnding) -> None:
        """Bring those back that `move` has moved.

        Args:
            ending: that this is a part of.
        """
        for buffer, device in self._moved:
            ending.attempt(functools.partial(_bring_back, buffer, device))
        self._moved.clear()

    def _leave_out(self, binding: Binding) -> None:
        del self._content[binding], self._modules[binding]
        self._windows.leave_out(binding)


def _bring_back(buffer: torch.Tensor, device: torch.device) -> None:
    buffer.data = buffer.data.to(device)
