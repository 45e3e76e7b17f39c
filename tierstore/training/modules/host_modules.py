r"""Which modules of a model compute on the host, beside a device: patterns over names, and what follows.

1. A module computes where the first pattern that matches its name says; else where the nearest module around
   it does that one names; else on the device.
2. A module that no pattern names, all of whose children compute on the host, does so, too: what it has
   itself, such as the weight that it hands to them, stays where they use it.
3. What is shared is on one side: a module with two names, a parameter or buffer of two modules, and tensors
   that have memory in common.  Anything else is refused by name.
4. A list of parameters is no module that computes: what it has belongs to the module around it.
5. Values cross where one side calls a module of the other: as the model is made, a module that computes
   elsewhere than the module around it (`PlacedModules.borders`), and whatever a forward calls otherwise.

Patterns are those of swap marks (`tierstore.training.activations.config.patterns`), read from the model down.
Knows nothing of stores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tierstore.config.checks import near
from tierstore.errors import UsageError
from tierstore.planning.homes import CPU, DEVICE
from tierstore.quoting import listed, quoted
from tierstore.torch_private import RecursiveScriptModule
from tierstore.training.bundles.placeholders import has_no_values
from tierstore.training.modules.forward_needs import has_forward
from tierstore.training.modules.plain_attributes import tensors_kept_by

log = logging.getLogger("tierstore")

Matches = Callable[[tuple[str, ...]], bool]
"""Says whether a pattern means the module at a path of names."""

_BACKENDS = {"cpu": "GPU", "cuda": "GPU", "npu": "Ascend"}
"""What the log line calls a device: an emulated one is of type ``cpu``."""


@dataclass(frozen=True)
class PlacedModules:
    """Where each module of a model computes.

    Attributes:
        devices: ``"cpu"`` or ``"device"``, by module.
        named: the names of those that a pattern names, in the order of the model.
    """

    devices: Mapping[nn.Module, str] = field(default_factory=dict)
    named: Sequence[str] = ()

    def is_on_host(self, module: nn.Module) -> bool:
        """Whether a module computes on the host."""
        return self.devices.get(module) == CPU

    @property
    def are_any(self) -> bool:
        """Whether one does."""
        return CPU in self.devices.values()

    def sides(self, model: nn.Module) -> dict[nn.Module, str]:
        """Return the modules that can be called, with their devices; none if none is on the host."""
        return {each: self.devices[each] for each in model.modules() if self.are_any and has_forward(each)}

    def borders(self, model: nn.Module) -> dict[nn.Module, str]:
        """Return the modules in one that computes elsewhere, each with the device that it computes on."""
        found: dict[nn.Module, str] = {}
        stack = [(model, DEVICE)] if self.are_any else []
        seen = set(stack)
        while stack:
            module, around = stack.pop()
            own = around
            if has_forward(module):
                own = self.devices[module]
                if own != around:
                    found[module] = own
            inner = [(child, own) for child in module.children() if (child, own) not in seen]
            seen.update(inner)
            stack += inner
        return found

    def tensors_on_host(self, model: nn.Module) -> set[torch.Tensor]:
        """Return the parameters and buffers that modules on the host use."""
        if not self.are_any:
            return set()
        return {
            tensor
            for _, module, user in _with_users(model, "", model)
            if self.is_on_host(user)
            for _, tensor in _direct_tensors(module)
        }

    def require_one_side(self, model: nn.Module) -> None:
        """Make sure that nothing is used on both sides.  While all of it are ordinary tensors.

        Raises:
            UsageError: a tensor is, or has memory in common with one of the other side.
        """
        users: dict[torch.Tensor, tuple[str, str]] = {}
        for name, module, user in _with_users(model, "", model):
            device = self.devices[user]
            tensors = list(_direct_tensors(module))
            if tensors and self.devices[module] != device:
                raise UsageError(
                    f"placement: {name!r} is a {type(module).__name__}, and what it has is used by the "
                    f"module around it, which computes on {quoted(device)}: place that one.",
                    key=name,
                )
            for own, tensor in tensors:
                full = f"{name}.{own}" if name else own
                former, where = users.setdefault(tensor, (full, device))
                if where != device:
                    raise _torn(f"{former!r} is also {full!r}", former, where, full, device)
        _require_memory_of_one_side(users)


def _torn(what: str, one: str, its_device: str, other: str, other_device: str) -> UsageError:
    return UsageError(
        f"placement: {what}: one computes on {quoted(its_device)} ({one.rpartition('.')[0]!r}) and one on "
        f"{quoted(other_device)} ({other.rpartition('.')[0]!r}). Place both alike.",
        key=one,
    )


def _require_memory_of_one_side(users: Mapping[torch.Tensor, tuple[str, str]]) -> None:
    """Raise if tensors of both sides are in one memory: it cannot be on two devices."""
    of_storage: dict[int, tuple[str, str]] = {}
    for tensor, (name, device) in users.items():
        if tensor.layout is not torch.strided or has_no_values(tensor) or not tensor.numel():
            continue
        storage = tensor.untyped_storage()._cdata  # noqa: SLF001 - there is no other way to tell storages
        former, where = of_storage.setdefault(storage, (name, device))
        if where != device:
            raise _torn(f"{former!r} and {name!r} are in one memory", former, where, name, device)


def _direct_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _with_users(
    module: nn.Module, name: str, user: nn.Module, *, is_called: bool = True
) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield every module with its name and the module that uses what it has: itself, if somebody calls it."""
    user = module if is_called and has_forward(module) else user
    yield name, module, user
    for own, child in module.named_children():
        full = f"{name}.{own}" if name else own
        yield from _with_users(child, full, user, is_called=not _reads(module, child))


def _reads(module: nn.Module, child: nn.Module) -> bool:
    """Whether a module of PyTorch computes with what a child has and never calls it: no value would cross."""
    if not isinstance(module, nn.MultiheadAttention) or child is not module.out_proj:
        return False
    return type(module).forward is nn.MultiheadAttention.forward


# ---------------------------------------------------------------------- patterns


def place_modules(model: nn.Module, patterns: Mapping[str, tuple[Matches, str]]) -> PlacedModules:
    r"""Return where each module computes; log patterns that match nothing, and which of several counts.

    Args:
        model: whose modules.
        patterns: by text, what each matches and the device that it says, in the order in which they count.

    Raises:
        UsageError: a module has two names, with another device under each; or what is to be on the host is a
            script of ``torch.jit``.
    """
    if not patterns:
        return PlacedModules()
    placing = _PatternReader(patterns)
    devices: dict[nn.Module, str] = {}
    names: dict[nn.Module, str] = {}
    for name, module, own, around in placing.walk(model):
        device = own or around or DEVICE
        former = devices.setdefault(module, device)
        if former != device:
            raise UsageError(
                f"placement: {names[module]!r} is also {name!r}: it would compute on {quoted(former)} and on "
                f"{quoted(device)}. Place both alike.",
                key=name,
            )
        names.setdefault(module, name)
    _follow_children(model, devices, placing.chosen)
    for module, device in devices.items():
        if device == CPU and isinstance(module, RecursiveScriptModule):
            raise UsageError(
                f"placement: {names[module]!r} is a script of torch.jit, which takes no hooks: nobody can "
                "bring it its inputs. Place the module that it was made of.",
                key=names[module],
            )
    placing.say([*names.values()])
    return PlacedModules(devices, [names[module] for module in names if module in placing.chosen])


class _PatternReader:
    """What patterns say of one model.

    Attributes:
        chosen: the modules that one names.
    """

    def __init__(self, patterns: Mapping[str, tuple[Matches, str]]) -> None:
        self._patterns = patterns
        self._idle = dict.fromkeys(patterns)
        self._overlaps: dict[str, list[str]] = {}
        self.chosen: dict[nn.Module, str] = {}

    def walk(self, model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None, str | None]]:
        """Yield each module under each of its names, what is said of it, and of the nearest around it."""
        stack: list[tuple[tuple[str, ...], nn.Module, str | None]] = [((), model, None)]
        while stack:
            path, module, around = stack.pop()
            own = self._device_of(path)
            if own is not None:
                self.chosen.setdefault(module, own)
            yield ".".join(path), module, own, around
            children = [((*path, name), child, own or around) for name, child in _children(module)]
            stack += reversed(children)

    def _device_of(self, path: tuple[str, ...]) -> str | None:
        found = [text for text, (matches, _) in self._patterns.items() if path and matches(path)]
        for text in found:
            self._idle.pop(text, None)
        if len(found) > 1:
            self._overlaps.setdefault(".".join(path), found)
        return self._patterns[found[0]][1] if found else None

    def say(self, names: Sequence[str]) -> None:
        """Log which patterns match nothing, and which of several counts."""
        for text in self._idle:
            meant = near(text.replace("\\.", "."), names)
            hint = f"; did you mean '{meant[0]}'?" if meant else ""
            log.warning("placement: '%s' matches no module%s", text, hint)
        for name, texts in self._overlaps.items():
            told = " and ".join(f"'{text}' ({self._patterns[text][1]})" for text in texts)
            log.info("placement: '%s' matches %s; the first one wins", name, told)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children of a module under all of their names."""
    return [(name, child) for name, child in module._modules.items() if child is not None]  # noqa: SLF001


def _follow_children(
    model: nn.Module, devices: dict[nn.Module, str], chosen: Mapping[nn.Module, str]
) -> None:
    """Let modules that nobody names be on the host if all that they are made of is."""
    for module in reversed(list(model.modules())):  # those inside come after those around
        if module in chosen or devices[module] == CPU:
            continue
        children = [child for child in module.children() if not _is_list_of_parameters(child)]
        if children and all(devices[child] == CPU for child in children):
            devices[module] = CPU
            for child in module.children():
                if _is_list_of_parameters(child) and child not in chosen:
                    devices[child] = CPU


def _is_list_of_parameters(module: nn.Module) -> bool:
    return isinstance(module, nn.ParameterList | nn.ParameterDict)


# ---------------------------------------------------------------------- what is said


def say_placed(model: nn.Module, placed: PlacedModules, device: torch.device) -> None:
    """Log each module that a pattern puts on the host, as the original system does; warn of plain attributes.

    Args:
        model: whose modules.
        placed: where they compute.
        device: that all others compute on.
    """
    backend = _BACKENDS.get(device.type, device.type.upper())
    chosen = set(placed.named)
    for number, (name, module) in enumerate(model.named_modules()):
        if name in chosen and placed.is_on_host(module):
            log.info(
                "primitive target does not match backend: %s, primitive_target: CPU, node name: %s",
                backend,
                _node(name, module, number),
            )

    for name, module in model.named_modules():
        kept = [own for own, each in tensors_kept_by(module) if each.device.type == device.type != CPU]
        if kept and placed.is_on_host(module):
            log.warning(
                "placement: '%s' computes on the host, and keeps %s on %s in plain attributes, which nobody "
                "moves: register them as buffers, or give them to it as arguments",
                *(name, listed(kept, show=str), device.type),
            )


def _node(name: str, module: nn.Module, number: int) -> str:
    """Return what the original calls a node of its graph: its scope, its kind and its number."""
    scope = name.split(".")[:-1]
    return "/".join(["Default", *scope, f"{type(module).__name__}-op{number}"])
