"""accelerate's states of FSDP1 and FSDP2 on two ranks, by the engine.

Accelerate itself sets FSDP up on accelerators only.  So the model is wrapped here, and the
Accelerator told what it is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from client_checkpoints import assert_same_state, assert_written_by_two_ranks, full_state_of
from forked_ranks import ForkedRanks

from ptsave.integrations import accelerate as integration

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_torch_thread")]


class Run:
    """A sharded model of an Accelerator on this rank."""

    def __init__(self, accelerate: Any, version: int, state_dict_type: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(cpu=True)
        state = self.accelerator.state
        kind = accelerate.DistributedType.FSDP
        accelerate.PartialState._shared_state["distributed_type"] = kind
        state.distributed_type = kind
        state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=version, state_dict_type=state_dict_type
        )
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        if version == 1:
            cpu = torch.device("cpu")
            model = FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.accelerator._models.append(self.model)
        self.accelerator._optimizers.append(
            accelerate.optimizer.AcceleratedOptimizer(self.optimizer)
        )
        integration.enable(self.accelerator)

    def train(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self.model(torch.randn(4, 8)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("state_dict_type", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("version", [1, 2])
def test_resumes_exactly(
    version: int, state_dict_type: str, accelerate: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    # Of several ranks' full states FSDP1 makes "copies" in CPU memory, and frees what it copied.
    n_ranks = 1 if (version, state_dict_type) == (1, "FULL_STATE_DICT") else 2

    def run(_: int) -> None:
        run = Run(accelerate, version, state_dict_type)
        run.train(2)
        expected = full_state_of(run.model, run.optimizer)
        run.accelerator.save_state(str(folder))
        for loads_with_engine in (True, False):
            run.train(1)
            if not loads_with_engine:
                integration.disable(run.accelerator)
            run.accelerator.load_state(str(folder))
            assert_same_state(full_state_of(run.model, run.optimizer), expected)

    ForkedRanks(tmp_path, run, n_ranks).join()
    assert sorted(name for name in os.listdir(tmp_path) if name != ".store") == ["state"]
    if state_dict_type == "SHARDED_STATE_DICT":
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            assert_written_by_two_ranks(folder / name)
