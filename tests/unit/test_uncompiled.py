"""What `uncompiled` marks is left alone by ``torch.compile``, as with PyTorch's own decorator."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tierstore.uncompiled import uncompiled

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_DECORATORS: dict[str, Decorator] = {"ours": uncompiled, "PyTorch's": torch.compiler.disable}


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class _Backend:
    """Runs graphs as they are, and keeps what operators they have."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: Any, inputs: object) -> Any:  # noqa: ANN401 - a module of torch.fx
        del inputs
        self.graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph


def _within(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


def _programs(decorator: Decorator) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return programs that call a marked function in several ways."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        return _within(x) * 2

    marked = decorator(plain)

    class Marked(nn.Module):
        @decorator
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _within(x) * 2

    class Hook:
        @decorator
        def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen.append(_within(args[0]))

    seen: list[torch.Tensor] = []
    hooked = nn.Tanh()
    hooked.register_forward_pre_hook(Hook())
    module = nn.Sequential(nn.Tanh(), Marked(), nn.Tanh())
    return {
        "a function": lambda x: marked(x.sin()).exp(),
        "a module": lambda x: module(x.sin()).exp(),
        "a hook": lambda x: hooked(x.sin()).exp(),
        "a function, twice": lambda x: marked(marked(x.sin()).sin()).exp(),
    }


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("name", _programs(uncompiled))
def test_programs_are_cut_into_the_graphs_that_pytorchs_decorator_makes(name: str) -> None:
    found = {}
    for whose, decorator in _DECORATORS.items():
        torch._dynamo.reset()
        backend = _Backend()
        program = _programs(decorator)[name]
        compiled = torch.compile(program, backend=backend)
        x = torch.rand(3)
        expected = program(x)
        assert [torch.equal(compiled(x), expected) for _ in range(3)] == [True] * 3
        found[whose] = backend.graphs
    assert found["ours"] == found["PyTorch's"]
    assert found["ours"], "something is to be compiled"
    assert not any("cos" in each for graph in found["ours"] for each in graph)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_whole_graph_is_refused_as_with_pytorchs_decorator() -> None:
    for decorator in _DECORATORS.values():
        torch._dynamo.reset()
        compiled = torch.compile(_programs(decorator)["a function"], backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
            compiled(torch.rand(3))


def test_a_function_that_raises_leaves_the_compiler_at_work() -> None:
    @uncompiled
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError(str(_within(x).shape))

    def program(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(ArithmeticError):
            fail(x)
        return later(x)

    def later(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    backend = _Backend()
    assert torch.equal(torch.compile(program, backend=backend)(torch.ones(2)), torch.ones(2).sin() + 1)
    assert [graph for graph in backend.graphs if "sin" in graph]


def test_it_is_the_function_itself() -> None:
    def function(x: int) -> int:
        return x + 1

    assert uncompiled(function) is function
    assert function(1) == 2


def test_what_was_marked_before_the_compiler_was_imported_is_left_alone() -> None:
    program = """
import sys, torch
from tierstore.uncompiled import uncompiled

@uncompiled
def marked(x):
    return within(x) * 2

def within(x):
    return x.cos()

assert "torch._dynamo" not in sys.modules
graphs = []

def backend(graph, inputs):
    graphs.append([node.name for node in graph.graph.nodes])
    return graph

compiled = torch.compile(lambda x: marked(x.sin()).exp(), backend=backend)
x = torch.rand(3)
assert torch.equal(compiled(x), (x.sin().cos() * 2).exp())
assert len(graphs) == 2 and not any("cos" in graph for graph in graphs), graphs
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
