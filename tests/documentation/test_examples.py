"""The scripts of examples/ run, and do what they say; the libraries' ones if those are there."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.tensor  # noqa: F401 - or the first test takes its allow-list away
from client_checkpoints import imported
from doc_runner import ROOT
from forked_ranks import ForkedRanks
from tiny_trainers import imported_transformers

import ptsave

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def output_of(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> str:
    """Run a script in this process, and return what it prints."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return output.getvalue()


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_torch_thread: None) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_are_here() -> None:
    """Each has a test of its name, and a line in the documentation."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert {f"test_{name}" for name in names} <= set(globals())
    page = (ROOT / "docs" / "examples.md").read_text()
    assert all(f"../examples/{name}.py" in page for name in names)


def test_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ["plain_loop", "--save-every", "20"]
    output_of(monkeypatch, *run, "--steps", "40", "--directory", "stopped")
    resumed = output_of(monkeypatch, *run, "--steps", "60", "--directory", "stopped")
    assert resumed.startswith("going on at step 40\n")
    output_of(monkeypatch, *run, "--steps", "60", "--directory", "whole")
    loss = ptsave.compare("stopped/step-00000059.pt", "whole/step-00000059.pt")
    assert loss.equal


def test_slurm(tmp_path: Path) -> None:
    """The job ends by a signal, asks to be run again, and ends where a whole run ends."""
    for name, line in (("srun", 'exec "$@"'), ("scontrol", 'echo "$@" >> asked')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    environment["OMP_NUM_THREADS"] = "1"
    command = ["examples/slurm.sh", "--steps", "1500", "--save-every", "500"]
    job = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, start_new_session=True
    )
    assert job.stdout is not None
    assert job.stdout.readline().startswith(b"step 499: ")
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGUSR1)
    job.communicate(timeout=200)
    assert job.returncode == os.EX_TEMPFAIL
    assert Path("asked").read_text() == "requeue 7\n"
    again = subprocess.run(command, env=environment, capture_output=True, timeout=200, check=True)
    assert again.stdout.startswith(b"going on at step ")
    command += ["--directory", "whole"]
    subprocess.run(command, env=environment, capture_output=True, timeout=200, check=True)
    assert ptsave.compare("checkpoints/step-00001499.pt", "whole/step-00001499.pt").equal


def test_lightning_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    imported("lightning")
    printed = output_of(monkeypatch, "lightning_trainer")
    assert "trained two epochs: epoch=1.ckpt last.ckpt\n" in printed
    assert "ended at epoch 3\n" in printed


def test_huggingface_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    imported_transformers()
    printed = output_of(monkeypatch, "huggingface_trainer")
    assert "saved: checkpoint-2 checkpoint-4\n" in printed
    assert "went on to step 6\n" in printed


def test_fsdp2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> None:
        for steps in ("6", "4"):
            printed = output_of(monkeypatch, "fsdp2", "--steps", steps)
            if rank == 0:
                Path(f"printed-{steps}").write_text(printed)

    ForkedRanks(tmp_path, run).join()
    assert "going on" not in Path("printed-6").read_text()
    assert Path("printed-4").read_text().startswith("going on at step 5\nmodel.0.weight (64, 16)")


def test_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    printed = output_of(monkeypatch, "serving")
    assert "model-00002-of-00002.safetensors\n" in printed
    assert "relative error" in printed


def test_weight_sync() -> None:
    pytest.importorskip("zstandard")
    run = [sys.executable, str(EXAMPLES / "weight_sync.py"), "--count", "3"]
    found = subprocess.run(run, capture_output=True, text=True, timeout=200, check=True)
    assert found.stdout == "3 versions: the server's logits are equal to the trainer's\n"


def test_capture_and_diff(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = output_of(monkeypatch, "capture_and_diff")
    assert "the first difference: 0/forward/2#0/outputs\n" in printed
