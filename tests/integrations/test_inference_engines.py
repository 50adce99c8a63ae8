"""vLLM's and SGLang's loaders, over stubs of their base classes with the same signatures."""

from __future__ import annotations

import abc
import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import ptsave
from ptsave.deltas import Publisher
from ptsave.integrations.vllm import WeightsLoader

VLLM = "vllm.model_executor.model_loader"
SGLANG = "sglang.srt.model_loader.loader"


class VllmBase(abc.ABC):
    """As vLLM's BaseModelLoader."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abc.abstractmethod
    def download_model(self, model_config: Any) -> None: ...
    @abc.abstractmethod
    def load_weights(self, model: Any, model_config: Any) -> None: ...

    def load_model(self, vllm_config: Any, model_config: Any) -> Any:
        model = model_config.make()
        self.load_weights(model, model_config)
        return model.eval()


def reload_in_vllm(loader: Any, model: Any, path: str) -> None:
    """As vLLM's GPUModelRunner.reload_weights(weights_path=...), which makes a new loader."""
    model_config = config("overwritten")
    model_config.model = path
    loader = type(loader)(loader.given)
    model.load_weights(loader.get_all_weights(model_config, model))


def reload_in_sglang(loader: Any, model: Any, path: str) -> None:
    """As SGLang's ModelRunner.update_weights_from_disk, whose load_config is new."""
    loader = type(loader)(SimpleNamespace(model_loader_extra_config={}))
    source = SimpleNamespace(model_or_path=path, revision=None, prefix="")
    model.load_weights(loader._get_weights_iterator(source))


class SglangBase(abc.ABC):
    """As SGLang's BaseModelLoader."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abc.abstractmethod
    def download_model(self, model_config: Any) -> None: ...
    @abc.abstractmethod
    def load_model(self, *, model_config: Any, device_config: Any) -> Any: ...


class SglangDefault(SglangBase):
    """As SGLang's DefaultModelLoader: a source of weights, and what the model does with them."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        assert load_config.model_loader_extra_config.keys() <= {"num_threads"}

    def download_model(self, model_config: Any) -> None:
        raise ValueError("Unknown load_format")

    def _get_weights_iterator(self, source: Any) -> Any:
        raise ValueError("Unknown load_format")

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        model = model_config.make()
        source = SimpleNamespace(
            model_or_path=model_config.model_path, revision=model_config.revision, prefix="x."
        )
        model.load_weights(self._get_weights_iterator(source))
        return model.eval()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        self.seen: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            self.seen.append(name)
            parameters[name.removeprefix("x.")].data.copy_(tensor)


def config(path: Path | str) -> Any:
    return SimpleNamespace(model=str(path), model_path=str(path), revision=None, make=Model)


@pytest.fixture
def loader_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def stub(path: str, **names: Any) -> None:
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(names)

    registered: dict[str, Any] = {}

    def register_model_loader(load_format: str) -> Callable[[type], type]:
        def register(loader: type) -> type:
            assert issubclass(loader, VllmBase)
            registered[load_format] = loader
            return loader

        return register

    stub(f"{VLLM}.base_loader", BaseModelLoader=VllmBase)
    stub(VLLM, register_model_loader=register_model_loader)
    stub(SGLANG, DefaultModelLoader=SglangDefault)

    def loader(engine: str, extra: Any = None) -> Any:
        module = importlib.import_module(f"ptsave.integrations.{engine}")
        vars(module).pop("ModelLoader", None)
        load_config = SimpleNamespace(
            model_loader_extra_config=extra, download_dir=None, ignore_patterns=["original/**/*"]
        )
        if engine == "vllm":
            module.register()
            loader_class = registered["ptsave"]
            module.register()  # as each of vLLM's plug-in loads does
            assert registered["ptsave"] is loader_class is module.ModelLoader
            made = loader_class(load_config)
        else:
            load_config.load_format = module.ModelLoader
            made = load_config.load_format(load_config)  # as SGLang's get_model_loader
        assert load_config.model_loader_extra_config is extra  # other loaders get it, too
        made.given = load_config
        return made

    yield loader
    for engine in ("vllm", "sglang"):
        vars(importlib.import_module(f"ptsave.integrations.{engine}")).pop("ModelLoader", None)


def loaded(engine: str, loader: Any, path: Path | str) -> Any:
    loader.download_model(config(path))
    if engine == "vllm":
        return loader.load_model(SimpleNamespace(), config(path))
    return loader.load_model(model_config=config(path), device_config=SimpleNamespace())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    ptsave.save_model(Model(), tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_loads(engine: str, loader_of: Any, folder: Path) -> None:
    torch.manual_seed(1)
    expected = Model().state_dict()
    model = loaded(engine, loader_of(engine), folder)
    assert not model.training
    assert len(model.seen) == 4
    assert all(name.startswith("x.") == (engine == "sglang") for name in model.seen)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_errors(engine: str, loader_of: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has only the extra options .*concurrency"):
        loader_of(engine, {"concurrency": 3, "base": "model"})
    next(folder.glob("*-00001-*")).unlink()
    with pytest.raises(FileNotFoundError, match="a shard is missing"):
        loaded(engine, loader_of(engine), folder)


def publish(directory: Path | str, base: Any, n: int = 3) -> list[dict[str, torch.Tensor]]:
    """Publish versions of a model, and return the states of all, from version 0 on."""
    pytest.importorskip("zstandard", reason="pip install zstandard")
    states = [dict(ptsave.iter_weights(base))]
    publisher = Publisher(directory, base, checksum="adler32", max_depth=None)
    for _ in range(n):
        states.append({name: tensor + (tensor > 0.05) for name, tensor in states[-1].items()})
        publisher.publish(states[-1])
    return states


def assert_has(model: Any, state: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_directory_of_versions(engine: str, loader_of: Any, folder: Path) -> None:
    """The versions lie beside the files of the model, which never change."""
    states = publish(folder, folder)
    loader = loader_of(engine)
    model = loaded(engine, loader, folder)
    assert_has(model, states[3])
    reload = reload_in_vllm if engine == "vllm" else reload_in_sglang
    for version in (1, 2, 3):
        reload(loader, model, f"{folder}/weight_v00000{version}")
        assert_has(model, states[version])
    with pytest.raises(FileNotFoundError, match="version 4 is missing"):
        reload(loader, model, f"{folder}/weight_v000004/")
    assert_has(model, states[3])
    ptsave.save_model({name: tensor + 1 for name, tensor in states[3].items()}, folder)
    with pytest.raises(ptsave.WrongBaseError):
        reload(loader, model, f"{folder}/weight_v000003")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.usefixtures("_clean_file_systems")
def test_versions_elsewhere(
    engine: str, loader_of: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is in a cache or on the hub, and the trainer publishes to a store."""
    states = publish("memory://run/versions", folder)
    loader = loader_of(engine, {"versions": "memory://run/versions"})
    assert_has(loaded(engine, loader, folder), states[3])
    loader = loader_of(engine, {"versions": "memory://run/versions/weight_v000002"})
    model = loaded(engine, loader, folder)
    assert_has(model, states[2])
    third = "memory://run/versions/weight_v000003"
    reload = reload_in_vllm if engine == "vllm" else reload_in_sglang
    with pytest.raises(FileNotFoundError, match="not in their directory: pass base="):
        reload(loader, model, third)
    if engine == "vllm":  # SGLang's reload has no options
        loader = loader_of(engine, {"base": str(folder)})
        reload(loader, model, third)
        assert_has(model, states[3])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    loader = loader_of(engine, {"versions": "memory://run/versions"})
    with pytest.raises(ValueError, match="pass the path of one version"):
        loaded(engine, loader, folder)
    loader = loader_of(engine, {"versions": "memory://run/versions/weight_v000001"})
    assert_has(loaded(engine, loader, folder), states[1])


def test_the_weights_of_a_vllm_model_may_have_another_path(loader_of: Any, folder: Path) -> None:
    states = publish(folder, folder)
    loader = loader_of("vllm")
    named = config("only/the-configuration")
    named.model_weights = str(folder)
    model = Model()
    loader.load_weights(model, named)
    assert_has(model, states[3])
    named.model = f"{folder}/weight_v000001"  # as vLLM's reload_weights does
    model.load_weights(loader.get_all_weights(named, model))
    assert_has(model, states[1])


@pytest.fixture
def downloads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of downloads from the hub: of a folder, or of none where no file matches."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(model: str, **options: Any) -> str:
        calls.append({"model": model, **options})
        return str(folder if model == "some/model" else folder / "none")

    hub = pytest.importorskip("huggingface_hub", reason="pip install huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    return calls


def test_download(loader_of: Any, downloads: list[dict[str, Any]]) -> None:
    model = loaded("vllm", loader_of("vllm"), "some/model")
    assert len(model.seen) == 4
    assert downloads[0]["ignore_patterns"] == ["original/**/*"]


def test_download_of_nothing(folder: Path, downloads: list[dict[str, Any]]) -> None:
    """The hub's library makes no folder where no file matches."""
    loader = WeightsLoader.__new__(WeightsLoader)
    loader.load_config = SimpleNamespace(ignore_patterns="*.bin")
    assert loader.local_model("empty/model", None) == str(folder / "none")
    assert [options["ignore_patterns"] for options in downloads] == ["*.bin", "*.bin"]
