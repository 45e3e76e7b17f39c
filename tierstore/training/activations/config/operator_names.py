"""What operators are called: one word means the same in ``recompute_config`` and in ``swap_config``.

1. Operators are seen where autograd has them run.  A composite one, such as ``linear``, is not among those:
   others run for it, ``addmm`` or ``mm``.
2. A word of `WORDS` means all that runs for it, on any device.
3. Any other ATen operator goes by its own name, without its overload, whatever library it is of.
4. A name for which nothing can be recomputed or swapped is idle, and `why_idle` says so before anything runs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from tierstore.torch_private import OpOverload, has_kernel, names_of_operators
from tierstore.training.activations.config.patterns import Pattern

_ATTENTION = (
    "_cudnn_attention_forward",
    "_efficient_attention_forward",
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_native_multi_head_attention",
    "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_triton_multi_head_attention",
    "_triton_scaled_dot_attention",
)
_BATCH_NORM = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_CROSS_ENTROPY = ("_log_softmax", "nll_loss_forward", "nll_loss2d_forward")
_NLL_LOSS = ("nll_loss_forward", "nll_loss2d_forward")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "dot")
_RECURRENT = ("_cudnn_rnn", "miopen_rnn")

WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # of composite operators, and what models call such things
        "adaptive_avg_pool1d": ("_adaptive_avg_pool2d", "mkldnn_adaptive_avg_pool2d", "mean"),
        "adaptive_avg_pool2d": ("_adaptive_avg_pool2d", "mkldnn_adaptive_avg_pool2d", "mean"),
        "adaptive_avg_pool3d": ("_adaptive_avg_pool3d", "mean"),
        "adaptive_max_pool1d": ("adaptive_max_pool2d",),
        "avg_pool1d": ("avg_pool2d",),
        "batch_norm": _BATCH_NORM,
        "bilinear": ("_trilinear",),
        "cdist": ("_cdist_forward", "_euclidean_dist"),
        "contiguous": ("clone",),
        "conv1d": ("convolution",),
        "conv2d": ("convolution",),
        "conv3d": ("convolution",),
        "conv_transpose1d": ("convolution",),
        "conv_transpose2d": ("convolution",),
        "conv_transpose3d": ("convolution",),
        "cross_entropy": _CROSS_ENTROPY,
        "cross_entropy_loss": _CROSS_ENTROPY,
        "cross": ("linalg_cross",),
        "ctc_loss": ("_ctc_loss", "_cudnn_ctc_loss", "miopen_ctc_loss"),
        "dropout": ("native_dropout",),
        "einsum": ("bmm",),
        "embedding_bag": ("_embedding_bag",),
        "flash_attention": _ATTENTION,
        "flatten": ("clone",),
        "fliplr": ("flip",),
        "flipud": ("flip",),
        "grid_sampler": ("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler"),
        "group_norm": ("native_group_norm",),
        "gru": (*_RECURRENT, "mkldnn_rnn_layer"),
        "gru_cell": ("_thnn_fused_gru_cell",),
        "instance_norm": _BATCH_NORM,
        "kron": ("mul",),
        "layer_norm": ("native_layer_norm",),
        "linear": ("mm", "bmm", "addmm", "mv"),
        "log_sigmoid": ("log_sigmoid_forward",),
        "log_softmax": ("_log_softmax",),
        "lstm": (*_RECURRENT, "mkldnn_rnn_layer"),
        "lstm_cell": ("_thnn_fused_lstm_cell",),
        "matmul": _PRODUCTS,
        "max": ("maximum",),
        "max_pool1d": ("max_pool2d_with_indices", "mkldnn_max_pool2d"),
        "max_pool2d": ("max_pool2d_with_indices", "mkldnn_max_pool2d"),
        "max_pool3d": ("max_pool3d_with_indices", "mkldnn_max_pool3d"),
        "min": ("minimum",),
        "nll_loss": _NLL_LOSS,
        "nll_loss2d": _NLL_LOSS,
        "nll_loss_nd": _NLL_LOSS,
        "pad": (
            "constant_pad_nd",
            "reflection_pad1d",
            "reflection_pad2d",
            "reflection_pad3d",
            "replication_pad1d",
            "replication_pad2d",
            "replication_pad3d",
        ),
        "prelu": ("_prelu_kernel",),
        "ravel": ("clone",),
        "relu6": ("hardtanh",),
        "reshape": ("clone",),
        "rms_norm": ("_fused_rms_norm",),
        "rnn_relu": _RECURRENT,
        "rnn_tanh": _RECURRENT,
        "rrelu": ("rrelu_with_noise",),
        "scaled_dot_product_attention": _ATTENTION,
        "selu": ("elu",),
        "softmax": ("_softmax",),
        "tensordot": ("mm",),
        "to": ("_to_copy",),
        "type_as": ("_to_copy",),
        # of which each is another one's name
        "absolute": ("abs",),
        "arccos": ("acos",),
        "arccosh": ("acosh",),
        "arcsin": ("asin",),
        "arcsinh": ("asinh",),
        "arctan": ("atan",),
        "arctan2": ("atan2",),
        "arctanh": ("atanh",),
        "clip": ("clamp",),
        "column_stack": ("cat",),
        "concat": ("cat",),
        "concatenate": ("cat",),
        "divide": ("div",),
        "dstack": ("cat",),
        "fix": ("trunc",),
        "float_power": ("pow",),
        "ger": ("mul",),
        "greater": ("gt",),
        "greater_equal": ("ge",),
        "hstack": ("cat",),
        "less": ("lt",),
        "less_equal": ("le",),
        "multiply": ("mul",),
        "negative": ("neg",),
        "not_equal": ("ne",),
        "outer": ("mul",),
        "row_stack": ("cat",),
        "square": ("pow",),
        "subtract": ("sub",),
        "tile": ("repeat",),
        "true_divide": ("div",),
        "vstack": ("cat",),
        # of the reference's operators
        "batch_matmul": ("bmm", "baddbmm"),
        "bias_add": ("add",),
        "cast": ("_to_copy",),
        "flash_attention_score": _ATTENTION,
        "real_div": ("div",),
        "reduce_mean": ("mean",),
        "reduce_sum": ("sum",),
    }
)
"""What runs for a word, on whatever device, beside an operator that is called so."""


NOT_RUN = "the model has run, and no such operator in it; the pattern of a submodule means all that run there"
"""Said of names for which something else runs here: on another device, or with other arguments."""


def running_as(name: str) -> frozenset[str]:
    """Return the operators that a name means, without their overloads."""
    return frozenset((name, *WORDS.get(name, ())))


def names_of(operator: OpOverload) -> tuple[str, ...]:
    """Return what an operator is called, its own name first: ``("mul", "multiply", ...)``."""
    name = own_name(operator)
    return (name, *_words_by_operator().get(name, ()))


def own_name(operator: OpOverload) -> str:
    """Return an operator's own name, without library and overload."""
    return str(operator._schema.name).partition("::")[2]  # noqa: SLF001 - the one place that says it


def is_operator(name: str) -> bool:
    """Say whether an ATen operator is called so, be it by a word."""
    return name in _all_names()


def is_named(level: re.Pattern[str]) -> bool:
    """Say whether the last level of a pattern matches what an ATen operator is called."""
    return next(_names_in(level), None) is not None


def means_aten(pattern: Pattern, operator: OpOverload) -> bool:
    """Say whether a pattern of ATen operators means one; a word has no overload but ``default``."""
    words = names_of(operator)[1:] if operator.namespace == "aten" else ()
    texts = (str(operator), *(f"aten.{word}.default" for word in words))
    return any(map(pattern.matches_aten, texts))


@functools.lru_cache(maxsize=1024)
def why_idle(pattern: Pattern, *, in_place: bool) -> str | None:
    """Say why nothing comes of the operators that a pattern names; ``None``: something may.

    It is judged by what PyTorch has registered.  Of a last level that is no operator's name nothing is said,
    as it may be a submodule's; but a pattern of ATen operators is idle then.

    Args:
        pattern: of operators.
        in_place: whether what operators change in place counts as theirs.
    """
    level = pattern.levels[1] if pattern.is_aten else pattern.levels[-1]
    reasons = (_why_nothing(name, in_place) for name in _names_in(level))
    first = next(reasons, "no ATen operator is called so" if pattern.is_aten else None)
    return None if first is None or None in reasons else first


# ---------------------------------------------------------------------- what PyTorch has


@functools.cache
def _all_names() -> frozenset[str]:
    """Return all that ATen operators are called."""
    return frozenset((*_overloads(), *WORDS))


@functools.cache
def _overloads() -> Mapping[str, tuple[str, ...]]:
    """Return the overloads of each ATen operator, as attributes of `torch.ops.aten` have them."""
    found: dict[str, tuple[str, ...]] = {}
    for each in names_of_operators():
        library, _, rest = each.partition("::")
        name, _, overload = rest.partition(".")
        if library == "aten":
            found[name] = (*found.get(name, ()), overload or "default")
    return found


def _names_in(level: re.Pattern[str]) -> Iterator[str]:
    if level.pattern in _all_names():
        yield level.pattern  # at once, and no regular expression of another name
        return
    yield from (name for name in sorted(_all_names()) if level.fullmatch(name))


@functools.cache
def _words_by_operator() -> Mapping[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for word, operators in WORDS.items():
        for name in operators:
            found[name] = (*found.get(name, ()), word)
    return found


@functools.cache
def _why_nothing(name: str, in_place: bool) -> str | None:
    """Say why nothing comes of what ATen operators are called; ``None``: something may."""
    reasons = [
        _why_nothing_of_own(each, in_place) for each in (name, *WORDS.get(name, ())) if each in _overloads()
    ]
    return None if None in reasons else reasons[0]


def _why_nothing_of_own(name: str, in_place: bool) -> str | None:
    packet = getattr(torch.ops.aten, name, None)
    every = (getattr(packet, each, None) for each in _overloads()[name])  # some have a name in C++ alone
    operators = [each for each in every if each is not None and not _has_out(each)]
    if not any(map(_returns_tensors, operators)):
        return "it returns no tensor"
    if all(each.is_view for each in operators):
        return "it returns views, and a view is as what it shows"
    seen = [each for each in operators if not _is_composite(each) and not each.is_view]
    if not seen:
        return "PyTorch runs other operators for it, which depend on what it is given; name those"
    if not in_place and all(each._schema.is_mutable for each in seen):  # noqa: SLF001
        return "what an operator changes in place is kept"
    return None


def _is_composite(operator: OpOverload) -> bool:
    """Say whether autograd never sees an operator: those that it is made of run for it."""
    name = operator.name()
    if not has_kernel(name, "CompositeImplicitAutograd"):
        return False
    return not any(has_kernel(name, device) for device in ("CPU", "CUDA"))  # which would go before


def _has_out(operator: OpOverload) -> bool:
    """Say whether an operator writes into what it is handed for its result: autograd takes none of those."""
    arguments = operator._schema.arguments  # noqa: SLF001 - the one place that says it
    return any(each.kwarg_only and each.alias_info and each.alias_info.is_write for each in arguments)


def _returns_tensors(operator: OpOverload) -> bool:
    return any("Tensor" in str(each.type) for each in operator._schema.returns)  # noqa: SLF001
