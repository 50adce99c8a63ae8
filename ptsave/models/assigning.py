"""New tensors that replace a model's own once they are read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ptsave.models.weight_plan import Delivery, WeightPlan
from ptsave.support.torch_names import is_distributed_tensor

_CPU = torch.device("cpu")


class Assignment:
    """``load_state_dict(assign=True)`` for tensors read from a file.

    `names` holds all names of the replaced tensors, and `dtype` converts only floating-point ones.
    A parameter that requires gradients cannot become a tensor of integers, which raises
    RuntimeError.
    """

    def __init__(self, model: nn.Module, plan: WeightPlan, dtype: torch.dtype | None) -> None:
        self._model = model
        self._dtype = dtype
        loaders = plan.loaders
        self._deliveries: list[tuple[Delivery, list[str]]] = []
        self.names: set[str] = set()
        for delivery in plan.deliveries:
            tensor = plan.tensors.by_name[delivery.name]
            is_filled = delivery.name in loaders or delivery.place is not None
            if is_filled or is_distributed_tensor(tensor):
                continue
            dtype_of = self._dtype_of(delivery)
            if tensor.requires_grad and not (dtype_of.is_floating_point or dtype_of.is_complex):
                raise RuntimeError(
                    f'"{delivery.name}" requires gradients and cannot become a tensor of '
                    f"{dtype_of}: load it without assign=True"
                )
            names = plan.tensors.tied_names(delivery.name)
            self._deliveries.append((delivery, names))
            self.names.update(names)
        self._new: dict[str, Tensor] = {}

    def _dtype_of(self, delivery: Delivery) -> torch.dtype:
        stored = delivery.entry.dtype
        return self._dtype if self._dtype is not None and stored.is_floating_point else stored

    def allocate(
        self, tensors: Mapping[str, Tensor], device: torch.device | str | int | None
    ) -> dict[str, Tensor]:
        """Return the new tensors by name, without values, on `device` or where the old ones are."""
        for delivery, names in self._deliveries:
            old = tensors[delivery.name]
            place = device if device is not None else _CPU if old.is_meta else old.device
            new = torch.empty(old.shape, dtype=self._dtype_of(delivery), device=place)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            self._new.update(dict.fromkeys(names, new))
        return self._new

    def put(self) -> None:
        """Put the new tensors, which hold their values by now, into the model."""
        for name, new in self._new.items():
            owner, _, own_name = name.rpartition(".")
            setattr(self._model.get_submodule(owner), own_name, new)
