"""What models are made of: parts that map ``(batch, WIDTH)`` to the same, and knots tied in them.

Every part is an expression; what PyTorch has not got stands here as a module of its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

WIDTH = 16
HEADS = 2


class Around(nn.Module):
    """Gives a module another shape of input, and takes the first of what it returns."""

    def __init__(self, inner: nn.Module, *shape: int) -> None:
        super().__init__()
        self.inner = inner
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Call the inner module on a view."""
        y = self.inner(x.reshape(len(x), *self.shape))
        return cast("Tensor", y[0] if isinstance(y, tuple) else y).reshape(len(x), -1)


class Lookup(nn.Module):
    """Turns numbers into tokens and looks them up."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        """Look up one token a row."""
        tokens = x.detach().abs().sum(1).mul(7).nan_to_num(0.0, 0.0, 0.0).remainder(8).long()
        return x + cast("Tensor", self.table(tokens))


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        return x + cast("Tensor", self.down(F.gelu(self.up(self.norm(x)))))


class Twice(nn.Module):
    """Calls a module twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Call it on its own output."""
        return cast("Tensor", self.inner(torch.tanh(self.inner(x))))


class Either(nn.Module):
    """Calls one of two modules, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Count the calls in a buffer."""
        self.calls += 1
        return cast("Tensor", self.one(x) if int(self.calls) % 2 else self.other(x))


class Reader(nn.Module):
    """Uses its child's parameters and never calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.table = nn.ParameterDict({"scale": nn.Parameter(torch.rand(WIDTH))})
        self.rows = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        """Compute with what the child has."""
        y = F.linear(x, self.child.weight * 2, self.child.bias) * self.table["scale"]
        made: Tensor = y + self.rows[0] * self.rows[1]
        return made


class Weight(nn.Module):
    """Has one parameter, of any shape, stride and dtype, that it multiplies with or adds.

    Args:
        values: of the parameter.
        is_trained: whether it requires gradients.
        kind: the class of the parameter.
    """

    def __init__(self, values: Tensor, *, is_trained: bool = True, kind: type = nn.Parameter) -> None:
        super().__init__()
        is_trained = is_trained and (values.is_floating_point() or values.is_complex())
        self.weight = kind(values, requires_grad=is_trained)

    def forward(self, x: Tensor) -> Tensor:
        """Use it."""
        weight = self.weight
        if weight.is_complex():
            return x + torch.view_as_real(weight * weight).sum(-1).to(x.dtype)
        if weight.dim() == 2:
            return torch.tanh(x.to(weight.dtype) @ weight).to(x.dtype)
        made: Tensor = x * weight.to(x.dtype)
        return made


class Own(nn.Parameter):
    """A user's own kind of parameter."""


class Empty(nn.Module):
    """Has parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Linear(0, WIDTH)
        self.nobody = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Add a bias."""
        return x + cast("Tensor", self.none(x[:, :0])) + self.nobody.sum()


class Cast(nn.Module):
    """Computes in another dtype."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner.to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """There and back."""
        return cast("Tensor", self.inner(x.to(self.dtype))).to(x.dtype)


class Buffers(nn.Module):
    """Has buffers of several kinds, one of them not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.mean: Tensor
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Keep a running mean while training."""
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
        return (x - self.mean) * self.scale


class Writing(nn.Linear):
    """Writes its own weight in forward, one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        """Change the weight, then use it."""
        WRITES[self.how](self.weight)
        return super().forward(x)


def _write_numpy(weight: Tensor) -> None:
    array = weight.detach().numpy()
    array *= 0.5


def _write_storage(weight: Tensor) -> None:
    storage = weight.untyped_storage()
    offset = weight.storage_offset() * weight.element_size()
    storage[offset + 1] = 0


def _write_dlpack(weight: Tensor) -> None:
    torch.utils.dlpack.from_dlpack(weight.detach()).mul_(0.5)


def _write_in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def _write_data(weight: Tensor) -> None:
    weight.data.mul_(0.5)


def _write_foreach(weight: Tensor) -> None:
    torch._foreach_mul_([weight.detach()], 0.5)


def _write_fused(weight: Tensor) -> None:
    gradient = [torch.ones_like(weight)]
    torch._fused_sgd_(
        [weight.detach()],
        gradient,
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )


WRITES = {
    "numpy": _write_numpy,
    "storage": _write_storage,
    "dlpack": _write_dlpack,
    "in place": _write_in_place,
    "data": _write_data,
    "foreach": _write_foreach,
    "fused": _write_fused,
}


class Keeping(nn.Linear):
    """Keeps an alias of its weight, and something made of it, from one call to the next."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.former: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Use the former call's alias as well."""
        y = super().forward(x) + sum(each.sum() * 0.01 for each in self.former)
        self.former = [self.weight.detach(), self.weight.data[0]]
        return y


class Product(torch.autograd.Function):
    """A user's own function, which saves a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401 - torch's own context
        """Multiply."""
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Give both gradients."""
        x, weight = ctx.saved_tensors
        return slope @ weight.t(), x.t() @ slope


class Custom(Weight):
    """Calls a user's own autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return cast("Tensor", Product.apply(x, self.weight))  # type: ignore[no-untyped-call]


class Checkpointed(nn.Module):
    """Computes a part again in backward."""

    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Call it under a checkpoint."""
        from torch.utils.checkpoint import checkpoint

        return cast("Tensor", checkpoint(self.inner, x, use_reentrant=self.use_reentrant))


def checkpointed_by_hooks(module: nn.Module) -> nn.Module:
    """Let hooks of a module begin and end its checkpoint: inside hooks that are there before."""
    from torch.distributed._composable.checkpoint_activation import checkpoint

    return checkpoint(module)


class Called(nn.Module):
    """Calls its child with other parameters than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Call the child with twice its parameters."""
        changed = {name: p * 2 for name, p in self.child.named_parameters()}
        return cast("Tensor", torch.func.functional_call(self.child, changed, (x,)))


PARTS: dict[str, str] = {
    "linear": "nn.Linear(W, W, bias=<a:True|False>)",
    "activation": "nn.<a:GELU|ReLU>()",
    "block": "Block()",
    "norm": "nn.<a:LayerNorm(W)|BatchNorm1d(W)|GroupNorm(2, W)|RMSNorm(W)>",
    "embedding": "Lookup(nn.Embedding(8, W<a:|, padding_idx=0|, scale_grad_by_freq=True>))",
    "embedding renormed": "Lookup(nn.Embedding(8, W, max_norm=0.5))",
    "embedding sparse": "Lookup(nn.Embedding(8, W, sparse=True))",
    "conv": "Around(nn.Conv1d(4, 4, 3, padding=1<a:|, groups=2>), 4, -1)",
    "channels last": "Around(nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last), 4, 2, 2)",
    "rnn": "Around(nn.<a:LSTM|GRU|RNN>(8, 8, batch_first=True, num_layers=<b:1|2>), 2, 8)",
    "attention": "Around(Attention(), 2, 8)",
    "encoder": "Around(nn.TransformerEncoderLayer(8, 2, 16, <a:0.0|0.1>, batch_first=True, norm_first=<b:False|True>), 2, 8)",
    "transformer": "Around(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2<a:|, enable_nested_tensor=False>), 2, 8)",
    "dropout": "nn.Dropout(0.5)",
    "nested": "nn.Sequential(nn.Linear(W, W), nn.Sequential(nn.Tanh(), nn.Linear(W, W)))",
    "twice": "Twice(nn.Linear(W, W))",
    "either": "Either()",
    "reader": "Reader()",
    "frozen": "nn.Linear(W, W).requires_grad_(False)",
    "buffers": "Buffers()",
    "empty": "Empty()",
    "zero-d": "Weight(torch.tensor(1.5))",
    "transposed": "Weight(torch.randn(W, W).t())",
    "strided": "Weight(torch.randn(W, 2 * W)[:, ::2])",
    "expanded": "Weight(torch.randn(1, W).expand(W, W), is_trained=False)",
    "complex": "Weight(torch.randn(W, dtype=torch.complex64), is_trained=<a:False|True>)",
    "integer": "Weight(torch.arange(W), is_trained=False)",
    "own class": "Weight(torch.randn(W, W), kind=Own)",
    "dtype": "Cast(nn.Linear(W, W), torch.<a:bfloat16|float64>)",
    "keeping": "Keeping()",
    "custom function": "Custom(torch.randn(W, W))",
    "checkpointed": "Checkpointed(nn.Linear(W, W), use_reentrant=<a:False|True>)",
    "checkpointed by hooks": "checkpointed_by_hooks(<a:nn.Linear(W, W)|Block()>)",
    "functional": "Called()",
    **{f"writing {how}": f"Writing({how!r})" for how in WRITES},
    "weight norm": "torch.nn.utils.parametrizations.weight_norm(nn.Linear(W, W))",
    "old weight norm": "old(torch.nn.utils.weight_norm, nn.Linear(W, W))",
    "spectral norm": "torch.nn.utils.parametrizations.spectral_norm(nn.Linear(W, W))",
    "orthogonal": "torch.nn.utils.parametrizations.orthogonal(nn.Linear(W, W))",
    "traced": "old(torch.jit.trace, nn.Linear(W, W), torch.randn(2, W))",
    "scripted": "old(torch.jit.script, nn.Linear(W, W))",
    "compiled": "torch.compile(nn.Linear(W, W), backend='eager')",
}


class Attention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        return cast("Tensor", self.attention(x, x, x)[0])


KNOTS: dict[str, str] = {
    "tied": "tie(m, <a>, <b>)",
    "module twice": "m.append(m[<a> % len(m)])",
    "storage shared": "share(m, <a>, <b>)",
    "flat": "t.keep['flat'] = flatten(m)",
    "frozen": "t.p(<a>).requires_grad_(False)",
    "gradient there": "p = t.p(<a>); p.grad = torch.ones_like(p) if plain(p) else None",
    "zero gradients there": "for p in t.trained(): p.grad = torch.zeros_like(p)",
    "evaluating": "m[<a> % len(m)].eval()",
    "buffer alias": "m.register_buffer('alias', t.p(<a>).detach())",
    "alias kept": "t.keep['kept'] = t.p(<a>).data",
    "initialised": "nn.init.<a:normal_|zeros_|ones_|uniform_>(t.p(<b>))",
}


def plain(tensor: Tensor) -> bool:
    """Say whether any optimizer can step it."""
    return tensor.is_floating_point() and tensor.is_contiguous()


def slots(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where parameters are: modules and names."""
    return [
        (module, name)
        for module in model.modules()
        for name in module._parameters
        if module._parameters[name] is not None
    ]


def like(model: nn.Module, a: int, b: int) -> tuple[tuple[nn.Module, str], tuple[nn.Module, str]] | None:
    """Return two places of which the second has a parameter like the first's."""
    places = slots(model)
    if not places:
        return None
    one = places[a % len(places)]
    mine = one[0]._parameters[one[1]]
    assert mine is not None
    others = [
        (module, name)
        for module, name in places
        if (p := module._parameters[name]) is not mine
        and p is not None
        and (p.shape, p.dtype, p.requires_grad, type(p))
        == (mine.shape, mine.dtype, mine.requires_grad, type(mine))
    ]
    return (one, others[b % len(others)]) if others else None


def tie(model: nn.Module, a: int, b: int) -> None:
    """Make two places share one parameter."""
    if (pair := like(model, a, b)) is not None:
        (one, name), (other, its_name) = pair
        setattr(other, its_name, one._parameters[name])


def share(model: nn.Module, a: int, b: int) -> None:
    """Make two parameters share their storage, and stay two."""
    if (pair := like(model, a, b)) is not None:
        (one, name), (other, its_name) = pair
        mine, its = one._parameters[name], other._parameters[its_name]
        assert mine is not None
        assert its is not None
        its.data = mine.data


def flatten(model: nn.Module) -> Tensor:
    """Make all ordinary parameters views of one flat tensor, and return it."""
    chosen = [p for p in model.parameters() if p.dtype == torch.float32 and p.is_contiguous()]
    flat = torch.cat([torch.zeros(1), *(p.detach().flatten() for p in chosen)])
    offset = 1
    for p in chosen:
        p.data = flat[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
    return flat
