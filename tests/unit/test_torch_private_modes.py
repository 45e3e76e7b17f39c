"""What the library relies on of PyTorch's private names, of modes, operators, modules and optimizers."""

from __future__ import annotations

import contextlib
import sys
import weakref
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, graph
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from tierstore import torch_private as private
from tierstore.training.optimizers.registered import unhooked_step

# ---------------------------------------------------------------------- modes and transforms


class _Counting(private.TorchDispatchMode):
    """A mode that counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.seen += 1
        return func(*args, **(kwargs or {}))


class _Watching(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_are_a_stack_that_can_be_left() -> None:
    assert private.count_dispatch_modes() == 0
    assert private.current_dispatch_mode() is None
    mode = _Counting()
    with mode:
        assert private.count_dispatch_modes() == 1
        assert private.dispatch_modes() == [mode]
        assert private.current_dispatch_mode() is mode
        with private.leave_dispatch_modes():
            assert private.count_dispatch_modes() == 0
            torch.ones(1)
        assert mode.seen == 0
        torch.ones(1)
        assert mode.seen > 0


def test_no_dispatch_mode_sees_what_is_done_without_dispatch_to_python() -> None:
    kept = torch.ones(1, requires_grad=True) * 1
    with _Counting() as mode:
        before = mode.seen
        with private.DisableTorchDispatch():
            alias = kept.detach()
        assert mode.seen == before
        assert private.current_dispatch_mode() is mode
    alias.add_(1)
    assert kept._version == alias._version == 1


@pytest.mark.parametrize("disabled", [torch.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction])
def test_functions_are_seen_again_for_a_while(
    disabled: type[contextlib.AbstractContextManager[None]],
) -> None:
    with disabled():
        with private.EnableTorchFunction():
            assert private.are_subclasses_seen()
        assert not private.are_subclasses_seen()
    assert private.are_subclasses_seen()


def test_function_modes_are_a_stack_that_can_be_taken_from() -> None:
    assert not private.is_function_mode_on()
    with _Watching() as mode:
        assert private.is_function_mode_on()
        assert private.function_modes() == [mode]
        with torch.DisableTorchFunction():
            assert not private.is_function_mode_on()
            assert private.count_function_modes() == 1
        assert private.pop_function_mode() is mode
        assert private.count_function_modes() == 0
        private.push_function_mode(mode)
        assert private.function_modes() == [mode]


def test_a_device_is_a_function_mode_of_its_own_class() -> None:
    with torch.device("cpu"):
        assert [type(mode) for mode in private.function_modes()] == [private.DeviceContext]


def test_transforms_are_a_stack_that_can_be_left() -> None:
    seen: list[object] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((private.innermost_transform() is not None, private.is_transformed_tensor(x)))
        with private.leave_transforms():
            seen.append(private.innermost_transform())
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    assert seen == [(True, True), None]
    assert private.innermost_transform() is None
    assert not private.is_transformed_tensor(torch.ones(1))


def test_gradients_in_a_batch_are_known() -> None:
    seen: list[bool] = []
    weight = torch.ones(2, requires_grad=True)
    output = weight * 2
    output.register_hook(lambda gradient: seen.append(private.is_legacy_batched_tensor(gradient)))
    torch.autograd.grad(output, weight, torch.eye(2), is_grads_batched=True)
    assert seen == [True]
    assert not private.is_legacy_batched_tensor(torch.ones(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # the first jvp calls it
def test_forward_mode_is_known_and_told_from_a_transform() -> None:
    seen: list[tuple[int, int]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((forward_ad._current_level, private.eager_transforms.JVP_NESTING))
        return x

    look(torch.ones(1))
    with forward_ad.dual_level():
        look(torch.ones(1))
    torch.func.jvp(look, (torch.ones(1),), (torch.ones(1),))
    assert seen == [(-1, 0), (0, 0), (0, 1)]


# ---------------------------------------------------------------------- operators


def test_an_operator_says_what_it_is() -> None:
    add_: Any = torch.ops.aten.add_.Tensor
    assert isinstance(add_, private.OpOverload)
    assert add_.overloadpacket is torch.ops.aten.add_
    assert add_._schema.name == "aten::add_"
    assert add_._schema.is_mutable
    assert [each.name for each in add_._schema.arguments] == ["self", "other", "alpha"]
    schema: Any = add_._schema
    assert schema.arguments[0].alias_info.is_write
    assert [str(each.type) for each in add_._schema.returns] == ["Tensor"]
    assert not torch.ops.aten.add.Tensor._schema.is_mutable


def test_all_operators_have_names() -> None:
    assert {"aten::add.Tensor", "aten::empty.memory_format"} <= set(private.names_of_operators())


def test_an_operator_has_kernels_or_is_made_of_others() -> None:
    for name, is_composite in (("linear", True), ("unsafe_chunk", True), ("mm", False), ("silu", False)):
        assert private.has_kernel(f"aten::{name}", "CompositeImplicitAutograd") is is_composite
        assert private.has_kernel(f"aten::{name}", "CPU") is not is_composite


def test_a_key_that_nobody_uses_lies_above_all_others() -> None:
    key = private.dispatch_key("TESTING_ONLY_GenericMode")
    below = private.dispatch_keys_below(key)
    assert not below.has(key)
    assert below.has(torch.DispatchKey.CPU)
    assert below.has(torch.DispatchKey.AutogradCPU)
    assert not private.is_dispatch_key_included(key)
    private.set_dispatch_key_included(key, True)
    try:
        assert private.is_dispatch_key_included(key)
    finally:
        private.set_dispatch_key_included(key, False)
    assert not private.is_dispatch_key_included(key)


def test_what_is_registered_with_pytorch_can_be_taken_back() -> None:
    library: Any = torch.library.Library("tierstore_pin", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    assert "tierstore_pin::twice" in private.names_of_operators()
    library._destroy()
    assert "tierstore_pin::twice" not in private.names_of_operators()


def test_some_operators_take_numbers_for_tensors() -> None:
    assert private.takes_numbers_as_tensors("add")
    assert not private.takes_numbers_as_tensors("mm")


def test_operators_over_functions_let_keys_fall_through() -> None:
    import torch._higher_order_ops.cond  # it is made with its module

    assert isinstance(private.fallthrough_keys, list)
    assert torch.DispatchKey.BackendSelect in private.fallthrough_keys
    assert callable(private.higher_order_operators["cond"].fallthrough)


def test_autocast_can_be_left() -> None:
    matrix = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (matrix @ matrix).dtype is torch.bfloat16
        with private.DisableAutocast():
            assert (matrix @ matrix).dtype is torch.float32


def test_changes_are_counted_where_a_key_is_not_excluded() -> None:
    tensor = torch.zeros(1)
    with private.ExcludeDispatchKeys(torch.DispatchKey.ADInplaceOrView, True):
        tensor.add_(1)
        assert tensor._version == 0
        with private.ExcludeDispatchKeys(torch.DispatchKey.ADInplaceOrView, False):
            tensor.add_(1)
    assert tensor._version == 1


def test_functions_over_lists_are_chosen_by_lists_of_classes() -> None:
    assert isinstance(private.foreach_types_of_utilities, list)
    assert isinstance(private.foreach_types_of_optimizers, list)
    assert torch.Tensor in private.foreach_types_of_utilities
    assert {torch.Tensor, nn.Parameter} <= set(private.foreach_types_of_optimizers)


def test_on_the_cpu_no_functions_over_lists_are_chosen() -> None:
    assert private.default_to_fused_or_foreach([torch.zeros(1)], differentiable=False) == (False, False)


def test_containers_are_trees() -> None:
    tree = {"a": [1, 2.0], "b": (3,)}
    leaves, spec = private.tree_flatten(tree)
    assert leaves == [1, 2.0, 3]
    assert private.tree_unflatten(leaves, spec) == tree
    assert private.tree_map(lambda each: each + 1, tree) == {"a": [2, 3.0], "b": (4,)}
    assert private.tree_map_only(float, lambda _: None, tree) == {"a": [1, None], "b": (3,)}
    assert private.tree_map.__code__.co_filename == private.pytree.__file__


# ---------------------------------------------------------------------- checkpoints


def _no_contexts() -> tuple[contextlib.nullcontext[None], contextlib.nullcontext[None]]:
    return contextlib.nullcontext(), contextlib.nullcontext()


def test_a_checkpoint_is_begun_and_ended_from_outside() -> None:
    runs: list[bool] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        runs.append(torch.is_grad_enabled())
        return x.exp().exp()

    weight = torch.ones(1, requires_grad=True)
    running: Any = private.begin_checkpoint(run, True, _no_contexts, "default", False, True, weight)
    next(running)
    top = private.top_saved_tensor_hooks(True)
    assert top is not None
    assert top[0].__module__ == checkpoint.__name__
    assert top[0].__qualname__.startswith("_checkpoint_hook.")
    frames = [cell.cell_contents for cell in top[0].__closure__ or ()]
    frame = running.gi_frame.f_locals["new_frame"]
    assert isinstance(frame, private.CheckpointFrame)
    assert any(each is frame for each in frames)
    output = run(weight)
    with pytest.raises(StopIteration):
        next(running)
    output.sum().backward()
    assert len(runs) == 2


def test_a_policy_is_carried_out_by_two_modes() -> None:
    contexts = checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
    caching, cached = contexts
    assert type(caching) is private.CachingDispatchMode
    assert type(cached) is private.CachedDispatchMode
    assert caching.storage is cached.storage


def test_a_composable_checkpoint_has_a_state() -> None:
    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(private.composable_checkpoint.state(model[0])._ac_generator)
            return x * 2

    seen: list[Any] = []
    model = nn.Sequential(Looking())
    private.composable_checkpoint(model[0])
    assert private.COMPOSABLE_STATE in model[0].__dict__
    assert private.COMPOSABLE_STATE not in model.__dict__
    model(torch.ones(1, requires_grad=True))
    assert hasattr(seen[0], "gi_frame")


def test_what_is_saved_on_the_host_is_known_by_its_hook() -> None:
    with graph.save_on_cpu():
        top = private.top_saved_tensor_hooks(True)
    assert top is not None
    assert top[0].__module__ == graph.__name__
    assert top[0].__qualname__.startswith("save_on_cpu.")


# ---------------------------------------------------------------------- modules


def test_norms_with_statistics_have_one_base() -> None:
    norms = (nn.BatchNorm1d, nn.BatchNorm3d, nn.InstanceNorm2d, nn.SyncBatchNorm)
    assert all(issubclass(each, private.NormWithStatistics) for each in norms)
    assert not issubclass(nn.LayerNorm, private.NormWithStatistics)


def test_hooks_of_all_modules_are_seen() -> None:
    register = nn.modules.module
    assert not private.global_forward_hooks
    assert not private.global_forward_pre_hooks
    handles = [
        register.register_module_forward_hook(lambda *_: None),
        register.register_module_forward_pre_hook(lambda *_: None),
    ]
    try:
        assert len(private.global_forward_hooks) == len(private.global_forward_pre_hooks) == 1
    finally:
        for handle in handles:
            handle.remove()


def test_a_module_shows_what_it_has() -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("kept", None)
    module.register_buffer("left_out", torch.ones(1), persistent=False)
    module.register_forward_hook(lambda *_: None)
    prune.identity(module, "weight")
    assert module._parameters["bias"] is module.bias
    assert module._buffers["kept"] is None
    assert module._non_persistent_buffers_set == {"left_out"}
    assert len(module._forward_hooks) == 1
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    assert len(module._backward_hooks) == len(module._backward_pre_hooks) == 1
    assert [each._tensor_name for each in module._forward_pre_hooks.values()] == ["weight"]  # type: ignore[attr-defined]


def test_a_module_that_is_compiled_in_place_says_so() -> None:
    assert nn.Linear(2, 2)._compiled_call_impl is None
    assert "_compiled_call_impl" in nn.Module.compile.__code__.co_names  # calling it would take seconds


def test_a_call_of_a_module_is_a_frame_that_names_it() -> None:
    class Looking(nn.Module):
        def forward(self) -> None:
            frame: FrameType | None = sys._getframe()
            while frame is not None:
                if frame.f_code is nn.Module._call_impl.__code__:
                    seen.append(frame.f_locals["self"])
                frame = frame.f_back

    seen: list[nn.Module] = []
    module = Looking()
    module()
    assert seen == [module]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripts_are_told_from_traced_modules_and_show_what_they_hold() -> None:
    linear = nn.Linear(1, 1)
    script: Any = torch.jit.script(linear)
    traced: Any = torch.jit.trace(linear, torch.ones(1, 1))
    assert isinstance(script, private.RecursiveScriptModule)
    assert not isinstance(traced, private.RecursiveScriptModule)
    assert "__deepcopy__" in dir(private.RecursiveScriptModule)
    held = dict(torch.ParameterDict(script._c).items())  # type: ignore[attr-defined]
    assert held["weight"] is linear.weight
    assert list(torch.ModuleDict(script._c).items()) == []


def test_a_hook_of_a_state_dict_says_how_it_is_called() -> None:
    given: list[int] = []

    def hook(*arguments: object) -> None:
        given.append(len(arguments))

    module = nn.Linear(1, 1)
    module.register_state_dict_post_hook(hook)
    assert hook._from_public_api  # type: ignore[attr-defined]
    module.state_dict()
    assert given == [4]


# ---------------------------------------------------------------------- optimizers and the compiler


def test_hooks_of_a_step_have_an_order() -> None:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    pre = [optimizer.register_step_pre_hook(lambda *_: None) for _ in range(2)]
    post = [optimizer.register_step_post_hook(lambda *_: None) for _ in range(2)]
    optimizer._optimizer_step_pre_hooks.move_to_end(pre[0].id)
    optimizer._optimizer_step_post_hooks.move_to_end(post[1].id, last=False)
    assert list(optimizer._optimizer_step_pre_hooks) == [pre[1].id, pre[0].id]
    assert list(optimizer._optimizer_step_post_hooks) == [post[1].id, post[0].id]
    assert "_optimizer_step_pre_hooks" in vars(optimizer)


def test_a_step_is_known_without_what_calls_its_hooks() -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))])
    step: Any = torch.optim.SGD.step
    assert step.hooked
    assert unhooked_step(torch.optim.SGD) is step.__wrapped__


def test_state_that_is_loaded_is_cast_to_its_parameter() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    groups: list[dict[str, Any]] = [{"params": [0], "fused": None, "capturable": False}]
    dtypes = {
        name: private.process_loaded_state(parameter, torch.ones(1), 0, groups, name).dtype
        for name in ("exp_avg", "step")
    }
    assert dtypes == {"exp_avg": torch.bfloat16, "step": torch.float32}


def test_the_compiler_tells_that_it_begins() -> None:
    def callback(_: object) -> None:
        pass

    callbacks = private.compiler_callbacks()
    callbacks.register_start_callback(callback)
    try:
        assert callback in callbacks.start_callbacks
    finally:
        callbacks.start_callbacks.remove(callback)


def test_a_function_can_be_marked_as_not_to_be_compiled() -> None:
    def function() -> None:
        pass

    assert torch.compiler.disable(function)._torchdynamo_disable
    assert weakref.ref(function)() is function


def test_frames_of_a_function_and_of_what_it_calls_can_be_left_to_python() -> None:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def backend(graph: Any, inputs: object) -> Any:  # noqa: ANN401
        del inputs
        graphs.append(graph)
        return graph

    def compiled(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return outer(x)

    graphs: list[object] = []
    for expected in (1, 0):
        torch._dynamo.reset()
        graphs.clear()
        assert torch.compile(compiled, backend=backend)(torch.ones(1)).tolist() == [3.0]
        assert len(graphs) == expected
        private.set_frame_strategy(outer.__code__, private.SKIP_FRAME_AND_CALLS)
        vars(outer)["_torchdynamo_disable"] = True


# ---------------------------------------------------------------------- profilers


class _Seen(private.TorchDispatchMode):
    """Sees operators."""

    names: list[str]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:  # noqa: ANN401
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_range_is_in_the_trace_and_no_operator_that_modes_see() -> None:
    seen = _Seen()  # type: ignore[no-untyped-call]
    seen.names = []
    with torch.profiler.profile() as profiler, seen, private.RecordedRange("a range"):
        torch.ones(2).add(1)
    assert seen.names
    assert "a range" in [event.name for event in profiler.events()]
    assert not [name for name in seen.names if "profiler" in name]


def test_it_is_known_whether_a_profiler_runs() -> None:
    assert not private.is_profiling()
    for profiler in (torch.profiler.profile, torch.autograd.profiler.profile):
        with profiler():
            assert private.is_profiling()
        assert not private.is_profiling()


# ---------------------------------------------------------------------- modules, and those of frameworks


def test_a_module_s_own_way_of_moving_goes_over_its_tensors() -> None:
    seen: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor

    torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))._apply(note)
    assert torch.Size([3, 2]) in seen
    assert torch.Size([]) in seen  # a buffer


@pytest.mark.parametrize(
    "module", [torch.nn.MultiheadAttention(4, 2), torch.nn.Transformer(4, 2, 1, 1, 4, batch_first=True)]
)
def test_modules_without_a_public_way_of_initial_values_have_one(module: torch.nn.Module) -> None:
    before = [each.clone() for each in module.parameters()]
    vars_of_class: Any = module
    vars_of_class._reset_parameters()
    assert any(not old.equal(new) for old, new in zip(before, module.parameters(), strict=True))


def test_lightning_counts_the_steps_that_it_logs() -> None:
    pl = pytest.importorskip("lightning.pytorch")
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 0


def test_models_of_transformers_say_how_they_begin_and_what_older_files_hold() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.PreTrainedModel
    assert callable(model._init_weights)
    assert callable(model._get_dtype_plan)
    assert model._keys_to_ignore_on_load_unexpected is None


def test_hooks_of_accelerate_stand_on_the_module() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    module: Any = torch.nn.Linear(2, 2)
    hooks.add_hook_to_module(module, hooks.AlignDevicesHook(offload=True))
    assert module._hf_hook.offload
