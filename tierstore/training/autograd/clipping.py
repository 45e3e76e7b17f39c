"""The norm of gradients of which some are sparse, and gradients that are scaled to one.

PyTorch's functions take dense ones only.  The norm of a sparse gradient is that of its values once those of
one row are added up, which is the norm of the dense one; it is scaled so, and is coalesced afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Do as ``torch.nn.utils.clip_grad_norm_``; see above for what it does not take.

    Args:
        parameters: whose gradients.
        max_norm: that they have together at most, afterwards.
        norm_type: the exponent.

    Returns:
        What their norm was.
    """
    parameters = list(parameters)
    clipped: list[torch.Tensor] = []
    sparse: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.sparse_coo:
            clipped.append(parameter)
            continue
        gradient = gradient.coalesce()
        values = gradient.values().clone()
        stand_in = values.detach()
        stand_in.grad = values
        clipped.append(stand_in)
        sparse.append((parameter, gradient, values))
    norm = torch.nn.utils.clip_grad_norm_(clipped, max_norm, norm_type)
    for parameter, gradient, values in sparse:
        parameter.grad = torch.sparse_coo_tensor(
            gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
        )
    return norm
