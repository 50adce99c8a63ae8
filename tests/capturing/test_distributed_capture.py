"""Captures of models on one and two ranks: DDP, FSDP2 and DTensor, over gloo; quantized tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from captured_runs import Run, captured
from rank_processes import Ranks
from torch import Tensor, distributed, nn

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

RANK = """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

kind, n_ranks, folder = KIND, size, str(folder)
dist.init_process_group(
    "gloo", init_method="file://" + folder + "/store", rank=rank, world_size=n_ranks
)
mesh = init_device_mesh("cpu", (n_ranks,))

class Sum(nn.Module):
    def forward(self, x):
        return x + x

def train(path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.ones(2, 4) * (rank + 1)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        model = fully_shard(model, mesh=mesh)
    else:
        model = nn.Sequential(Sum())
        x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]).requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if kind != "dtensor" else None
    capture = ptsave.capture(model, path, rank=rank).start() if path else None
    found = []
    for _ in range(2):
        loss = model(x)
        loss = (loss.to_local() if isinstance(loss, DTensor) else loss).square().sum()
        loss.backward()
        found.append(loss.detach().clone())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if capture is not None:
            capture.step()
    if capture is not None:
        capture.stop()
    return found

plain = train(None)
recorded = train(folder + f"/run-{rank}.pt")
assert all(map(torch.equal, plain, recorded)), (plain, recorded)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "dtensor"])
def test_ranks(tmp_path: Path, kind: str, n_ranks: int) -> None:
    """Losses are those without a capture; each rank records its own part."""
    Ranks(tmp_path, RANK.replace("KIND", repr(kind)), n_ranks, in_group=False).found()
    for rank in range(n_ranks):
        run = Run(tmp_path / f"run-{rank}.pt")
        assert run.entries["capture/end"]["steps"] == 2
        value = run.values["1/forward/0#0/outputs"]
        assert value.statistics is not None
        if kind == "dtensor":
            assert value.type == "DTensor"
            assert value.note == "DTensor: this rank's part"
            part = torch.arange(8.0).view(4, 2).chunk(n_ranks)[rank]
            assert torch.equal(run.tensor(value.name), 2 * part)
            continue
        assert {call.module for call in run.calls} >= {"", "0", "1", "2"}
        assert run.tensor("0/forward/0#0/inputs/0").unique().tolist() == [rank + 1]
        assert run.tensor("1/forward/2#0/outputs").shape == (2, 2)
        if kind == "fsdp2":
            whole = run.values["0/grads/2#0/weight"]
            own = run.values["0/grads/2#1/weight"]
            assert (whole.type, own.type) == ("Tensor", "DTensor")
            assert run.tensor(whole.name).shape == (2, 6)
            assert run.tensor(own.name).shape == (2 // n_ranks, 6)
        else:
            assert run.tensor("0/grads/2#0/weight").shape == (2, 6)
            assert "1/params/0#0/weight" in run.values


def test_quantized_tensors(tmp_path: Path) -> None:
    class Takes(nn.Module):
        def forward(self, *tensors: Tensor) -> None:
            return None

    plain = torch.linspace(-1, 1, 12).view(3, 4)
    by_tensor = torch.quantize_per_tensor(plain, 0.1, 3, torch.quint8)
    by_channel = torch.quantize_per_channel(
        plain, torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3, dtype=torch.long), 0, torch.qint8
    )
    model = Takes()
    run = captured(model, lambda: model(by_tensor, by_channel, by_tensor.t()), tmp_path / "run.pt")
    for i, expected in enumerate((by_tensor, by_channel, by_tensor.t())):
        value = run.values[f"0/forward/#0/inputs/{i}"]
        assert value.note == "quantized: no statistics"
        assert value.statistics is None
        assert torch.equal(run.tensor(value.name).dequantize(), expected.dequantize())
