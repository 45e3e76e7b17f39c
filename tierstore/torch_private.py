"""Private names of PyTorch: all that the library uses, each with what breaks without it.

PyTorch promises nothing of these.  ``tests/unit/test_torch_private.py`` and ``test_torch_private_modes.py``
have tests for each of them, which say what the library relies on: run them first with a new version.

1. A private function, class or object of a module of PyTorch is imported here and nowhere else, under a name
   of ours.  The comment above it says what breaks without it.  Where PyTorch has a public name for the same
   thing, that is used, and nothing stands here.
2. A private attribute of PyTorch's objects is used where it is needed, as that may be at each operator, and
   stands in the list below.
3. Names of operators (``aten::_to_copy``) are no private names: graphs that are exported have them.
4. This module imports nothing of ours, and nothing that takes long: what does is imported by a function.

For none of the attributes there is a public alternative, unless the list names one that falls short.

- ``_ac_generator``: what composable checkpoints have begun is not found after an interrupt: hooks of saved
  tensors stay in force. In: abandoned_checkpoints.
- ``_base``: views are taken for tensors with memory of their own. In: adopter, buffers,
  recomputed_inputs, shared_memory.
- ``_all_gather_comm``: as ``fsdp_own_gather``. In: shared_collectives.
- ``_apply``: states of metrics, which are no buffers, stay on the host beside an accelerator; ``to`` would
  bring all parameters. In: lightning.
- ``_backward_hooks``: a user's hook would see a copy of the model that runs once; one that was on a tensor
  without values is not called when it has some. In: tensor_slots, twin.
- ``_backward_pre_hooks``: the same. In: twin.
- ``_batches_that_stepped``: of Lightning's loops: the step that loggers are told a value of. In:
  lightning.
- ``_buffers``: a recomputed forward finds changed buffers; ``named_buffers`` leaves out those that are
  ``None``. In: buffers, forward_snapshot.
- ``_c``: scripts hold parameters that nobody knows of. In: torchscript.
- ``_call_impl``: a call of a module that an interrupt has ended is not told from one that runs: windows stay
  open. In: crossings, first_call, hooks, neighbours.
- ``_cdata``: a storage has no identity: who shares memory is not known. In: binding, bindings, gradient,
  guarded_classes, guarded_tensors, host_modules, layout, lease_storages, link, memory_meters, memory_parts,
  offloaded_storage, poisons, reclaimed_tensors, rows_memory, shared_memory, state, state_dict_entries,
  state_dicts.
- ``_compiled_call_impl``: a copy of a compiled module runs, where nothing should be foreseen. In: twin.
- ``_current_level``: forward-mode derivatives are recomputed in another order. In: forward_conditions.
- ``_ddp_params_and_buffers_to_ignore``: a wrapper sends all rows of tables. In: replicas.
- ``_destroy``: subclasses made from ``empty`` fail while operators are observed. In: operator_observers.
- ``_forward_hooks``: a user's hook may write weights that count as clean. In: crossings, neighbours, twin,
  unseen_writes.
- ``_forward_pre_hooks``: the same; and weights that hooks make anew are taken for aliases. In: neighbours,
  shared_memory, twin, unseen_writes.
- ``_from_public_api``: a hook of ``state_dict`` is called with other arguments. In: state_dicts.
- ``_fsdp_param_group``: as ``_fsdp_param_groups``, before PyTorch 2.12. In: found.
- ``_fsdp_param_groups``: nobody knows which parameters FSDP gathers together. In: found.
- ``_get_backend``: a group of ours waits half an hour for a process that has ended, whatever the program's
  group does. In: row_exchange.
- ``_get_fsdp_state``: as ``_fsdp_param_groups``. In: found, shared_collectives.
- ``_get_dtype_plan``: of transformers' models: which parameters of a model of half precision keep 32 bits.
  In: transformers_models.
- ``_hf_hook``: of accelerate's: modules whose parameters its hooks bring and take away train on nothing. In:
  offloadable.
- ``_indices``: sparse gradients have no size; ``indices`` is refused before they are coalesced. In:
  device_caches, gradient, lookup, memory, sgd, sharded_gradients, table_weight, touched_rows.
- ``_init_weights``: of transformers' models: nobody knows the initial values of one module of them. In:
  transformers_models.
- ``_is_param``: a guarded parameter of a user's class is no ``nn.Parameter``. In: guarded_classes,
  state_dict_entries.
- ``_is_view``: a buffer that cannot be made anew is let go of. In: buffers.
- ``_is_zerotensor``: zeros of forward mode are asked for bytes, and raise. In: operators.
- ``_join_config``: inside of ``Join``, lookups wait for a process that has no more batches. In:
  sharded_gradients.
- ``_keys_to_ignore_on_load_unexpected``: of transformers' models: what they leave out of older files is
  refused. In: transformers_models.
- ``_local_tensor``: bytes of a sharded tensor do not come and go; ``to_local`` makes another tensor. In:
  tensor_slots.
- ``_non_persistent_buffers_set``: checkpoints hold buffers that a state dict leaves out; the keys of
  ``state_dict`` would tell, and run everybody's hooks. In: tensor_names.
- ``_optimizer_step_post_hooks``: users' hooks after a step see gradients that are away. In: step_hooks,
  steps.
- ``_optimizer_step_pre_hooks``: users' hooks before a step see groups that are emptied, and what only shows
  an optimizer is taken for one. In: given, step_hooks, steps.
- ``_parameters``: weights that ``functional_call`` lends are recomputed from the model's;
  ``named_parameters`` leaves out what is no parameter. In: forward_snapshot.
- ``_post_accumulate_grad_hooks``: a user's hook comes after a step in backward; else as ``_backward_hooks``.
  In: in_backward, tensor_slots.
- ``_raw_saved_``: what graphs hold of a tensor is not named in errors; the attributes begin so. In:
  shared_memory.
- ``_reduce_scatter_comm``: as ``fsdp_own_reduction``. In: shared_collectives.
- ``_reset_parameters``: ``nn.MultiheadAttention`` and ``nn.Transformer`` have no initial values. In:
  initial_values.
- ``_schema``: nobody knows what an operator writes. In: looks, memory, modes, operator_names,
  operator_observers, operators, recorded_ops, unseen_writes.
- ``_sequence_nr``: nothing is fetched ahead of backward: it waits. In: node_triggers.
- ``_tensor_name``: weights under ``prune`` are taken for aliases. In: shared_memory.
- ``_torchdynamo_disable``: the compiler traces the library's functions; ``torch.compiler.disable`` would
  import the compiler, and add a call to each. In: signals, uncompiled.
- ``_timeout``: as ``_get_backend``. In: row_exchange.
- ``_use_count``: a tensor that a graph has saved counts as nobody's; guards refuse it, so that
  ``swap_tensors`` takes no guarded tensor apart. In: guarded_classes, shared_memory, without_values.
- ``_values``: as ``_indices``. In: device_caches, gradient, lookup, memory, sgd, sharded_gradients,
  table_weight, touched_rows.
- ``_version``: backward goes through changed weights in silence. In: activation_store, doubles, failed_step,
  foreseen, forward_snapshot, kept_outputs, modes, recomputed_operators, saved_tensors, sharded_gradients,
  state_dict_entries, whole_steps.

Some hooks and frames of PyTorch are known by names inside of its functions: ``save_on_cpu``'s hooks
(``saved_tensors``), the local ``new_frame`` of a checkpoint's generator (``abandoned_checkpoints``), and what
``Optimizer.step`` is put into (``hooked`` and ``__wrapped__``, in ``registered``).  Hooks and frames of
``torch.utils.checkpoint`` are known by the module that they are of, as is who may call between them
(``saved_tensor_hooks``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, MutableMapping
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, Protocol

import torch
from torch import overrides
from torch._functorch import eager_transforms as _eager_transforms
from torch._functorch import pyfunctorch as _pyfunctorch

# Operators are not told from other functions.  No public alternative: ``torch.ops`` has instances only.
from torch._ops import OpOverload
from torch.autograd import profiler as _profiler
from torch.distributed._composable.checkpoint_activation import checkpoint as _composable_checkpoint
from torch.distributed._composable.contract import STATE_KEY as _STATE_KEY
from torch.jit import _script
from torch.nn.modules import batchnorm
from torch.nn.modules import module as _modules
from torch.utils import _device, _foreach_utils, _python_dispatch, _pytree, checkpoint

__all__ = [
    "COMPOSABLE_STATE",
    "SKIP_FRAME_AND_CALLS",
    "CachedDispatchMode",
    "CachingDispatchMode",
    "CheckpointFrame",
    "CompilerCallbacks",
    "DeviceContext",
    "DisableAutocast",
    "DisableTorchDispatch",
    "EnableTorchFunction",
    "ExcludeDispatchKeys",
    "NormWithStatistics",
    "OpOverload",
    "RecordedRange",
    "RecursiveScriptModule",
    "TensorBase",
    "TorchDispatchMode",
    "are_saved_tensor_hooks_allowed",
    "are_subclasses_seen",
    "begin_checkpoint",
    "call_after_backward",
    "compiler_callbacks",
    "composable_checkpoint",
    "count_dispatch_modes",
    "count_function_modes",
    "current_autograd_node",
    "current_dispatch_mode",
    "current_graph_task",
    "default_to_fused_or_foreach",
    "disabled_torch_function",
    "dispatch_key",
    "dispatch_keys_below",
    "dispatch_modes",
    "eager_transforms",
    "fallthrough_keys",
    "foreach_types_of_optimizers",
    "foreach_types_of_utilities",
    "fsdp_own_gather",
    "fsdp_own_reduction",
    "fsdp_param",
    "function_modes",
    "global_forward_hooks",
    "global_forward_pre_hooks",
    "has_kernel",
    "higher_order_operators",
    "innermost_transform",
    "is_dispatch_key_included",
    "is_function_mode_on",
    "is_functional_tensor",
    "is_legacy_batched_tensor",
    "is_profiling",
    "is_traceable_wrapper_subclass",
    "is_transformed_tensor",
    "leave_dispatch_modes",
    "leave_transforms",
    "make_subclass",
    "make_wrapper_subclass",
    "names_of_operators",
    "negative_view",
    "next_sequence_number",
    "pop_function_mode",
    "pop_saved_tensor_hooks",
    "preserve_versions",
    "process_loaded_state",
    "push_function_mode",
    "push_saved_tensor_hooks",
    "pytree",
    "set_dispatch_key_included",
    "set_frame_strategy",
    "set_versions",
    "storage_of_weak_pointer",
    "storage_use_count",
    "takes_numbers_as_tensors",
    "tensor_use_count",
    "throw_on_write",
    "top_saved_tensor_hooks",
    "tree_flatten",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "version_of",
    "warn_on_write",
]

_C: Any = torch._C
_eval_frame: Any = torch._C._dynamo.eval_frame  # C++: the compiler itself is not imported
_autograd: Any = torch._C._autograd
_functorch: Any = torch._C._functorch
_ops: Any = torch._ops
_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are

_Hook = Callable[[Any], Any]


class CompilerCallbacks(Protocol):
    """What is told when ``torch.compile`` begins to compile."""

    start_callbacks: list[Callable[[Any], None]]

    def register_start_callback(self, callback: Callable[[Any], None]) -> Callable[[Any], None]:
        """Let ``callback`` be told."""
        ...


# ---------------------------------------------------------------------- tensors and storages

# Bytes are given back while others use them, or never.  No public alternative.
storage_use_count: Callable[[int], int] = _C._storage_Use_Count
# Bytes that a graph has saved are given back before backward.  No public alternative.
tensor_use_count: Callable[[torch.Tensor], int] = _Tensor._use_count
# A guarded tensor asks its guard for its version.  No public alternative: the property has no other name.
version_of: Callable[[torch.Tensor], int] = _Tensor._version.__get__
# Storages that are known weakly are not found again, so bytes are read twice.  No public alternative.
storage_of_weak_pointer: Callable[[int], torch.UntypedStorage | None]
storage_of_weak_pointer = torch.UntypedStorage._new_with_weak_ptr
# What C++ does with a tensor is mixed up with what is put over it in Python.  No public alternative:
# ``torch.Tensor``'s own members are those in Python.
TensorBase: Any = _C.TensorBase
# Bytes that are away are read as NaN, in place of an error.  No public alternative.
throw_on_write: Callable[[torch.Tensor], object] | None = getattr(_C, "_set_throw_on_mutable_data_ptr", None)
# As `throw_on_write`: where the flag for reads lies is found between the two.  No public alternative.
warn_on_write: Callable[[torch.Tensor], object] | None
warn_on_write = getattr(_C, "_set_warn_deprecated_on_mutable_data_ptr", None)
# A view has the wrong sign.  No public alternative: ``torch.neg`` computes.
negative_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
# Tensors under ``functionalize`` are asked for bytes, and raise.  No public alternative.
is_functional_tensor: Callable[[torch.Tensor], bool] = torch._is_functional_tensor
# Subclasses that wrap others are not refused, or not taken apart into what has bytes.  No public alternative.
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
# An alias of a parameter has not its class.  No public alternative: ``as_subclass`` keeps the graph.
make_subclass: Callable[..., torch.Tensor] = torch.Tensor._make_subclass
# What stands in for a saved tensor needs its bytes.  No public alternative.
make_wrapper_subclass: Callable[..., torch.Tensor] = torch.Tensor._make_wrapper_subclass
# Uses of what stands in for a saved tensor come back as its class.  No public alternative.
disabled_torch_function: Any = _C._disabled_torch_function_impl

# A sharded tensor that is treated as what it is, as by its own dispatch, asks its guard without end.  No
# public alternative.
are_subclasses_seen: Callable[[], bool] = _C._is_torch_function_enabled

# ---------------------------------------------------------------------- autograd

# Nothing is packed that a graph saves.  ``torch.autograd.graph.saved_tensors_hooks`` is no alternative: it
# ends what came last, and others may have come since.
push_saved_tensor_hooks: Callable[[_Hook, _Hook], None] = _autograd._push_saved_tensors_default_hooks
# As `push_saved_tensor_hooks`.
pop_saved_tensor_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
# Hooks of the program that were in force before see nothing.  No public alternative.
top_saved_tensor_hooks: Callable[[bool], tuple[_Hook, _Hook] | None]
top_saved_tensor_hooks = _autograd._top_saved_tensors_default_hooks
# Hooks are pushed where PyTorch has forbidden them, and raise.  No public alternative.
are_saved_tensor_hooks_allowed: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled
# Nobody knows which backward pass a hook is called in, or whether it is in one.  No public alternative.
current_graph_task: Callable[[], int] = _C._current_graph_task_id
# Nobody knows whether a node is done, so gradients are taken too early.  No public alternative.
current_autograd_node: Callable[[], object] = _C._current_autograd_node
# Gradients and activations stay on the device after backward.  No public alternative.
call_after_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
# Nothing is fetched ahead of backward: it waits.  No public alternative: ``Node`` has no number, only names.
next_sequence_number: Callable[[], int] = _autograd._get_sequence_nr
# Backward goes on through weights that were changed, or refuses what was not.  ``increment_version`` is no
# alternative: it sets no version back.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None]
set_versions = _autograd._unsafe_set_version_counter
# Buffers that are put back before a forward runs again count as changed.  No public alternative.
preserve_versions: Callable[[tuple[torch.Tensor, ...]], AbstractContextManager[None]]
preserve_versions = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]

# ---------------------------------------------------------------------- modes and transforms

# A mode of ours has no base.  No public alternative: that of ``torch.overrides`` sees no operators.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
# Modes of the program take the library's own work for the model's.  No public alternative.
count_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
# As `count_dispatch_modes`: a mode that only counts bytes is not told from one that changes tensors.
dispatch_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
# A mode of ours that ends below somebody's takes theirs away.  No public alternative.
current_dispatch_mode: Callable[[], object | None] = _python_dispatch._get_current_dispatch_mode
# As `count_dispatch_modes`.
leave_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _python_dispatch._disable_current_modes
# As `leave_dispatch_modes`, which takes 6 us more for each tensor that is kept under a mode of ours.
DisableTorchDispatch: Callable[[], AbstractContextManager[Any]] = _C._DisableTorchDispatch
# Signal handlers that come where PyTorch has switched subclasses off find offloaded parameters without bytes.
EnableTorchFunction: Callable[[], AbstractContextManager[Any]] = _C._EnableTorchFunction
# As `count_dispatch_modes`, for ``TorchFunctionMode``.
count_function_modes: Callable[[], int] = _C._len_torch_function_stack
# As `count_function_modes`: ``with torch.device(...)`` is taken for a mode that changes tensors.
function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
# As `function_modes`.  No public alternative: ``torch.device`` is no class of modes.
DeviceContext = _device.DeviceContext
# Modes of the program see looks of the library.  `count_function_modes` is no alternative: it counts those
# that are disabled, too.
is_function_mode_on: Callable[[], bool] = _C._is_torch_function_mode_enabled
# As `count_function_modes`.  ``torch.DisableTorchFunction`` is no alternative: guards would see nothing then.
pop_function_mode: Callable[[], object] = _C._pop_torch_function_stack
# As `pop_function_mode`.
push_function_mode: Callable[[object], None] = _C._push_on_torch_function_stack
# Transforms of ``torch.func`` take the library's own work for the model's.  No public alternative.
innermost_transform: Callable[[], object | None] = _functorch.peek_interpreter_stack
# As `innermost_transform`.
leave_transforms: Callable[[], AbstractContextManager[Any]] = _pyfunctorch.temporarily_clear_interpreter_stack
# ``torch.func.jvp`` is refused inside of a forward.  No public alternative.  (A module: its number changes.)
eager_transforms = _eager_transforms
# A tensor that a transform has wrapped is asked for a storage, and raises.  No public alternative.
is_transformed_tensor: Callable[[torch.Tensor], bool] = _functorch.is_functorch_wrapped_tensor
# As `is_transformed_tensor`, under ``is_grads_batched``.
is_legacy_batched_tensor: Callable[[torch.Tensor], bool] = _functorch.is_legacy_batchedtensor

# ---------------------------------------------------------------------- operators

# Scopes that name an operator are refused.  ``dir(torch.ops.aten)`` is no alternative: it has those used
# so far.
names_of_operators: Callable[[], list[str]] = _C._dispatch_get_all_op_names
# A name whose operator never runs is served in silence.  ``OpOverload.has_kernel_for_dispatch_key`` is no
# alternative: it counts kernels that only tracing uses.
has_kernel: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key
# Operators are observed by a mode, which the program sees.  ``torch.DispatchKey`` is no alternative: it lacks
# the key that is used.
dispatch_key: Callable[[str], Any] = _C._dispatch_key_parse
# As `dispatch_key`: an operator that is observed would call itself.  No public alternative.
dispatch_keys_below: Callable[[Any], Any] = _C._dispatch_keyset_full_after
# As `dispatch_key`.
is_dispatch_key_included: Callable[[Any], bool] = _C._dispatch_tls_is_dispatch_key_included
# As `dispatch_key`.
set_dispatch_key_included: Callable[[Any, bool], None] = _C._dispatch_tls_set_dispatch_key_included
# A number in a tensor's place makes observed operators promote types in another way.  No public alternative.
takes_numbers_as_tensors: Callable[[str], bool] = _C._should_allow_numbers_as_tensors
# ``torch.cond`` and its like raise while operators are observed.  No public alternative.
fallthrough_keys: list[Any] = _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
# As `fallthrough_keys`, for those that were made before.
higher_order_operators: MutableMapping[str, Any] = _ops._higher_order_ops
# An operator that is run again is cast once more.  ``torch.autocast(enabled=False)`` is no alternative: it is
# for one type of device, and clears what is cached.
DisableAutocast: Callable[[], AbstractContextManager[None]] = _C._DisableAutocast
# Aliases that are made where a mode sees an operator count their changes alone.  No public alternative.
ExcludeDispatchKeys: Callable[[Any, bool], AbstractContextManager[None]] = _C._SetExcludeDispatchKeyGuard
# Guarded tensors are stepped one by one, which on an accelerator gives other bits.  No public alternative.
foreach_types_of_utilities: object = getattr(_foreach_utils, "_foreach_supported_types", None)
# As `foreach_types_of_utilities`.
foreach_types_of_optimizers: object
foreach_types_of_optimizers = getattr(
    importlib.import_module("torch.optim.optimizer"), "_foreach_supported_types", None
)
# A group's bundles are stepped in another way than the whole group: other bits.  No public alternative.
default_to_fused_or_foreach: Callable[..., tuple[bool, bool]] = importlib.import_module(
    "torch.optim.optimizer"
)._default_to_fused_or_foreach
# Arguments in containers are not found.  No public alternative.  (A module: hooks know frames by its file.)
pytree = _pytree
# As `pytree`.
tree_flatten = _pytree.tree_flatten
# As `pytree`.
tree_map = _pytree.tree_map
# As `pytree`.
tree_map_only = _pytree.tree_map_only
# As `pytree`.
tree_unflatten = _pytree.tree_unflatten

# ---------------------------------------------------------------------- checkpoints, modules, optimizers

# A module cannot be recomputed by its hooks.  ``checkpoint`` is no alternative: it calls what it recomputes.
begin_checkpoint: Callable[..., Generator[None]] = checkpoint._checkpoint_without_reentrant_generator
# A policy cannot offload.  ``create_selective_checkpoint_contexts`` is no alternative: its modes keep all.
CachingDispatchMode = checkpoint._CachingTorchDispatchMode
# As `CachingDispatchMode`, for the second run.
CachedDispatchMode = checkpoint._CachedTorchDispatchMode
# Checkpoints that an interrupt has left open stay in force.  No public alternative.
CheckpointFrame = checkpoint._CheckpointFrame
# As `CheckpointFrame`, for composable ones.
composable_checkpoint: Any = _composable_checkpoint
# As `composable_checkpoint`: by it a module says that it has some.
COMPOSABLE_STATE: Any = _STATE_KEY
# Running statistics that are written count as clean.  No public alternative: one base of all such norms.
NormWithStatistics = batchnorm._NormBase
# A hook for all modules may write weights that count as clean.  No public alternative.
global_forward_hooks: MutableMapping[int, Any] = _modules._global_forward_hooks
# As `global_forward_hooks`.
global_forward_pre_hooks: MutableMapping[int, Any] = _modules._global_forward_pre_hooks
# Scripts, which take no hooks, are not refused.  ``torch.jit.ScriptModule`` is no alternative: traced modules
# are some, and take hooks.
RecursiveScriptModule = _script.RecursiveScriptModule
# State that is loaded is cast in another way than plain PyTorch's.  No public alternative.
process_loaded_state: Callable[..., Any] = torch.optim.Optimizer._process_value_according_to_param_policy

# ---------------------------------------------------------------------- the compiler

# Functions of ours are compiled where others compile.  ``torch.compiler.disable`` is no alternative: it
# imports the compiler, which takes seconds.
set_frame_strategy: Callable[[CodeType, object], None] = _eval_frame.set_code_exec_strategy
# As `set_frame_strategy`: what it is told.
SKIP_FRAME_AND_CALLS: object = _eval_frame._FrameExecStrategy(
    _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP
)


def fsdp_param() -> type:
    """Return the class by which FSDP knows a parameter.  Importing that takes a second.

    Without it nobody can tell when FSDP reads a shard that it is about to gather.  No public alternative:
    ``set_custom_all_gather`` is asked when the shard has been read.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return FSDPParam


def fsdp_own_gather() -> type[Any]:
    """Return the class by which FSDP gathers unless it is told otherwise.  Importing that takes a second.

    Without it a way to gather that users have set (``set_custom_all_gather``) would be replaced by ours.  No
    public alternative: ``FSDPModule`` only sets one.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    return DefaultAllGather


def fsdp_own_reduction() -> type[Any]:
    """Return the class by which FSDP reduces unless it is told otherwise.  Importing that takes a second.

    Without it a way to reduce that users have set (``set_custom_reduce_scatter``) would be replaced by ours.
    No public alternative: ``FSDPModule`` only sets one.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    return DefaultReduceScatter


def compiler_callbacks() -> CompilerCallbacks:
    """Return what is told when ``torch.compile`` begins.  Importing that takes seconds.

    Without it observers of operators make compiled code be compiled again.  No public alternative.
    """
    from torch._dynamo.callback import callback_handler

    return callback_handler


# ---------------------------------------------------------------------- profilers

# Ranges in traces of profilers are operators, which modes of the program see.  ``record_function`` is no
# alternative: it calls two.
RecordedRange: Callable[[str], AbstractContextManager[None]] = _C._profiler._RecordFunctionFast


def is_profiling() -> bool:
    """Return whether a profiler of PyTorch's runs, in whatever thread.

    Without it nobody knows, and every fetch would make a range.  No public alternative.
    """
    return _profiler._is_profiler_enabled
