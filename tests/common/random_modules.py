"""Trees of modules, and what goes through them, for hypothesis to choose."""

from __future__ import annotations

from typing import Any

from captured_runs import tensors_in
from hypothesis import strategies as st
from torch import Tensor, nn


class Block(nn.Module):
    """A module whose contents and outputs hypothesis chooses."""

    def __init__(self, children: list[nn.Module], times: int, style: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.times = times
        self.style = style

    def forward(self, x: Tensor, *, scale: Any = None) -> Any:
        for part in self.parts:
            for _ in range(self.times):
                x = first_tensor(part(x))
        if self.style == "in-place":
            return (x * 1).mul_(2)
        if self.style == "view":
            return {"rows": x[1:], "all": (x, None)}
        if self.style == "same":
            return [x, x]
        return x


def first_tensor(value: Any) -> Tensor:
    tensors = [tensor for _, tensor in tensors_in(value)]
    return tensors[-1]


leaves = st.sampled_from(["linear", "relu", "relu_", "identity", "dropout"])
trees: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.tuples(
        st.lists(inner, max_size=3),
        st.integers(1, 2),
        st.sampled_from(["plain", "in-place", "view", "same"]),
    ),
    max_leaves=8,
)


def build(tree: Any) -> nn.Module:
    kinds = {
        "linear": lambda: nn.Linear(3, 3),
        "relu": nn.ReLU,
        "relu_": lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)),
        "identity": nn.Identity,
        "dropout": lambda: nn.Dropout(0.3),
    }
    if isinstance(tree, str):
        return kinds[tree]()  # type: ignore[no-any-return,operator]
    children, times, style = tree
    return Block([build(child) for child in children], times, style)
