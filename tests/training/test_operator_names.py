"""What operators are called in recompute_config and in swap_config: what nothing comes of is said.

The grid has every word of ours, and composite operators of PyTorch, each in a layer that runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.training.swap_models import config, operators
from tierstore.training import recompute, swap
from tierstore.training.activations.config.operator_names import WORDS

Run = Callable[[Tensor], Tensor]

SHAPE = (2, 32, 64)


class _Entry(nn.Module):
    """Has a parameter, so that all that comes after it has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SHAPE[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Layer(nn.Module):
    """Runs something in its own forward, and has what that returns saved."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.entry, self.run = _Entry(), run

    def forward(self, x: Tensor) -> Tensor:
        made = self.run(self.entry(x))
        if made.dtype is torch.bool:
            return torch.where(made, x * self.entry.scale, 0)
        return torch.sin(made)


def _model(run: Run) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(_Layer(run))


def _train(model: nn.Module) -> None:
    loss = model(torch.rand(SHAPE, generator=torch.Generator().manual_seed(1))).sum()
    loss.backward()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# ---------------------------------------------------------------------- the grid


def _image(x: Tensor) -> Tensor:
    pieces: Tensor = x.unflatten(1, (4, 8))
    return pieces


def _volume(x: Tensor) -> Tensor:
    pieces: Tensor = x.unflatten(1, (4, 8)).unflatten(-1, (8, 8))
    return pieces


def _heads(x: Tensor) -> Tensor:
    pieces: Tensor = x.unflatten(-1, (4, 16)).transpose(1, 2)
    return pieces


def _attention(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(_heads(x), _heads(x), _heads(x))


def _vectors(x: Tensor) -> Tensor:
    pieces: Tensor = x[..., :63].unflatten(-1, (21, 3))
    return pieces


def _ctc(x: Tensor) -> Tensor:
    targets, lengths = torch.ones(2, 10, dtype=torch.long), torch.tensor([32, 32])
    return torch.ctc_loss(x.transpose(0, 1), targets, lengths, torch.tensor([10, 10]))


def _weights(gates: int) -> list[Tensor]:
    return [torch.rand(gates * 64, 64), torch.rand(gates * 64, 64)]


def _lstm(x: Tensor) -> Tensor:
    state = [torch.zeros(1, 2, 64), torch.zeros(1, 2, 64)]
    output, _, _ = torch.lstm(x, state, _weights(4), False, 1, 0.0, True, False, True)  # noqa: FBT003
    return output


def _recurrent(run: Callable[..., tuple[Tensor, Tensor]], gates: int) -> Run:
    def forward(x: Tensor) -> Tensor:
        state = torch.zeros(1, 2, 64)
        return run(x, state, _weights(gates), False, 1, 0.0, True, False, True)[0]  # noqa: FBT003

    return forward


_NO_CLASS = torch.zeros(1024, dtype=torch.long)

GRID: dict[str, Run] = {
    "adaptive_avg_pool1d": lambda x: functional.adaptive_avg_pool1d(x, 32),
    "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(_image(x), (8, 32)),
    "adaptive_avg_pool3d": lambda x: functional.adaptive_avg_pool3d(_volume(x), (8, 4, 4)),
    "adaptive_max_pool1d": lambda x: functional.adaptive_max_pool1d(x, 32),
    "avg_pool1d": lambda x: functional.avg_pool1d(x, 2),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "bilinear": lambda x: functional.bilinear(x, x, torch.ones(16, 64, 64)),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "conv1d": lambda x: functional.conv1d(x, torch.ones(32, 32, 3)),
    "conv2d": lambda x: functional.conv2d(_image(x), torch.ones(4, 4, 3, 3)),
    "conv3d": lambda x: functional.conv3d(_volume(x), torch.ones(4, 4, 3, 3, 3)),
    "conv_transpose1d": lambda x: functional.conv_transpose1d(x, torch.ones(32, 32, 3)),
    "conv_transpose2d": lambda x: functional.conv_transpose2d(_image(x), torch.ones(4, 4, 3, 3)),
    "conv_transpose3d": lambda x: functional.conv_transpose3d(_volume(x), torch.ones(4, 4, 3, 3, 3)),
    "cross": lambda x: torch.cross(_vectors(x), _vectors(x).roll(1, -1), dim=-1),
    "cross_entropy": lambda x: functional.cross_entropy(x.flatten(0, 1), _NO_CLASS[:64]),
    "cross_entropy_loss": lambda x: functional.cross_entropy(x.flatten(0, 1), _NO_CLASS[:64]),
    "ctc_loss": _ctc,
    "dropout": lambda x: functional.dropout(x, 0.5),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "embedding_bag": lambda x: functional.embedding_bag(_NO_CLASS.view(512, 2), x.flatten(0, 1)),
    "flash_attention": _attention,
    "flatten": lambda x: x.transpose(1, 2).flatten(1),
    "fliplr": torch.fliplr,
    "flipud": torch.flipud,
    "grid_sampler": lambda x: functional.grid_sample(_image(x), torch.rand(2, 8, 64, 2), align_corners=False),
    "group_norm": lambda x: functional.group_norm(x, 4),
    "gru": _recurrent(torch.gru, 3),
    "gru_cell": lambda x: torch.gru_cell(x[0], torch.zeros(32, 64), *_weights(3)),
    "instance_norm": functional.instance_norm,
    "kron": lambda x: torch.kron(x[0], torch.ones(2, 2)),
    "layer_norm": lambda x: functional.layer_norm(x, (64,)),
    "linear": lambda x: functional.linear(x, torch.ones(64, 64)),
    "log_sigmoid": functional.logsigmoid,
    "log_softmax": lambda x: x.log_softmax(-1),
    "lstm": _lstm,
    "lstm_cell": lambda x: torch.lstm_cell(x[0], [torch.zeros(32, 64)] * 2, *_weights(4))[0],
    "matmul": lambda x: x @ torch.ones(64, 64),
    "max": lambda x: torch.max(x, x.flip(0)),
    "max_pool1d": lambda x: functional.max_pool1d(x, 2),
    "max_pool2d": lambda x: functional.max_pool2d(_image(x), 2),
    "max_pool3d": lambda x: functional.max_pool3d(_volume(x), (1, 2, 1)),
    "min": lambda x: torch.min(x, x.flip(0)),
    "nll_loss": lambda x: torch.ops.aten.nll_loss(x.view(1024, 4), _NO_CLASS, None, 0),
    "nll_loss2d": lambda x: torch.ops.aten.nll_loss2d(
        x.view(2, 4, 32, 16), _NO_CLASS.view(2, 32, 16), None, 0
    ),
    "nll_loss_nd": lambda x: functional.nll_loss(x.view(1024, 4), _NO_CLASS, reduction="none"),
    "pad": lambda x: functional.pad(x, (1, 1)),
    "prelu": lambda x: functional.prelu(x, torch.tensor([0.5])),
    "ravel": lambda x: x.transpose(1, 2).ravel(),
    "relu6": functional.relu6,
    "reshape": lambda x: x.transpose(1, 2).reshape(2, -1),
    "rms_norm": lambda x: functional.rms_norm(x, (64,)),
    "rnn_relu": _recurrent(torch.rnn_relu, 1),
    "rnn_tanh": _recurrent(torch.rnn_tanh, 1),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "scaled_dot_product_attention": _attention,
    "selu": functional.selu,
    "softmax": lambda x: x.softmax(-1),
    "tensordot": lambda x: torch.tensordot(x, torch.ones(64, 64), dims=1),
    "to": lambda x: x.to(torch.bfloat16),
    "type_as": lambda x: x.type_as(torch.ones(1, dtype=torch.bfloat16)),
    # another one's name
    "absolute": torch.absolute,
    "arccos": torch.arccos,
    "arccosh": torch.arccosh,
    "arcsin": torch.arcsin,
    "arcsinh": torch.arcsinh,
    "arctan": torch.arctan,
    "arctan2": lambda x: torch.arctan2(x, x.flip(0)),
    "arctanh": torch.arctanh,
    "clip": lambda x: x.clip(-1, 1),
    "column_stack": lambda x: torch.column_stack([x, x]),
    "concat": lambda x: torch.concat([x, x]),
    "concatenate": lambda x: torch.concatenate([x, x]),
    "divide": lambda x: x.divide(3),
    "dstack": lambda x: torch.dstack([x, x]),
    "fix": torch.fix,
    "float_power": lambda x: x.float_power(2),
    "ger": lambda x: torch.ger(x[0, 0], x[0, 1]),
    "greater": lambda x: x.greater(0),
    "greater_equal": lambda x: x.greater_equal(0),
    "hstack": lambda x: torch.hstack([x, x]),
    "less": lambda x: x.less(0),
    "less_equal": lambda x: x.less_equal(0),
    "multiply": lambda x: x.multiply(3),
    "negative": torch.negative,
    "not_equal": lambda x: x.not_equal(0),
    "outer": lambda x: torch.outer(x[0, 0], x[0, 1]),
    "row_stack": lambda x: torch.vstack([x, x]),
    "square": torch.square,
    "subtract": lambda x: x.subtract(3),
    "tile": lambda x: x.tile(2),
    "true_divide": lambda x: x.true_divide(3),
    "vstack": lambda x: torch.vstack([x, x]),
    # the reference's
    "batch_matmul": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "bias_add": lambda x: x + torch.ones(64),
    "cast": lambda x: x.bfloat16(),
    "flash_attention_score": _attention,
    "real_div": lambda x: x / 3,
    "reduce_mean": lambda x: x.unflatten(-1, (2, 32)).mean(-2),
    "reduce_sum": lambda x: x.unflatten(-1, (2, 32)).sum(-2),
}

OTHERS_ON_CPU = {"dropout", "gru", "gru_cell", "lstm", "lstm_cell", "rms_norm", "rnn_relu", "rnn_tanh"}
"""For these a CPU may run operators that nobody would look for: that is said."""


def test_the_grid_has_every_word() -> None:
    assert sorted(GRID) == sorted(WORDS)


@pytest.mark.parametrize("is_aten", [False, True])
@pytest.mark.parametrize("word", GRID)
def test_a_word_recomputes_what_runs_for_it_or_it_is_said_by_name(
    caplog: pytest.LogCaptureFixture, word: str, is_aten: bool
) -> None:
    pattern = rf"aten\.{word}" if is_aten else word
    model = _model(GRID[word])
    with recompute(model, {"select_recompute": [pattern]}, layers="") as run:
        _train(model)
    is_idle = run.stats().replaced == 0
    assert not is_idle or word in OTHERS_ON_CPU or word == "rrelu"  # which writes its noise in place
    said = _warnings(caplog)
    assert any(f"'{pattern}' recomputes nothing" in line for line in said) is is_idle, said


@pytest.mark.parametrize("is_aten", [False, True])
@pytest.mark.parametrize("word", GRID)
def test_a_word_swaps_what_runs_for_it_or_it_is_said_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, word: str, is_aten: bool
) -> None:
    pattern = rf"aten\.{word}" if is_aten else word
    model = _model(GRID[word])
    with swap(model, config(tmp_path, operators(pattern)), layers="") as active:
        _train(model)
        is_idle = active.stats().activations.kept == 0
    assert not is_idle or word in OTHERS_ON_CPU
    said = _warnings(caplog)
    assert any(f"'{pattern}' swaps nothing" in line for line in said) is is_idle, said


# ---------------------------------------------------------------------- what no name of ours is for

OTHERS = "PyTorch runs other operators for it, which depend on what it is given; name those"
VIEWS = "it returns views, and a view is as what it shows"
IN_PLACE = "what an operator changes in place is kept"

IDLE: dict[str, tuple[Run, str]] = {
    "alpha_dropout": (lambda x: functional.alpha_dropout(x, 0.5), OTHERS),
    "chunk": (lambda x: x.chunk(2)[0], VIEWS),
    "cosine_similarity": (lambda x: functional.cosine_similarity(x, x + 1, 0), OTHERS),
    "kl_div": (lambda x: functional.kl_div(x, x, reduction="none"), OTHERS),
    "linalg_norm": (lambda x: torch.linalg.norm(x, dim=0), OTHERS),
    "meshgrid": (lambda x: torch.meshgrid(x[0, 0], x[0, 1], indexing="ij")[0], OTHERS),
    "quantile": (lambda x: torch.quantile(x, 0.5, 0), OTHERS),
    "size": (lambda x: x + x.size(0), "it returns no tensor"),
    "transpose": (lambda x: x.transpose(0, 1), VIEWS),
    "trapezoid": (torch.trapezoid, OTHERS),
    "view": (lambda x: x.view(64, 64), VIEWS),
}


@pytest.mark.parametrize("is_aten", [False, True])
@pytest.mark.parametrize("name", IDLE)
def test_a_name_that_nothing_comes_of_is_said_with_the_reason_before_anything_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, is_aten: bool
) -> None:
    run, why = IDLE[name]
    pattern = rf"aten\.{name}" if is_aten else name
    model = _model(run)
    with caplog.at_level(logging.INFO, "tierstore"):
        with recompute(model, {"select_recompute": [pattern]}, layers="") as again:
            assert _warnings(caplog) == [f"select_recompute '{pattern}' recomputes nothing: {why}"]
            _train(model)
            assert again.stats().replaced == 0
        caplog.clear()
        with swap(model, config(tmp_path, operators(pattern)), layers="") as active:
            assert _warnings(caplog) == [f"op_swap '{pattern}' swaps nothing: {why}"]
            _train(model)
            assert active.stats().activations.kept == 0
    assert len(_warnings(caplog)) == 1
    assert not any(line.startswith("Set ") for line in caplog.messages)


def test_what_is_changed_in_place_can_be_swapped_and_not_recomputed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _model(lambda x: (x + 1).sigmoid_())
    with recompute(model, {"select_recompute": ["sigmoid_"]}, layers=""):
        assert _warnings(caplog) == [f"select_recompute 'sigmoid_' recomputes nothing: {IN_PLACE}"]
    caplog.clear()
    with swap(model, config(tmp_path, operators("sigmoid_")), layers="") as active:
        _train(model)
        assert active.stats().activations.kept == 1
    assert not _warnings(caplog)


@pytest.mark.parametrize(
    ("pattern", "is_said"),
    [
        (r"aten\.sofmax", True),
        (r"aten\.(chunk|view)", True),
        (r"aten\.(chunk|_?softmax)", False),
        (r"aten\..*", False),
        ("aten.softmax", False),
        ("aten.softmax.default", False),
        ("aten._softmax.default", False),
    ],
)
def test_a_pattern_of_aten_operators_may_be_idle_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pattern: str, is_said: bool
) -> None:
    model = _model(GRID["softmax"])
    with recompute(model, {"select_recompute": [pattern]}, layers="") as again:
        _train(model)
    with swap(model, config(tmp_path, operators(pattern)), layers="") as active:
        _train(model)
        assert (active.stats().activations.kept == 0) is is_said
    assert (again.stats().replaced == 0) is is_said
    assert len(_warnings(caplog)) == (2 if is_said else 0)


# ---------------------------------------------------------------------- what only a run shows


def test_an_operator_that_runs_in_no_layer_is_said_once_after_the_first_pass(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _model(GRID["dropout"])
    why = "the model has run, and no such operator in it; the pattern of a submodule means all that run there"
    names = ["sin", "dropout", "silu"]
    with (
        recompute(model, {"select_recompute": names}, layers=""),
        swap(model, config(tmp_path, operators(*names)), layers=""),
    ):
        assert not _warnings(caplog)
        with torch.no_grad():
            model(torch.rand(SHAPE))
        assert not _warnings(caplog)
        _train(model)
        _train(model)
    assert sorted(_warnings(caplog)) == [
        f"op_swap 'dropout' swaps nothing: {why}",
        f"op_swap 'silu' swaps nothing: {why}",
        f"select_recompute 'dropout' recomputes nothing: {why}",
        f"select_recompute 'silu' recomputes nothing: {why}",
    ]


def test_an_operator_that_runs_in_one_of_its_layers_is_not_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(_Layer(functional.silu), _Layer(functional.gelu))
    with (
        recompute(model, {"select_recompute": ["silu", r"aten\.gelu"]}, layers=""),
        swap(model, config(tmp_path, operators("silu", r"aten\.gelu")), layers=""),
    ):
        _train(model)
    assert not _warnings(caplog)


def test_a_pattern_that_means_a_submodule_as_well_is_not_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Named(_Layer):
        def __init__(self, run: Run) -> None:
            super().__init__(run)
            self.silu = nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.silu(self.entry(x)))

    model = nn.Sequential(_Layer(functional.gelu), Named(functional.gelu))
    with (
        recompute(model, {"select_recompute": ["silu"]}, layers="") as again,
        swap(model, config(tmp_path, operators("silu")), layers=""),
    ):
        _train(model)
    assert again.stats().replaced == 1
    assert not _warnings(caplog)


# ---------------------------------------------------------------------- exclusions


def _runs_of(model: nn.Module, operator: object) -> int:
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        runs = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
            self.runs += func is operator
            return func(*args, **(kwargs or {}))

    with Count() as count:  # type: ignore[no-untyped-call]
        _train(model)
    return int(count.runs)


@pytest.mark.parametrize("pattern", ["linear", r"aten\.linear", "matmul", "aten.mm"])
def test_a_word_excludes_what_runs_for_it(caplog: pytest.LogCaptureFixture, pattern: str) -> None:
    model = _model(GRID["linear"])
    once = _runs_of(model, torch.ops.aten.mm.default)
    with recompute(model, {"recompute": True}, layers=""):
        assert _runs_of(model, torch.ops.aten.mm.default) == once + 1
    with recompute(model, {"recompute": True, "select_recompute_exclude": [pattern]}, layers=""):
        assert _runs_of(model, torch.ops.aten.mm.default) == once
    assert not _warnings(caplog)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("liner", "select_recompute_exclude: no layer has a submodule or an operator 'liner'"),
        (
            r"aten\.liner",
            r"select_recompute_exclude 'aten\.liner' keeps nothing: no ATen operator is called so",
        ),
        ("kl_div", f"select_recompute_exclude 'kl_div' keeps nothing: {OTHERS}"),
    ],
)
def test_an_exclusion_that_keeps_nothing_is_said(
    caplog: pytest.LogCaptureFixture, pattern: str, said: str
) -> None:
    config = {"recompute": True, "select_recompute_exclude": [pattern]}
    with recompute(_model(GRID["linear"]), config, layers=""):
        pass
    assert _warnings(caplog) == [said]
