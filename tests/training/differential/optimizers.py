"""Optimizers of every kind: PyTorch's with their options, and such as users write.

An entry appends to ``t.opts``; ``m`` is the model, ``t.groups(how)`` its parameters in some grouping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tierstore.optim import FTRL, LazyAdam  # noqa: F401 - programs name them

Optimizer = torch.optim.Optimizer
Closure = Callable[[], Any] | None


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


def _loss_of(closure: Closure) -> Any:  # noqa: ANN401 - whatever the closure returns
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Numbered(Optimizer):
    """Counts its steps in its groups and in itself, and returns the count."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:  # noqa: ANN401 - as torch's own
        super().__init__(params, {"lr": lr, "t": 0})
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # noqa: ANN401 - as torch's own
        """Go down by less each time."""
        loss = _loss_of(closure)
        self.t += 1
        for group in self.param_groups:
            group["t"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] / (group["t"] + self.t))
        return (self.t, loss)


class Normed(Optimizer):
    """Scales by the norm of all gradients, and keeps it in its state under a name."""

    def __init__(self, params: Any) -> None:  # noqa: ANN401 - as torch's own
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # noqa: ANN401 - as torch's own
        """Go one length down."""
        loss = _loss_of(closure)
        ps = _trained(self)
        real = [p.grad.abs().float() for p in ps if p.grad is not None and not p.grad.is_sparse]
        norm = torch.stack([g.norm() for g in real]).norm() if real else torch.zeros(())
        self.state["norm"] = norm  # type: ignore[index]
        for p in ps:
            p.sub_(p.grad / (1 + norm.to(p.dtype)))  # type: ignore[arg-type, operator]
        return norm if loss is None else loss


class Noisy(Optimizer):
    """Adds noise in the order of the parameters, and keeps a list for each."""

    def __init__(self, params: Any) -> None:  # noqa: ANN401 - as torch's own
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # noqa: ANN401 - as torch's own
        """Go down, roughly."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, seen=[], sum=torch.zeros_like(p))
                state["count"] += 1
                state["seen"].append(float(p.grad.to_dense().abs().sum()))
                state["sum"].add_(p.grad)
                p.sub_(state["sum"] * group["lr"] / state["count"] + torch.randn_like(p) * 0.01)
        return loss


class Lion(Optimizer):
    """One moment and a sign, over lists."""

    def __init__(self, params: Any) -> None:  # noqa: ANN401 - as torch's own
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:  # noqa: ANN401 - as torch's own
        """Go down by the sign."""
        loss = _loss_of(closure)
        ps = [p for p in _trained(self) if not p.is_complex()]
        for p in ps:
            if not self.state[p]:
                self.state[p]["m"] = torch.zeros_like(p)
        moments = [self.state[p]["m"] for p in ps]
        if ps:
            torch._foreach_lerp_(moments, [p.grad.to_dense() for p in ps], 0.1)  # type: ignore[union-attr]
            signs = torch._foreach_sign(moments)
            torch._foreach_add_(ps, list(signs), alpha=-0.01)
        return loss


class Wrapped(Optimizer):
    """A wrapper in torch's manner: shares groups and state of the optimizer that it wraps."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self.state = inner.state
        self.slow: dict[Tensor, Tensor] = {}
        self.count = 0

    def step(self, closure: Closure = None) -> Any:  # noqa: ANN401 - as torch's own
        """Look ahead: every second step goes half way back."""
        loss = self.inner.step(closure)
        self.count += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.slow.setdefault(p, p.detach().clone())
                    if self.count % 2 == 0 and not p.is_sparse and p.is_floating_point():
                        slow.lerp_(p, 0.5)
                        p.copy_(slow)
        return loss


def half(model: nn.Module, which: int) -> list[nn.Parameter]:
    """Return every second parameter."""
    return list(model.parameters())[which::2]


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters in two groups with options of their own."""
    return [{"params": half(model, 0)}, {"params": half(model, 1), "lr": 0.05}]


def in_backward(model: nn.Module, make: Callable[[list[nn.Parameter]], Optimizer]) -> list[Optimizer]:
    """Return an optimizer for each trained parameter, which steps as soon as its gradient is there."""
    return [_stepped_in_backward(p, make([p])) for p in model.parameters() if p.requires_grad]


def _stepped_in_backward(parameter: nn.Parameter, optimizer: Optimizer) -> Optimizer:
    def hook(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(hook)
    return optimizer


def nonempty(parameters: Iterable[nn.Parameter]) -> list[Any]:
    """Return the parameters, or one of no model: PyTorch refuses an empty list."""
    return list(parameters) or [nn.Parameter(torch.zeros(1))]


def _ways(options: str, ways: str) -> str:
    """Return alternatives: each of some options with each way of stepping."""
    return "|".join(f"{each}{way}" for way in ways.split("|") for each in options.split("|"))


_P = "<b:P(m)|grouped(m)|[*P(m)][::-1]|[p for p in P(m) if p.requires_grad] or P(m)>"

OPTIMIZERS: dict[str, str] = {
    "sgd": f"t.opts.append(torch.optim.SGD({_P}, lr=0.1<a:{_ways('|, momentum=0.9|, momentum=0.9, nesterov=True|, weight_decay=0.1|, maximize=True|, momentum=0.9, dampening=0.5', '|, foreach=True|, foreach=False')}|{_ways('|, weight_decay=0.1|, maximize=True', ', fused=True')}>))",
    # Of 16 bits, PyTorch's kernel for the host reads what its first step has left unwritten.
    "fused momentum": "t.opts.append(torch.optim.SGD(nonempty(p for p in P(m) if p.dtype.itemsize != 2), lr=0.1, momentum=0.9<a:|, nesterov=True|, dampening=0.5>, fused=True))",
    "plain sgd": f"t.opts.append(torch.optim.SGD({_P}, lr=0.1))",
    "adamw": f"t.opts.append(torch.optim.AdamW({_P}<a:{_ways('|, amsgrad=True|, maximize=True|, weight_decay=0.1|, lr=torch.tensor(0.01)', '|, foreach=True|, foreach=False|, fused=True')}>))",
    "adam": f"t.opts.append(torch.optim.Adam({_P}<a:{_ways('|, amsgrad=True|, weight_decay=0.1|, decoupled_weight_decay=True', '|, foreach=True|, fused=True')}>))",
    "rmsprop": f"t.opts.append(torch.optim.RMSprop({_P}<a:{_ways('|, momentum=0.9|, centered=True|, weight_decay=0.1|, maximize=True', '|, foreach=True')}>))",
    "adagrad": f"t.opts.append(torch.optim.Adagrad({_P}<a:{_ways('|, lr_decay=0.1|, initial_accumulator_value=0.5|, weight_decay=0.1|, maximize=True', '|, foreach=True')}>))",
    "adadelta": f"t.opts.append(torch.optim.Adadelta({_P}<a:{_ways('|, weight_decay=0.1|, maximize=True', '|, foreach=True')}>))",
    "adamax": f"t.opts.append(torch.optim.Adamax({_P}<a:{_ways('|, weight_decay=0.1|, maximize=True', '|, foreach=True')}>))",
    "nadam": f"t.opts.append(torch.optim.NAdam({_P}<a:{_ways('|, weight_decay=0.1|, decoupled_weight_decay=True|, maximize=True', '|, foreach=True')}>))",
    "radam": f"t.opts.append(torch.optim.RAdam({_P}<a:{_ways('|, weight_decay=0.1|, maximize=True', '|, foreach=True')}>))",
    "asgd": f"t.opts.append(torch.optim.ASGD({_P}<a:{_ways('|, weight_decay=0.1|, maximize=True', '|, foreach=True')}>))",
    "rprop": f"t.opts.append(torch.optim.Rprop({_P}<a:{_ways('|, maximize=True', '|, foreach=True')}>))",
    "adafactor": f"t.opts.append(torch.optim.Adafactor({_P}))",
    "muon": "t.opts.append(torch.optim.Muon([p for p in P(m) if p.dim() == 2] or [nn.Parameter(torch.zeros(2, 2))]))",
    "sparse adam": "t.opts.append(torch.optim.SparseAdam(P(m)))",
    "lazy adam": f"t.opts.append(LazyAdam({_P}<a:|, nesterov=True|, weight_decay=0.1|, maximize=True>))",
    "ftrl": f"t.opts.append(FTRL({_P}<a:|, l1=0.01|, l2=0.1, weight_decay=0.1|, maximize=True>))",
    "lbfgs": "t.opts.append(torch.optim.LBFGS(P(m), max_iter=2))",
    "two": "t.opts += [torch.optim.SGD(half(m, 0), lr=0.1, momentum=0.9), torch.optim.Adam(half(m, 1) or P(m))]",
    "two of one": "t.opts += [torch.optim.SGD(P(m), lr=0.1), torch.optim.Adam(P(m), lr=0.01)]",
    "other parameters too": "t.opts.append(torch.optim.Adam([*P(m), nn.Parameter(torch.ones(3))]))",
    "numbered": f"t.opts.append(Numbered({_P}))",
    "normed": f"t.opts.append(Normed({_P}))",
    "noisy": f"t.opts.append(Noisy({_P}))",
    "lion": f"t.opts.append(Lion({_P}))",
    "wrapped": f"t.opts.append(Wrapped(torch.optim.SGD({_P}, lr=0.1, momentum=0.9)))",
    "in backward": "t.opts += in_backward(m, lambda ps: torch.optim.<a:SGD|AdamW>(ps, lr=0.01))",
}
