"""What the library relies on of PyTorch's private names, of tensors and autograd; no others are used."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from tierstore import torch_private as private
from tierstore.training.bundles import poisons

_ROOT = Path(__file__).parents[2]
_TESTS = "test_torch_private*.py"
_SOURCES = sorted((_ROOT / "tierstore").rglob("*.py"))
_LISTED = re.compile(r"^- ``(\w+)``: (.*?)\s+In:\s+([\w,\s]+)\.$", re.MULTILINE | re.DOTALL)

_OF_PYTHON = {
    "_DummyThread", "_SubParsersAction", "_at_fork_reinit", "_current_frames", "_getframe", "_is_owned",
    "_replace", "_sighandler_noop",
}  # fmt: skip
_OF_OPERATORS = re.compile(
    r"_(amp|amp_foreach|foreach|fused)_|_attention|_c10d_functional|_fused_rms_norm|_(log_)?softmax"
    r"|_scaled_dot_product_\w+"
)
"""Names of operators' libraries and kernels, and parts of such names: these are public, as operators' are."""
_SET_FOR_PYTORCH = {"_from_public_api"}
"""What an object of ours has because PyTorch asks for it."""


# ---------------------------------------------------------------------- nothing else is used


def _listed() -> dict[str, set[str]]:
    """Return the attributes that the module's docstring lists, and which modules it says use them."""
    found = {name: set(re.findall(r"\w+", used)) for name, _, used in _LISTED.findall(private.__doc__ or "")}
    assert len(found) == (private.__doc__ or "").count("\n- ``"), "a line of the list is not of its form"
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


def _own_names() -> set[str]:
    """Return the private names that the library gives: to functions, classes, variables and attributes."""
    own = set()
    for path in _SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name):
                    own.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                    own.add(name)
                case ast.Constant(value=str(name)) if name.startswith("_tierstore_"):
                    own.add(name)
                case _:
                    pass
    return own


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield what a module imports from PyTorch, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _names_from_torch(tree: ast.Module) -> set[str]:
    """Return the names that stand for PyTorch, or for something of it, in a module."""
    return {
        each.asname or each.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for each in node.names
        if (node.module if isinstance(node, ast.ImportFrom) else each.name or "").split(".")[0] == "torch"  # type: ignore[union-attr]
    }


def _attributes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield private attributes that a module asks objects for, each with what it asks; none of operators."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            asked = ast.unparse(node.value)
            is_own = asked in ("self", "cls") and node.attr not in _SET_FOR_PYTORCH
            if not is_own and not asked.startswith("torch.ops."):
                yield asked, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_private(node.value):
            yield "", node.value


def test_no_other_module_imports_a_private_name_of_pytorch() -> None:
    found = [
        f"{path.relative_to(_ROOT)}: {name}"
        for path in _SOURCES
        if path.stem != "torch_private"
        for name in _imported(ast.parse(path.read_text(encoding="utf-8")))
        if any(_is_private(part) for part in name.split("."))
    ]
    assert found == [], "take it from tierstore.torch_private"


def test_no_other_module_uses_a_private_attribute_of_pytorch_that_is_not_listed() -> None:
    own, listed = _own_names(), _listed()
    operators = {each.partition("::")[2].partition(".")[0] for each in private.names_of_operators()}
    unlisted = []
    for path in _SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.stem == "torch_private":
            continue
        of_torch = _names_from_torch(tree)
        for asked, name in _attributes(tree):
            is_of_torch = asked.split(".")[0] in of_torch
            is_operator = _OF_OPERATORS.fullmatch(name) or name in operators
            is_known = name in _OF_PYTHON or (not asked and is_operator)
            if name not in listed and not is_known and (is_of_torch or name not in own):
                unlisted.append(f"{path.relative_to(_ROOT)}: {asked}.{name}")
    assert unlisted == [], "list it in tierstore.torch_private, or take it from there"


def test_the_list_says_which_modules_use_each_attribute() -> None:
    listed = _listed()
    used: dict[str, set[str]] = {name: set() for name in listed}
    for path in _SOURCES:
        if path.stem != "torch_private":
            for _, name in _attributes(ast.parse(path.read_text(encoding="utf-8"))):
                if name in listed:
                    used[name].add(path.stem)
    assert used == listed


def test_the_scan_sees_private_names() -> None:
    tree = ast.parse(
        "import torch\nfrom torch.utils import _pytree\n"
        "torch._C._x\nstorage._cdata\nself._own\ntorch.ops.aten._to_copy\ngetattr(node, '_raw_saved_')"
    )
    assert set(_imported(tree)) == {"torch", "torch.utils._pytree"}
    assert _names_from_torch(tree) == {"torch", "_pytree"}
    assert {name for _, name in _attributes(tree)} == {"_C", "_x", "_cdata", "_raw_saved_"}


def test_every_name_says_what_breaks_without_it() -> None:
    lines = Path(private.__file__).read_text(encoding="utf-8").splitlines()
    before = {
        found[2]: above
        for above, line in itertools.pairwise(lines)
        if (found := re.match(r"(from [\w.]+ import )?(\w+)(: .*| = .*|)$", line)) and above.startswith("#")
    }
    untold = {
        "CompilerCallbacks",
        "compiler_callbacks",
        "fsdp_own_gather",
        "fsdp_own_reduction",
        "fsdp_param",
        "is_profiling",
    }
    unsaid = set(private.__all__) - set(before) - untold
    assert unsaid == set()


def test_every_name_has_a_test() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.glob(_TESTS)]
    tested = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "private"
    }
    asked = {name for tree in trees for _, name in _attributes(tree)}
    assert len(trees) == 2
    assert set(private.__all__) - tested == {"CompilerCallbacks"}
    assert set(_listed()) - asked == set()


# ---------------------------------------------------------------------- tensors and storages


class _Plain(torch.Tensor):
    """A subclass that PyTorch treats as it does ``torch.Tensor``."""


class _Wrapper(torch.Tensor):
    """A subclass that wraps another tensor."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> torch.Tensor:  # noqa: ANN401
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        raise NotImplementedError


def test_a_storage_tells_how_many_tensors_refer_to_it() -> None:
    tensor = torch.empty(4)
    storage = tensor.untyped_storage()
    before = private.storage_use_count(storage._cdata)
    alias = tensor.view(2, 2)
    assert private.storage_use_count(storage._cdata) == before + 1
    assert alias.untyped_storage()._cdata == storage._cdata, "a storage has one identity"
    del alias
    assert private.storage_use_count(storage._cdata) == before
    assert torch.empty(4).untyped_storage()._cdata != storage._cdata


def test_a_tensor_tells_what_graphs_have_saved_it() -> None:
    tensor = torch.ones(2, requires_grad=True)
    before = private.tensor_use_count(tensor)
    output = tensor * tensor
    assert private.tensor_use_count(tensor) > before
    del output
    assert private.tensor_use_count(tensor) == tensor._use_count() == before  # type: ignore[attr-defined]


def test_a_tensor_counts_its_changes() -> None:
    tensor = torch.zeros(2)
    before = private.version_of(tensor)
    tensor.add_(1)
    assert private.version_of(tensor) == tensor._version == before + 1
    tensor.data = torch.ones(2)
    assert tensor._version == before + 1, "memory that is put under a tensor is no change"


def test_a_storage_is_found_by_a_weak_pointer() -> None:
    storage = torch.UntypedStorage(8)
    known = StorageWeakRef(storage)
    found = private.storage_of_weak_pointer(known.cdata)
    assert found is not None
    assert found._cdata == storage._cdata
    del found, storage
    assert private.storage_of_weak_pointer(known.cdata) is None


def test_tensors_have_one_base_in_cpp() -> None:
    assert torch.Tensor.__bases__ == (private.TensorBase,)
    assert torch.Tensor.__new__ is vars(private.TensorBase)["__new__"]
    view, storage = torch.empty(0), torch.ones(4).untyped_storage()
    private.TensorBase.set_(view, storage, 1, (2,), (1,))
    assert view.tolist() == [1.0, 1.0]


def test_a_storage_can_be_made_to_raise() -> None:
    assert private.throw_on_write is not None
    assert private.warn_on_write is not None
    tensor = torch.zeros(1)
    private.throw_on_write(tensor)
    with pytest.raises(RuntimeError):
        tensor.zero_()
    assert poisons._flags() is not None, "the flag for reads is not found between those of the two functions"


def test_a_view_has_the_sign_turned() -> None:
    tensor = torch.ones(2)
    view = private.negative_view(tensor)
    assert view.is_neg()
    assert view.data_ptr() == tensor.data_ptr()
    assert view.tolist() == [-1.0, -1.0]


def test_the_conjugate_of_a_complex_tensor_is_a_view() -> None:
    tensor = torch.ones(2, dtype=torch.complex64)
    assert torch.conj(tensor).is_conj()
    assert torch.conj(tensor).data_ptr() == tensor.data_ptr()


def test_functional_tensors_and_zero_tensors_are_known() -> None:
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(private.is_functional_tensor(x))
        return x

    seen: list[bool] = []
    torch.func.functionalize(look)(torch.ones(1))
    assert seen == [True]
    assert not private.is_functional_tensor(torch.ones(1))
    assert torch._efficientzerotensor((2,))._is_zerotensor()
    assert not torch.ones(1)._is_zerotensor()


def test_wrappers_are_told_from_other_tensors() -> None:
    wrapper: Any = private.make_wrapper_subclass(_Wrapper, (1 << 40,), (1,), dtype=torch.float32)
    assert type(wrapper) is _Wrapper
    assert wrapper.shape == (1 << 40,), "nothing is allocated for one"
    plain: Any = torch.ones(1)
    are_wrappers = [private.is_traceable_wrapper_subclass(each) for each in (wrapper, plain)]
    assert are_wrappers == [True, False]


def test_an_alias_is_made_of_another_class() -> None:
    tensor = torch.ones(2)
    alias = private.make_subclass(_Plain, tensor, True)
    assert type(alias) is _Plain
    assert alias.requires_grad
    assert alias.is_leaf
    assert alias.data_ptr() == tensor.data_ptr()


def test_a_class_may_leave_functions_to_pytorch() -> None:
    kind: Any = type("Left", (torch.Tensor,), {"__torch_function__": private.disabled_torch_function})
    assert type(torch.ones(1).as_subclass(kind) + 1) is torch.Tensor


def test_it_is_known_whether_classes_see_functions() -> None:
    assert private.are_subclasses_seen()
    with torch.DisableTorchFunctionSubclass():
        assert not private.are_subclasses_seen()


def test_a_view_knows_what_it_is_a_view_of() -> None:
    tensor = torch.ones(4)
    view = tensor[:2]
    assert view._base is tensor
    assert view._is_view()
    assert tensor._base is None
    assert not tensor._is_view()


def test_a_sparse_tensor_shows_its_parts_before_they_are_coalesced() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
    )
    assert not sparse.is_coalesced()
    assert sparse._indices().tolist() == [[0, 0]]
    assert sparse._values().tolist() == [1.0, 2.0]


def test_a_mark_makes_a_tensor_a_parameter() -> None:
    tensor: Any = torch.ones(1).as_subclass(_Plain)
    assert not isinstance(tensor, nn.Parameter)
    tensor._is_param = True
    assert isinstance(tensor, nn.Parameter)


# ---------------------------------------------------------------------- autograd


def test_hooks_of_saved_tensors_are_a_stack() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    seen: list[torch.Tensor] = []
    weight = torch.ones(1, requires_grad=True)
    assert private.top_saved_tensor_hooks(True) is None
    private.push_saved_tensor_hooks(pack, unpack)
    try:
        assert private.top_saved_tensor_hooks(True) == (pack, unpack)
        weight * weight
    finally:
        private.pop_saved_tensor_hooks()
    assert private.top_saved_tensor_hooks(True) is None
    assert seen


def test_it_is_known_where_hooks_of_saved_tensors_are_forbidden() -> None:
    assert private.are_saved_tensor_hooks_allowed()
    with graph.disable_saved_tensors_hooks("forbidden"):
        assert not private.are_saved_tensor_hooks_allowed()


def test_a_hook_knows_its_backward_pass_and_node_and_may_ask_for_the_end() -> None:
    told: list[object] = []
    weight = torch.ones(1, requires_grad=True)
    output = (weight * 2).exp()
    node = output.grad_fn
    assert node is not None

    def see(_: object) -> None:
        told.append((private.current_graph_task() >= 0, private.current_autograd_node() is node))
        private.call_after_backward(lambda: told.append(weight.grad is not None))

    node.register_prehook(see)
    assert private.current_graph_task() == -1
    output.sum().backward()
    assert told == [(True, True), True]


def test_nodes_are_numbered_as_they_are_made() -> None:
    weight = torch.ones(1, requires_grad=True)
    number = private.next_sequence_number()
    node: Any = (weight * 2).grad_fn
    assert node._sequence_nr() == number
    assert private.next_sequence_number() == number + 1
    assert node.next_functions[0][0]._sequence_nr() >= 2**63, "one that accumulates has no number"


def test_versions_can_be_set_and_kept() -> None:
    tensor = torch.zeros(1)
    private.set_versions((tensor,), (7,))
    assert tensor._version == 7
    with private.preserve_versions((tensor,)):
        tensor.add_(1)
    assert tensor._version == 7


def test_nodes_show_what_they_have_saved() -> None:
    weight = torch.ones(1, requires_grad=True)
    node: Any = weight.exp().grad_fn
    names = [name for name in dir(type(node)) if name.startswith("_raw_saved_")]
    assert names == ["_raw_saved_result"]
    with graph.saved_tensors_hooks(lambda _: "packed", lambda _: torch.ones(1)):
        node = weight.exp().grad_fn
    assert node._raw_saved_result.data == "packed", "without unpacking it"


def test_hooks_after_accumulation_have_an_order() -> None:
    weight: Any = torch.ones(1, requires_grad=True)
    first, last = (weight.register_post_accumulate_grad_hook(lambda _: None) for _ in range(2))
    hooks = weight._post_accumulate_grad_hooks
    hooks.move_to_end(first.id)
    assert list(hooks) == [last.id, first.id]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch was built without it")
def test_a_group_says_how_long_it_waits() -> None:
    from torch import distributed

    distributed.init_process_group(
        "gloo", store=vars(distributed)["HashStore"](), rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    try:
        assert distributed.group.WORLD is not None
        backend = distributed.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=77)
        module: Any = torch.nn.ModuleDict({"left": torch.nn.Linear(2, 2), "other": torch.nn.Linear(2, 2)})
        module._ddp_params_and_buffers_to_ignore = ["left.weight", "left.bias"]
        wrapper: Any = torch.nn.parallel.DistributedDataParallel(module)
        assert wrapper.parameters_to_ignore == {"left.weight", "left.bias"}
        assert not wrapper._join_config.enable
        with wrapper.join():
            assert wrapper._join_config.enable
    finally:
        distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch was built without it")
def test_fsdp_reads_a_shard_by_one_attribute_of_the_class_that_its_object_has() -> None:
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=vars(distributed)["HashStore"](), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        module: Any = fully_shard(torch.nn.Linear(2, 3), mesh=mesh)
        state = module._get_fsdp_state()
        (group,) = getattr(state, "_fsdp_param_groups", [state._fsdp_param_group])
        assert [each.sharded_param for each in group.fsdp_params] == list(module.parameters())
        assert type(group._all_gather_comm) is private.fsdp_own_gather()
        assert group.mesh_info == group.post_forward_mesh_info or group.post_forward_mesh_info is None
        assert group.mesh_info.shard_process_group.size() == 1
        way = private.fsdp_own_gather()()
        module.set_custom_all_gather(way)
        assert group._all_gather_comm is way
        assert type(group._reduce_scatter_comm) is private.fsdp_own_reduction()
        summing = private.fsdp_own_reduction()()
        module.set_custom_reduce_scatter(summing)
        assert group._reduce_scatter_comm is summing
        read: list[object] = []

        class Reading(private.fsdp_param()):  # type: ignore[misc]
            @property
            def _sharded_param_data(self) -> Any:  # noqa: ANN401 - a tensor
                read.append(self.sharded_param)
                return self.sharded_param._local_tensor.reshape(-1)

            def reset_sharded_param(self) -> None:
                assert getattr(self._module_info.module, self._module_info.param_name) is self.sharded_param

        for each in group.fsdp_params:
            each.__class__ = Reading
            del each.__dict__["_sharded_param_data"]
            assert each.padded_sharded_param_size == each.sharded_param.to_local().shape
        sharded = list(module.parameters())
        module(torch.ones(1, 2)).sum().backward()
        assert read[:2] == sharded
        assert {id(each) for each in module.parameters()} == {id(each) for each in sharded}
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("register", "name"),
    [
        (torch.Tensor.register_hook, "_backward_hooks"),
        (torch.Tensor.register_post_accumulate_grad_hook, "_post_accumulate_grad_hooks"),
    ],
)
def test_hooks_that_are_set_again_are_those_of_what_a_tensor_was_swapped_with(
    register: Callable[..., RemovableHandle], name: str
) -> None:
    called: list[torch.Tensor] = []
    parameter = nn.Parameter(torch.ones(2, device="meta"))
    handle = register(parameter, called.append)
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(2)))
    parameter.sum().backward()
    assert not called
    setattr(parameter, name, getattr(parameter, name))
    parameter.sum().backward()
    assert len(called) == 1
    handle.remove()
    parameter.sum().backward()
    assert len(called) == 1
