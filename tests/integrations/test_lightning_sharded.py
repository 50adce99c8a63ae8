"""Lightning's strategies that write directories, on two ranks: by ptsave under ``install()``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from client_checkpoints import (
    assert_same_state,
    assert_written_by_two_ranks,
    full_state_of,
    imported,
)
from forked_ranks import ForkedRanks

import ptsave

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_torch_thread")]
_STRATEGIES = ("FSDP", "ModelParallel")


@pytest.fixture(scope="module")
def lightning() -> Any:
    return imported("lightning")


def parallelize(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=mesh["data_parallel"])


def strategy_of(strategies: Any, name: str, *, full: bool) -> Any:
    """Return a strategy of Fabric's or the Trainer's module."""
    if name == "ModelParallel":
        arguments = {"parallelize_fn": parallelize} if "fabric" in strategies.__name__ else {}
        return strategies.ModelParallelStrategy(
            data_parallel_size=torch.distributed.get_world_size(),
            tensor_parallel_size=1,
            save_distributed_checkpoint=not full,
            **arguments,
        )

    class OnCpu(strategies.FSDPStrategy):  # type: ignore[misc]
        """Lightning refuses its own class on CPUs; FSDP itself runs there, if told to."""

    from torch.distributed.fsdp import FullyShardedDataParallel

    fsdp: Any = FullyShardedDataParallel
    init = fsdp.__init__

    def init_on_cpu(wrapper: Any, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init(wrapper, *args, device_id=torch.device("cpu"), **kwargs)

    fsdp.__init__ = init_on_cpu  # of this process, a rank
    return OnCpu(state_dict_type="full" if full else "sharded", use_orig_params=True)


def n_ranks_of(name: str, *, full: bool) -> int:
    """Return how many ranks can save: FSDP1 frees the CPU memory of a full state of several."""
    return 1 if full and name == "FSDP" else 2


class FabricRun:
    """A model that Fabric has set up on this rank, after some steps."""

    def __init__(self, lightning: Any, name: str, *, full: bool) -> None:
        from lightning.fabric import strategies

        strategy = strategy_of(strategies, name, full=full)
        n_ranks = torch.distributed.get_world_size()
        self.fabric = lightning.Fabric(accelerator="cpu", devices=n_ranks, strategy=strategy)
        self.fabric.launch()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        self.model = self.fabric.setup_module(model)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.optimizer = self.fabric.setup_optimizers(optimizer)

    def train(self, n_steps: int) -> None:
        for _ in range(n_steps):
            loss = self.model(torch.randn(4, 8)).square().mean()
            self.fabric.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": 3}

    def values(self) -> dict[str, Any]:
        return full_state_of(self.model.module, self.optimizer.optimizer)


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize("name", _STRATEGIES)
def test_fabric(name: str, full: bool, lightning: Any, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def run(rank: int) -> None:
        run = FabricRun(lightning, name, full=full)
        run.train(2)
        expected = run.values()
        with ptsave.installed(distributed=True):
            run.fabric.save(path, run.state())
        for loads_with_engine in (True, False):
            run.train(1)
            state = {**run.state(), "step": 0}
            with ptsave.installed(distributed=loads_with_engine):
                run.fabric.load(path, state)
            assert state["step"] == 3
            assert_same_state(run.values(), expected)

    ForkedRanks(tmp_path, run, n_ranks_of(name, full=full)).join()
    if full:
        with ptsave.open(path) as archive:
            assert archive.info("model.0.weight").shape == (16, 8)
        return
    assert (path / "meta.pt").exists()
    assert_written_by_two_ranks(path)


def fitted(lightning: Any, name: str, folder: Path, *, full: bool, n: int, **options: Any) -> Any:
    """Fit for `n` epochs with the Trainer; returns the module and the Trainer."""
    from lightning.pytorch import callbacks, strategies

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))

        def configure_model(self) -> None:
            if self.device_mesh is not None:
                parallelize(self.layer, self.device_mesh)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(1)
            data = torch.utils.data.TensorDataset(torch.randn(16, 8, generator=generator))
            return torch.utils.data.DataLoader(data, batch_size=4)

    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_epochs=n,
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=strategy_of(strategies, name, full=full),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=[callbacks.ModelCheckpoint(dirpath=str(folder), save_last=True)],
    )
    model = Model()
    trainer.fit(model, **options)
    return model, trainer


def state_of(model: Any, trainer: Any) -> dict[str, Any]:
    is_wrapped = type(trainer.strategy).__name__ == "OnCpu"
    whole = trainer.strategy.model if is_wrapped else model
    return full_state_of(whole, trainer.optimizers[0])


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize("name", _STRATEGIES)
def test_trainer(name: str, full: bool, lightning: Any, tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"

    def run(_: int) -> None:
        expected = state_of(*fitted(lightning, name, stock, full=full, n=3))
        with ptsave.installed(distributed=True):
            fitted(lightning, name, ours, full=full, n=2)
            last = str(ours / "last.ckpt")
            found = fitted(lightning, name, ours, full=full, n=3, ckpt_path=last)
        assert_same_state(state_of(*found), expected)

    ForkedRanks(tmp_path, run, n_ranks_of(name, full=full)).join()
    assert sorted(os.listdir(ours)) == sorted(os.listdir(stock))
    if not full:
        assert_written_by_two_ranks(ours / "last.ckpt")
