"""Optimizers as users write them, whose step is one thing: none of them may be called a bundle at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Optimizer = torch.optim.Optimizer
Closure = Callable[[], Any]


class Kind(Optimizer):
    """Runs a closure, and what a subclass does."""

    def __init__(self, parameters: Iterable[Any], **options: object) -> None:
        super().__init__(parameters, {"lr": 0.05, **options})
        self.t = 0

    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401
        """Step once; return what is to be compared."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            result = self.apply()
        return loss if result is None else result

    def apply(self) -> object:
        """Change the parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(group, parameter, parameter.grad)
        return None

    def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        """Change one parameter."""
        parameter.add_(gradient, alpha=-group["lr"])


class CountsInItsGroup(Kind):
    """``group["t"] += 1``."""

    def apply(self) -> object:
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / group["t"])
        return None


class CountsInItself(Kind):
    """``self.t += 1``, and returns it."""

    def apply(self) -> object:
        self.t += 1
        super().apply()
        return torch.tensor(self.t)

    def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        parameter.addcmul_(gradient, gradient.abs(), value=-group["lr"] / self.t)


class ScalesByTheGlobalNorm(Kind):
    """Like LAMB or an Adam that clips by itself."""

    def apply(self) -> object:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        super().apply()
        return self.norm

    def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        parameter.add_(gradient / (self.norm + 1e-6), alpha=-group["lr"])


class AddsNoise(Kind):
    """Langevin dynamics: the order of random numbers is that of the parameters."""

    def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        parameter.add_(gradient + 1e-2 * torch.randn_like(parameter), alpha=-group["lr"])


class KeepsMoments(Kind):
    """State like the parameter, made anew in one entry and changed in place in the other; a count beside."""

    def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["square"] = torch.zeros_like(parameter)
            state["mean"] = torch.zeros_like(parameter)
        state["step"] += 1
        state["square"].mul_(0.9).addcmul_(gradient, gradient, value=0.1)
        state["mean"] = state["mean"] * 0.9 + gradient
        parameter.addcdiv_(state["mean"], state["square"].sqrt() + 1e-3, value=-group["lr"] / state["step"])


class KeepsOtherShapes(Kind):
    """Rows and columns of the second moment, like Adafactor; and a list of former norms."""

    def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        flat = gradient.reshape(gradient.shape[0], -1)
        if not state:
            state["rows"] = torch.zeros(flat.shape[0])
            state["columns"] = torch.zeros(2, flat.shape[1])
            state["norms"] = []
        state["rows"].add_(flat.square().sum(1))
        state["columns"][0].add_(flat.square().sum(0))
        state["norms"].append(flat.norm())
        factor = (state["rows"][:, None] + state["columns"][0][None, :] + state["norms"][-1]).rsqrt()
        parameter.add_(gradient * factor.view_as(parameter), alpha=-group["lr"])


class SharesItsState(Kind):
    """Two entries of one memory: a flat buffer and a view into it."""

    def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["flat"] = torch.zeros(2 * parameter.numel())
            state["mean"] = state["flat"][: parameter.numel()].view_as(parameter)
            state["same"] = state["mean"]
        state["flat"].mul_(0.9)
        state["mean"].add_(gradient)
        parameter.add_(state["same"], alpha=-group["lr"])


class KeepsOneFlatState(Kind):
    """One buffer for all parameters, each of which has a view into it."""

    def apply(self) -> object:
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not hasattr(self, "flat"):
            self.flat = torch.zeros(sum(p.numel() for p in parameters))
            offset = 0
            for parameter in parameters:
                self.state[parameter]["mean"] = self.flat[offset : offset + parameter.numel()].view_as(
                    parameter
                )
                offset += parameter.numel()
        self.flat.mul_(0.5)
        super().apply()
        return self.flat.norm()

    def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        self.state[parameter]["mean"].add_(gradient)
        parameter.add_(self.state[parameter]["mean"], alpha=-group["lr"])


class KeepsStateUnderOtherKeys(Kind):
    """State of the whole, under text, and state of a parameter that is no dict."""

    def apply(self) -> object:
        whole: dict[str, Any] = self.state["whole"]  # type: ignore[index]
        whole["t"] = whole.get("t", 0) + 1
        whole["sum"] = whole.get("sum", torch.zeros(3)) + 1
        super().apply()
        return whole["sum"]

    def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        former = self.state[parameter]
        self.state[parameter] = gradient.clone() if isinstance(former, dict) else former + gradient
        parameter.add_(self.state[parameter], alpha=-group["lr"])


class KeepsTheGradientItself(Kind):
    """The former gradient: an object that the loop lets go of."""

    def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        former = state.get("former")
        parameter.add_(gradient if former is None else gradient + former, alpha=-group["lr"])
        state["former"] = gradient.clone()


class UsesData(Kind):
    """As optimizers were written before ``torch.no_grad``."""

    def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        if "buffer" not in state:
            state["buffer"] = torch.clone(parameter.grad.data).detach()  # type: ignore[union-attr]
        else:
            state["buffer"].mul_(0.9).add_(parameter.grad.data)  # type: ignore[union-attr]
        parameter.data.add_(state["buffer"], alpha=-group["lr"])
        parameter.grad.data.mul_(0.5)  # type: ignore[union-attr]


class GoesTwice(Kind):
    """All of it twice: what is gathered in the first pass is used in the second one."""

    def apply(self) -> object:
        means = []
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("start", parameter.clone())
                means.append(parameter.grad.mean() if parameter.grad is not None else torch.zeros(()))
        mean = torch.stack(means).mean()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.lerp_(self.state[parameter]["start"], 0.1).sub_(mean)
        return mean


class UsesLists(Kind):
    """Functions over lists of everything."""

    def apply(self) -> object:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients: list[Tensor] = [p.grad for p in parameters]
        for parameter in parameters:
            self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
        means = [self.state[parameter]["mean"] for parameter in parameters]
        torch._foreach_lerp_(means, gradients, 0.1)
        norms = torch._foreach_norm(means)
        torch._foreach_add_(parameters, torch._foreach_mul(means, 2.0), alpha=-0.05)
        return torch.stack(list(norms)).norm()


class CallsItsBase(torch.optim.AdamW):
    """One of PyTorch's, that does more."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, lr=1e-2)
        self.calls = 0

    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401
        """Step, and shrink by how often this was called."""
        self.calls += 1
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - 1e-3 / self.calls)
        return loss


class SAM(Optimizer):
    """Sharpness-aware minimisation, as it is commonly written: two passes around another optimizer."""

    def __init__(self, parameters: Iterable[Any], base: Callable[[Any], Optimizer]) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401
        """Climb, evaluate again, come back and step."""
        assert closure is not None
        closure = torch.enable_grad()(closure)
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad, alpha=0.05 / float(norm + 1e-12))
        self.zero_grad()
        loss = closure()
        for parameter in parameters:
            parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()
        return loss


KINDS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    kind.__name__: kind
    for kind in (
        CountsInItsGroup,
        CountsInItself,
        ScalesByTheGlobalNorm,
        AddsNoise,
        KeepsMoments,
        KeepsOtherShapes,
        SharesItsState,
        KeepsOneFlatState,
        KeepsStateUnderOtherKeys,
        KeepsTheGradientItself,
        UsesData,
        GoesTwice,
        UsesLists,
        CallsItsBase,
    )
}
