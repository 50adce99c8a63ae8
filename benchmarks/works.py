"""Calls that users make, each measured in a process of its own that this file is the program of.

``python works.py WHO WORK FOLDER GIB CALLS`` prints "ready", waits for a line, makes the call and
prints its seconds, as often as CALLS says; then it ends.  `benchmarks.as_found` starts it, and
brings memory into a state while it waits.  WHO is torch, or a build of ptsave that PYTHONPATH
names: nothing is imported ahead but torch and ptsave, and nothing of this checkout.
``works.py make make FOLDER GIB 0`` writes the files that all of them read.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

StateDict = dict[str, Tensor]

TORCH, MAKE = "torch", "make"
LACKS = 3  # the exit status of a build that does not have what the work needs
SAVE, SAVE_DURABLE, LOAD = "nosync", "durable", "warm"
FILE, SMALL, SHARDS, PARTS = "s.pt", "small.pt", "shards", "parts"
N_SHARDS = 8
SHM = "/dev/shm"
READ_TENSOR = "layers.0.up.weight"


class Call(NamedTuple):
    """A call that is timed, and what follows outside the clock; it takes the call's result."""

    run: Callable[[], Any]
    undo: Callable[[Any], Any] = lambda result: None


class Setting(NamedTuple):
    """Who makes the call, and how large its objects are."""

    who: str
    gib: float

    @property
    def stock(self) -> bool:
        return self.who == TORCH

    def library(self) -> Any:
        return torch if self.stock else importlib.import_module("ptsave")

    def file(self, suffix: str = ".pt", folder: str = "") -> Path:
        """Return the file that is written; it is not there yet."""
        path = Path(folder, f"ptsave-benchmark-{self.who}{suffix}")
        path.unlink(missing_ok=True)
        return path

    def count(self, whole: int) -> int:
        return max(int(whole * min(self.gib, 1)), 1)


# ------------------------------------------------------------------------------ objects and files


def make_decoder(gib: float) -> StateDict:
    """Return the tensors of a decoder with grouped queries, of at least as many GiB."""
    width, hidden, words = (896, 4864, 32_000) if gib >= 0.25 else (64, 256, 500)
    shapes = {
        "q": (width, width),
        "k": (128, width),
        "v": (128, width),
        "o": (width, width),
        "gate": (hidden, width),
        "up": (hidden, width),
        "down": (width, hidden),
        "norm": (width,),
    }
    generator = torch.Generator().manual_seed(0)
    found = OrderedDict(embed=torch.randn(words, width, generator=generator))
    n_layers, nbytes = 0, found["embed"].nbytes
    while nbytes < gib * (1 << 30) or n_layers == 0:
        for name, shape in shapes.items():
            tensor = torch.randn(shape, generator=generator)
            found[f"layers.{n_layers}.{name}.weight"] = tensor
            nbytes += tensor.nbytes
        n_layers += 1
    return found


def make_files(gib: float) -> None:
    from safetensors.torch import save_file

    tensors = make_decoder(gib)
    torch.save(tensors, FILE)
    names = [f"layers.{i}.weight" for i in range(Setting(MAKE, gib).count(100_000))]
    torch.save({name: torch.randn(16) for name in names}, SMALL)
    Path(SHARDS).mkdir()
    for name, shard in shards_of(tensors).items():
        save_file(shard, f"{SHARDS}/{name}")
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(PARTS))


def shards_of(tensors: StateDict) -> dict[str, StateDict]:
    names = list(tensors)
    n = -(-len(names) // N_SHARDS)
    parts = [{name: tensors[name] for name in names[i : i + n]} for i in range(0, len(names), n)]
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, 1)}


def tensors_in_memory() -> StateDict:
    tensors: StateDict = torch.load(FILE)
    return tensors


def model_in_memory() -> nn.Module:
    """Return a module with the parameters of the file, of other values."""
    root = nn.Module()
    for name, tensor in torch.load(FILE, mmap=True).items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.ones_like(tensor), requires_grad=False))
    return root


def touch(value: Any) -> Any:
    """Read a byte of every page of the tensors in it, and return it."""
    if isinstance(value, Tensor):
        value.view(-1).view(torch.uint8)[::4096].sum()
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            touch(item)
    return value


def fetch(*paths: str | Path) -> None:
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def drop(*paths: str | Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def sync(path: str | Path) -> None:
    for target in (path, Path(path).parent):
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def remove(*paths: Path) -> None:
    for path in paths:
        if path.is_dir():
            remove(*path.iterdir())
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def in_child(action: Callable[[], object]) -> None:
    """Run in a fork, so that it is no call of this process."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with suppress(BaseException):
            action()
            status = 0
        os._exit(status)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the fork has failed")


# ------------------------------------------------------------------------------------------ saving


def save(at: Setting, *, folder: str = "", durable: bool = False, over: bool = False) -> Call:
    library, tensors, path = at.library(), tensors_in_memory(), at.file(folder=folder)
    if over:
        in_child(lambda: library.save(tensors, path))

    def run() -> None:
        if durable and not at.stock:
            library.save(tensors, path, fsync=True)
            return
        library.save(tensors, path)
        if durable:
            sync(path)

    return Call(run, lambda _: None if over else remove(path))


def save_small(at: Setting) -> Call:
    library, tensors, path = at.library(), torch.load(SMALL), at.file(folder=SHM)
    return Call(lambda: library.save(tensors, path), lambda _: remove(path))


def save_file(at: Setting, *, durable: bool = False) -> Call:
    if not at.stock:
        at.library().install(safetensors=True, fsync=durable)
    safetensors: Any = importlib.import_module("safetensors.torch")
    tensors, path = tensors_in_memory(), at.file(".safetensors")

    def run() -> None:
        safetensors.save_file(tensors, path)
        if durable and at.stock:
            sync(path)

    return Call(run, lambda _: remove(path))


def save_model(at: Setting) -> Call:
    library, tensors, folder = at.library(), tensors_in_memory(), Path(f"model-{at.who}")
    max_shard_size = sum(tensor.nbytes for tensor in tensors.values()) // N_SHARDS
    safetensors: Any = importlib.import_module("safetensors.torch")
    remove(folder)

    def loop() -> None:
        folder.mkdir()
        for name, shard in shards_of(tensors).items():
            safetensors.save_file(shard, folder / name)

    def run() -> None:
        library.save_model(tensors, folder, max_shard_size=max_shard_size)

    return Call(loop if at.stock else run, lambda _: remove(folder))


def save_async(at: Setting) -> Call:
    library, tensors, path = at.library(), tensors_in_memory(), at.file()
    if at.stock:
        return Call(lambda: torch.save(tensors, path), lambda _: remove(path))
    call = library.async_save

    def undo(future: Any) -> None:
        future.result()
        remove(path)

    return Call(lambda: call(tensors, path), undo)


def save_with_checkpointer(at: Setting) -> Call:
    """A model and its optimizer, to the first checkpoint of a run: until training goes on."""
    library, folder = at.library(), Path(f"run-{at.who}")
    model, optimizer = training_in_memory(at)
    remove(folder)
    folder.mkdir()

    def loop() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "step.pt")

    if at.stock:
        return Call(loop, lambda _: None)
    made: list[Any] = []

    def run() -> None:
        made.append(library.AsyncCheckpointer(folder))
        made[-1].save(len(made), model=model, optimizer=optimizer)

    return Call(run, lambda _: made[-1].close())


def training_in_memory(at: Setting) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its AdamW state, of as many GiB together."""
    width = 1024 if at.gib >= 0.25 else 64
    n_layers = max(int(at.gib * (1 << 30)) // (3 * 4 * width * width), 1)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(n_layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.ones_like(parameter),
            "exp_avg_sq": torch.ones_like(parameter),
        }
    return model, optimizer


def save_parts(at: Setting) -> Call:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    tensors, folder = dict(tensors_in_memory()), Path(f"parts-{at.who}")
    remove(folder)
    writer = (
        dcp.FileSystemWriter
        if at.stock
        else importlib.import_module("ptsave.distributed").StorageWriter
    )
    return Call(lambda: dcp.save(tensors, storage_writer=writer(folder)), lambda _: remove(folder))


def make_trainer(
    folder: Path, n_layers: int, width: int, *, stock: bool, background: bool = False
) -> Any:
    """Return a Trainer with a GPT-2 whose optimizer has made a step."""
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.GPT2Config(
        n_layer=n_layers, n_embd=width, n_head=4, vocab_size=1024, n_positions=64
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True, max_steps=2
    )
    model = transformers.GPT2LMHeadModel(config)
    if stock:
        trainer = transformers.Trainer(model, arguments)
    else:
        ours: Any = importlib.import_module("ptsave.integrations.transformers")
        trainer = ours.Trainer(model, arguments, async_checkpoints=background)
    trainer.create_optimizer_and_scheduler(2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    return trainer


def save_trainer(trainer: Any, step: int) -> None:
    trainer.state.global_step = step
    trainer._save_checkpoint(trainer.model, None)


GPT2_WIDTH = 1024
PARAMETERS_OF_LAYER = 12 * GPT2_WIDTH**2  # of attention and feed-forward, about


def save_by_trainer(at: Setting, *, background: bool = False) -> Call:
    folder = Path(f"trainer-{at.who}").resolve()
    remove(folder)
    # With AdamW a parameter has 12 bytes in a checkpoint.
    n_layers = max(int(at.gib * (1 << 30)) // (12 * PARAMETERS_OF_LAYER), 1)
    width = GPT2_WIDTH if at.gib >= 0.25 else 64
    trainer = make_trainer(folder, n_layers, width, stock=at.stock, background=background)

    def undo(_: None) -> None:
        if background and not at.stock:
            trainer._saves.wait()
        remove(folder)

    return Call(lambda: save_trainer(trainer, 1), undo)


# ----------------------------------------------------------------------------------------- loading


def load(at: Setting, *, cold: bool = False, mmap: bool = False) -> Call:
    library, options = at.library(), {"mmap": True} if mmap else {}
    prepare = drop if cold else fetch
    prepare(FILE)
    return Call(lambda: touch(library.load(FILE, **options)), lambda _: prepare(FILE))


def load_small(at: Setting) -> Call:
    library = at.library()
    fetch(SMALL)
    return Call(lambda: library.load(SMALL))


def load_parts(at: Setting) -> Call:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    tensors = {name: torch.zeros_like(t) for name, t in torch.load(FILE, mmap=True).items()}
    fetch(*Path(PARTS).iterdir())
    reader = (
        dcp.FileSystemReader
        if at.stock
        else importlib.import_module("ptsave.distributed").StorageReader
    )
    return Call(lambda: dcp.load(tensors, storage_reader=reader(PARTS)))


def restore(at: Setting) -> Call:
    library, model = at.library(), model_in_memory()
    fetch(FILE)
    if at.stock:
        return Call(lambda: model.load_state_dict(torch.load(FILE)))
    return Call(lambda: library.load_into(FILE, model))


def restore_training(at: Setting) -> Call:
    library, path = at.library(), Path(f"training-{at.gib:g}.pt")
    model, optimizer = training_in_memory(at)
    if not path.exists():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        in_child(lambda: torch.save(state, path))
    fetch(path)

    def run() -> None:
        loaded = torch.load(path)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])

    if at.stock:
        return Call(run)
    return Call(lambda: library.load_checkpoint(path, model=model, optimizer=optimizer))


def read_tensor(at: Setting) -> Call:
    library = at.library()
    drop(FILE)

    def run() -> Tensor:
        if at.stock:
            tensor: Tensor = torch.load(FILE, mmap=True)[READ_TENSOR].clone()
            return tensor
        with library.open(FILE) as archive:
            return archive.get_tensor(READ_TENSOR)  # type: ignore[no-any-return]

    return Call(run, lambda _: drop(FILE))


def load_model(at: Setting) -> Call:
    safetensors: Any = importlib.import_module("safetensors")
    library, model = at.library(), model_in_memory()
    parameters = dict(model.named_parameters())
    files = sorted(Path(SHARDS).iterdir())
    fetch(*files)

    def loop() -> None:
        for path in files:
            with safetensors.safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    parameters[name].copy_(file.get_tensor(name))

    return Call(loop if at.stock else lambda: library.load_model(model, SHARDS))


def load_state_dict(at: Setting) -> Call:
    library = at.library()
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(at.count(4_000))])
    state = model.state_dict()
    if at.stock:
        return Call(lambda: model.load_state_dict(state))
    return Call(lambda: library.load_state_dict(model, state))


def load_by_ranks(at: Setting, *, n_ranks: int) -> Call:
    """Forks that load one cold file at the same time: until the last has touched every page."""
    library = at.library()
    drop(FILE)

    def run() -> None:
        children = []
        for _ in range(n_ranks):
            pid = os.fork()
            if pid == 0:
                status = 1
                with suppress(Exception):
                    torch.set_num_threads(1)
                    touch(library.load(FILE))
                    status = 0
                os._exit(status)
            children.append(pid)
        if any(os.waitpid(pid, 0)[1] for pid in children):
            raise RuntimeError("a rank has failed")

    return Call(run, lambda _: drop(FILE))


WORKS: dict[str, Callable[[Setting], Call]] = {
    SAVE: save,
    "over": lambda at: save(at, over=True),
    SAVE_DURABLE: lambda at: save(at, durable=True),
    "tmpfs": lambda at: save(at, folder=SHM),
    "savefile": save_file,
    "savefile-durable": lambda at: save_file(at, durable=True),
    "savemodel": save_model,
    "smallsave": save_small,
    "async": save_async,
    "checkpointer": save_with_checkpointer,
    "parts-save": save_parts,
    "trainer": save_by_trainer,
    "trainer-async": lambda at: save_by_trainer(at, background=True),
    LOAD: load,
    "cold": lambda at: load(at, cold=True),
    "mmap": lambda at: load(at, mmap=True),
    "small": load_small,
    "parts-load": load_parts,
    "restore": restore,
    "resume": restore_training,
    "tensor": read_tensor,
    "model": load_model,
    "statedict": load_state_dict,
    "ranks-2": lambda at: load_by_ranks(at, n_ranks=2),
    "ranks-4": lambda at: load_by_ranks(at, n_ranks=4),
}


def main(who: str, work: str, folder: str, gib: str, n_calls: str) -> None:
    sys.path.remove(str(Path(__file__).resolve().parent))  # no library shall import this folder's
    os.chdir(folder)
    if who == MAKE:
        make_files(float(gib))
        return
    try:
        call = WORKS[work](Setting(who, float(gib)))
        for _ in range(int(n_calls)):
            gc.collect()
            print("ready", flush=True)
            sys.stdin.readline()
            begin = time.perf_counter()
            result = call.run()
            seconds = time.perf_counter() - begin
            print(json.dumps(seconds), flush=True)
            call.undo(result)
            del result
    except (AttributeError, ImportError, TypeError) as error:  # of an older build
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(LACKS)


if __name__ == "__main__":
    main(*sys.argv[1:])
