"""Fills a parameter that has no ``weight_loader``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ONE_ELEMENT = (torch.Size([]), torch.Size([1]))


def fits(target: torch.Size, source: torch.Size) -> bool:
    """Return whether a tensor of one shape fills one of another: equal shapes, or one element each.

    >>> fits(torch.Size([1]), torch.Size([])), fits(torch.Size([2]), torch.Size([1]))
    (True, False)
    """
    return target == source or (target in _ONE_ELEMENT and source in _ONE_ELEMENT)


def default_weight_loader(param: Tensor, loaded_weight: Any) -> None:
    """Fill a parameter with a tensor of its shape, as :func:`ptsave.load_model` does by itself.

    A custom ``weight_loader`` can call it with the part of the tensor that it has selected.

    Parameters
    ----------
    param : torch.Tensor
        The parameter.
    loaded_weight : torch.Tensor or WeightSlice
        The values, of any dtype and on any device.  One element has the shape ``()`` or ``(1,)``.

    Raises
    ------
    RuntimeError
        If the shapes differ.

    Examples
    --------
    >>> import torch, ptsave
    >>> bias = torch.nn.Parameter(torch.zeros(2))
    >>> ptsave.default_weight_loader(bias, torch.arange(4.0)[2:])
    >>> bias.tolist()
    [2.0, 3.0]
    """
    if not fits(param.shape, loaded_weight.shape):
        raise RuntimeError(
            f"size mismatch: a weight of shape {loaded_weight.shape} does not fit a parameter of "
            f"shape {param.shape}"
        )
    with torch.no_grad():
        param.copy_(loaded_weight[...].reshape(param.shape))
