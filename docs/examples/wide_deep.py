"""Wide&Deep, the model of few operators and huge tables: its net, its loss, its two groups of parameters.

A line of data is 39 ids with a weight each.  The *wide* part is a linear model: a table of one weight an
id.  The *deep* part is a multi-layer perceptron over the rows of a second table.  Their sum is the logit of
a click.  The tables hold nearly all parameters and do nearly no computing; so they belong to host memory.

(Cheng et al., Wide & Deep Learning for Recommender Systems, 2016; sizes and details are of MindSpore's.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tierstore.nn import EmbeddingTable, Normal

Tables = Callable[[int, int], nn.Module]
"""Makes a table of ``(rows, width)``: ids of any shape in, rows out.  Its parameter is called ``weight``."""

PLACEMENT = {"wide_table": "cpu", "deep_table": "cpu"}
"""What of PyTorch's own tables computes on the host: both lookups."""

INITIAL_DEVIATION = 0.01
L2 = 8e-5


@dataclass(frozen=True)
class WideDeepShape:
    """What a model is made of.

    Attributes:
        vocabulary: how many ids there are: rows of both tables.
        fields: ids in a line.
        dimension: width of the deep table.
        hidden: widths of the perceptron's hidden layers.
        compute_dtype: what the perceptron computes in; its parameters are ``float32`` in any case.
    """

    vocabulary: int = 200_000
    fields: int = 39
    dimension: int = 80
    hidden: tuple[int, ...] = (1024, 512, 256, 128)
    compute_dtype: torch.dtype = torch.float32

    @property
    def layers(self) -> tuple[int, ...]:
        """How many values go into each layer of the perceptron, and out of the last."""
        return (self.fields * self.dimension, *self.hidden, 1)

    @property
    def table_bytes(self) -> int:
        """Bytes of both tables, without the optimizers' state."""
        return self.vocabulary * (1 + self.dimension) * 4

    @property
    def dense_parameters(self) -> int:
        """How many parameters are in no table."""
        return 1 + sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(self.layers))


def halved(width: int) -> tuple[int, ...]:
    """Return four widths of hidden layers, each half of the one before.

    Raises:
        ValueError: the width cannot be halved three times.
    """
    if width < 8 or width % 8:
        raise ValueError(f"the width must be a multiple of 8, as it is halved three times, not {width}")
    return tuple(width >> halvings for halvings in range(4))


class CastLinear(nn.Linear):
    """A linear layer that computes in another type than that of its parameters.

    Args:
        inputs: values in.
        outputs: values out.
        compute_dtype: what is multiplied and added, and what comes out.
    """

    def __init__(self, inputs: int, outputs: int, compute_dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs)
        self.compute_dtype = compute_dtype

    def reset_parameters(self) -> None:
        """Draw weight and bias from the same normal distribution."""
        for parameter in (self.weight, self.bias):
            nn.init.normal_(parameter, std=INITIAL_DEVIATION)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, inputs)`` to ``(batch, outputs)``."""
        values = (each.to(self.compute_dtype) for each in (x, self.weight, self.bias))
        return functional.linear(*values)


def perceptron(layers: tuple[int, ...], compute_dtype: torch.dtype) -> nn.Sequential:
    """Return linear layers with a ReLU after each but the last."""
    modules: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(layers):
        modules += [CastLinear(inputs, outputs, compute_dtype), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


@dataclass(frozen=True)
class TieredTables:
    """Makes tables whose rows lie in the tiers of a run, and are brought as batches need them.

    Attributes:
        seed: of the rows at first.
        target: where a batch's rows are looked up and stepped: ``"CPU"`` or ``"device"``.
        cache_rows: of each table that stay on the device.
    """

    seed: int = 0
    target: str = "CPU"
    cache_rows: int = 0

    def __call__(self, rows: int, width: int) -> EmbeddingTable:
        """Return a table; that of another width has other rows."""
        return EmbeddingTable(
            rows,
            width,
            target=self.target,
            cache_rows=self.cache_rows,
            init=Normal(INITIAL_DEVIATION),
            seed=self.seed * 2**16 + width,
        )


@dataclass(frozen=True)
class PlainTables:
    """Makes tables of PyTorch, all of them in memory, with the rows that `TieredTables` begin with.

    Attributes:
        seed: of the rows at first.
        is_sparse: whether gradients name the rows that they are of.
    """

    seed: int = 0
    is_sparse: bool = True

    def __call__(self, rows: int, width: int) -> nn.Embedding:
        """Return a table; that of another width has other rows."""
        values = TieredTables(self.seed)(rows, width).rows(torch.arange(rows))
        table: nn.Embedding = nn.Embedding.from_pretrained(values, freeze=False, sparse=self.is_sparse)
        return table


class WideDeep(nn.Module):
    """The model.

    Args:
        shape: its sizes.
        tables: makes both tables, the wide one first.
    """

    def __init__(self, shape: WideDeepShape, tables: Tables) -> None:
        super().__init__()
        self.wide_table = tables(shape.vocabulary, 1)
        self.wide_bias = nn.Parameter(torch.empty(1).normal_(std=INITIAL_DEVIATION))
        self.deep_table = tables(shape.vocabulary, shape.dimension)
        self.deep_layers = perceptron(shape.layers, shape.compute_dtype)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the logit of each line, ``(batch,)``.

        Args:
            ids: ``(batch, fields)``, whole numbers below the vocabulary.
            weights: ``(batch, fields)``, what the rows of the ids are multiplied by.
        """
        factors = weights.unsqueeze(-1)
        wide = (self.wide_table(ids) * factors).sum(1) + self.wide_bias
        deep = self.deep_layers((self.deep_table(ids) * factors).flatten(1))
        logits: Tensor = (wide + deep.float()).squeeze(1)
        return logits


@dataclass(frozen=True)
class Losses:
    """What a batch costs.

    Attributes:
        wide: mean cross-entropy of the clicks.
        deep: the same, and the penalty on the deep table where there is one.
    """

    wide: Tensor
    deep: Tensor


def losses_of(model: WideDeep, logits: Tensor, labels: Tensor, l2: float = 0.0) -> Losses:
    """Return the losses of a batch.

    Args:
        model: what gave the logits.
        logits: ``(batch,)``.
        labels: ``(batch,)``, 0 or 1.
        l2: times half the sum of the deep table's squares.  That is a sum over the whole table, with a
            gradient for every row: for tables in memory.
    """
    wide = functional.binary_cross_entropy_with_logits(logits, labels)
    if not l2:
        return Losses(wide, wide)
    (table,) = model.deep_table.parameters()
    return Losses(wide, wide + l2 / 2 * table.square().sum())


@dataclass(frozen=True)
class Groups:
    """The parameters of a model by who steps them.

    Attributes:
        wide: FTRL's, which makes weights of rare ids exactly 0.
        deep: LazyAdam's.
    """

    wide: list[nn.Parameter]
    deep: list[nn.Parameter]


def groups_of(model: WideDeep, *, is_bias_wide: bool = False) -> Groups:
    """Say which parameters are FTRL's.

    The original chooses by name, and its bias goes to one or the other with how the net is nested.

    Args:
        model: whose parameters.
        is_bias_wide: whether the wide part's bias is FTRL's as well.
    """
    groups = Groups([], [])
    for name, parameter in model.named_parameters():
        is_wide = name.startswith("wide_table") or (name == "wide_bias" and is_bias_wide)
        (groups.wide if is_wide else groups.deep).append(parameter)
    return groups
