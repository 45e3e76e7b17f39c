"""What of a model and its optimizers can be offloaded; whatever cannot is refused by its name."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.nn.table_weight import TableWeight
from tierstore.torch_private import RecursiveScriptModule, is_traceable_wrapper_subclass
from tierstore.training.autograd.shared_memory import require_sole_reference
from tierstore.training.bundles.placeholders import placeholder_of
from tierstore.training.faults import guard
from tierstore.training.modules import replicas


def check_model(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    has_weights: bool,
    ignored: Container[torch.Tensor] = (),
    sharded: Container[torch.Tensor] = (),
) -> None:
    """Raise if something cannot be offloaded.  What is ignored has to have values, and no more.

    Args:
        model: that is to be.
        optimizers: that train it.
        has_weights: whether values come from elsewhere.
        ignored: parameters that stay ordinary.
        sharded: those whose parts are known to be taken over (`tierstore.training.sharding`).

    Raises:
        UsageError: it names what, and says why.
    """
    for name, module in model.named_modules():
        replicas.refuse(module, what := f"the module {name!r}" if name else "the model")
        _refuse_moved_by_accelerate(module, what)
    for name, parameter in model.named_parameters():
        if parameter in ignored:
            reason = None if has_weights else _why_no_values(parameter)
        else:
            reason = _why_not(parameter, has_weights=has_weights, is_taken_over=parameter in sharded)
        if reason is not None:
            raise UsageError(f"the parameter {name!r} cannot be offloaded: {reason}.", key=name)
    _check_scripts(model, ignored)
    for name, buffer in model.named_buffers():
        if not has_weights and (reason := _why_no_values(buffer)) is not None:
            raise UsageError(f"the buffer {name!r} has no values: {reason}.", key=name)
    require_sole_reference(model, ignored)
    for optimizer in optimizers:
        _refuse_other_runs(optimizer)
    refuse_outgrown_state([model], optimizers)


def refuse_outgrown_state(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers of PyTorch's whose parameters were resized or cast after they had stepped.

    Their next step would raise, or write beyond what their state holds (fused ones do); and none of what it
    says names the parameter.

    Args:
        models: that they train.
        optimizers: of any kind; others than PyTorch's may keep state of another form or type.

    Raises:
        UsageError: it names a parameter, and says what to do.
    """
    names = {each: name for model in models for name, each in model.named_parameters()}
    for optimizer in optimizers:
        if type(optimizer) not in _ALIKE_STATE:
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {}) if parameter in names else {}
                for key, each in state.items():
                    if _is_outgrown(key, each, parameter, is_fused=bool(group.get("fused"))):
                        raise UsageError(
                            f"{type(optimizer).__name__} keeps {key!r} of {tuple(each.shape)} in "
                            f"{each.dtype} for the parameter {names[parameter]!r}, which is of "
                            f"{tuple(parameter.shape)} in {parameter.dtype} by now: the model was resized or "
                            "cast after the optimizer had stepped. Do so before, or make the optimizer anew "
                            "of model.parameters(); of a Trainer: trainer.optimizer = None before train().",
                            key=names[parameter],
                        )


def _is_outgrown(key: object, state: object, parameter: torch.Tensor, *, is_fused: bool) -> bool:
    """Whether a step of an optimizer with state like its parameters could not be made."""
    if not isinstance(state, torch.Tensor) or not state.dim():
        return False
    takes_one_type = is_fused or key == "exp_avg"
    return state.shape != parameter.shape or (takes_one_type and state.dtype != parameter.dtype)


_ALIKE_STATE = frozenset(
    {
        *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.SGD, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad),
        *(torch.optim.ASGD, torch.optim.Adadelta),
    }
)
"""Optimizers that keep state of the shape of their parameters."""


def _refuse_moved_by_accelerate(module: nn.Module, what: str) -> None:
    """Refuse a module whose parameters accelerate brings and takes away in each call (`dispatch_model`)."""
    hook = vars(module).get("_hf_hook")
    if any(getattr(each, "offload", False) for each in (hook, *getattr(hook, "hooks", ()))):
        raise UsageError(
            f"{what} has hooks of accelerate that bring its parameters and take them away in each call, as "
            "device_map=... and cpu_offload(...) make them. Load the model without device_map, or call "
            "accelerate.hooks.remove_hook_from_submodules(model) first."
        )


def _refuse_other_runs(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of parameters that another run has: its step would be made by both."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (guarded_tensor := guard.guarded_tensor_of(parameter)) is not None:
                raise UsageError(
                    f"{type(optimizer).__name__} also trains {guarded_tensor.place.name!r}, which another "
                    "run has offloaded: both would step it. Give each run an optimizer of its own, or "
                    "offload one model that holds both.",
                    key=guarded_tensor.binding.key,
                )


_QUANTISERS = ("bitsandbytes", "torchao")


def _quantised(parameter: nn.Parameter) -> str:
    kind = type(parameter)
    return (
        f"it is a {kind.__name__} of {kind.__module__.partition('.')[0]}: quantised, and of no use without "
        "the scales that it keeps beside its bytes. Offload the model as it was before it was quantised, in "
        "bfloat16, or leave these parameters on the device with ignored=[...]"
    )


def _why_no_values(tensor: torch.Tensor) -> str | None:
    is_released = isinstance(tensor, TableWeight) and tensor.is_released
    if is_released or placeholder_of(tensor) is not None:
        return (
            "it was released when a former run was closed, and has no values; go on from the checkpoint of "
            "that run with durable=True and its offload_path, pass weights=..., or give it values with "
            "p.data = values"
        )
    return "it is on the meta device and has no values; pass weights=..." if tensor.is_meta else None


def _check_scripts(model: nn.Module, ignored: Container[torch.Tensor]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, RecursiveScriptModule) and any(p not in ignored for p in module.parameters()):
            raise UsageError(
                f"the module {name!r} is a script of torch.jit, which takes no hooks: nobody can tell when "
                "it is run. Offload the module that it was made of, make it with torch.jit.trace, or leave "
                "it out with ignored=[...].",
                key=name,
            )


def _why_not(parameter: nn.Parameter, *, has_weights: bool, is_taken_over: bool) -> str | None:
    is_lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
    is_wrapper = not is_taken_over and bool(is_traceable_wrapper_subclass(parameter))
    reasons = {
        "it is offloaded already; close that run first": guard.guarded_tensor_of(parameter) is not None,
        "it has no shape yet; run the model once before": is_lazy,
        _quantised(parameter): type(parameter).__module__.partition(".")[0] in _QUANTISERS,
        f"it is a {type(parameter).__name__}, a wrapper without plain bytes": is_wrapper,
        f"it is sparse ({parameter.layout})": parameter.layout is not torch.strided,
        f"it is quantised ({parameter.dtype})": parameter.is_quantized,
        "it was made under torch.inference_mode(), and nobody can tell when it is written to; make the model "
        "outside, or under torch.no_grad()": not is_lazy and parameter.is_inference(),
    }
    found = next((reason for reason, applies in reasons.items() if applies), None)
    return found if found is not None or has_weights or is_lazy else _why_no_values(parameter)
