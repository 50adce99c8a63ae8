"""Contexts: a rank that uses one device makes none on another, where it would take memory."""

from __future__ import annotations

import json
import textwrap
import threading
from typing import Any

import pytest
import torch

from accelerator.test_fake import run_on_fake

# ----------------------------------------------------------------- the accelerator made for tests


def in_new_thread(work: Any) -> int:
    """Run ``work`` on a thread that has not chosen a device, and return the thread's number."""
    ids = []

    def run() -> None:
        ids.append(threading.get_native_id())
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return ids[0]


def test_guards_return_lazily(fake: Any) -> None:
    fake.forget_contexts()
    thread = in_new_thread(lambda: torch.zeros(10, device=fake.LAST))
    assert fake.contexts() == {1: {thread}}


def test_events_make_a_context_where_the_thread_comes_from(fake: Any) -> None:
    """Until torch 2.14, whose events return lazily."""
    event = torch.Event(device=fake.LAST)
    stream = torch.Stream(device=fake.LAST)
    fake.forget_contexts()
    thread = in_new_thread(lambda: event.record(stream))
    expected = {1: {thread}} if fake.EVENTS_RETURN_LAZILY else {0: {thread}, 1: {thread}}
    assert fake.contexts() == expected


# ----------------------------------------------------------------------------------------- ptsave

_CALLS = """
    import importlib.util, json, sys, tempfile, threading, warnings
    import ptsave
    from ptsave.deltas import Publisher, Weights, apply
    from ptsave.background.async_safetensors import async_save_safetensors

    folder = tempfile.mkdtemp()
    if {chosen}:
        torch.accelerator.set_device_index(1)
    sizes = [1 << 20, 300_000, *([1000] * 40)]
    tensors = {{f"t{{i}}": torch.zeros(n).to(fake.LAST) for i, n in enumerate(sizes)}}
    host = {{name: torch.full(t.shape, 5.0) for name, t in tensors.items()}}

    def module():
        made = torch.nn.Module()
        for name, n in zip(tensors, sizes):
            made.register_buffer(name, torch.zeros(n).to(fake.LAST))
        return made

    model = module()
    file, shards = folder + "/file.pt", folder + "/shards"
    torch.save(tensors, file)
    ptsave.save_checkpoint(folder + "/checkpoint.pt", model=model)
    ptsave.save_model(host, shards, max_shard_size="2MB")
    ptsave.save_model(host, folder + "/bin", max_shard_size="2MB", format="pt")

    ptsave.save_model(host, folder + "/one")
    half = module().half()
    loading = torch.nn.ParameterDict({{name: t.clone() for name, t in tensors.items()}})
    for parameter in loading.values():
        parameter.weight_loader = lambda parameter, tensor: parameter.data.copy_(tensor)

    def get_tensors():
        with ptsave.open(file) as archive:
            for name in tensors:
                archive.get_tensor(name, device=fake.LAST)
                archive.get_slice(name, device=fake.LAST)[:-1]

    def grow():
        with ptsave.ArchiveWriter(folder + "/growing.pt") as writer:
            for name, tensor in tensors.items():
                writer.add(name, tensor, copy=name != "t1")

    def capture(**options):
        layers = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU())
        with ptsave.capture(layers, folder + "/run.pt", **options):
            for tensor in tensors.values():
                layers(tensor.detach().requires_grad_()).sum().backward()

    def versions():
        root, served = tempfile.mkdtemp(), tempfile.mkdtemp()
        ptsave.save_model(tensors, served)
        publisher = Publisher(root, tensors)
        for max_depth in (0, None):  # a whole version, and patches
            publisher._max_depth = max_depth
            publisher.publish({{name: tensor + publisher.version for name, tensor in host.items()}})
            apply(root, tensors)
        publisher.publish({{name: tensor + 1 for name, tensor in tensors.items()}})
        apply(root, tensors)
        ptsave.load_model(model, Weights(root, served))

    calls = {{
        "torch.save": lambda: torch.save(tensors, folder + "/stock.pt"),
        "torch.load": lambda: torch.load(file, fake.LAST),
        "load_state_dict": lambda: model.load_state_dict(host),
        "save": lambda: ptsave.save(tensors, folder + "/ours.pt"),
        "save durable": lambda: ptsave.save(tensors, folder + "/ours.pt", fsync=True),
        "async_save": lambda: ptsave.async_save(tensors, folder + "/ours.pt").result(),
        "async_save, in the background": lambda: ptsave.async_save(
            tensors, folder + "/ours.pt", staging="background"
        ).result(),
        "async_save of safetensors": lambda: async_save_safetensors(
            tensors, folder + "/ours.safetensors", {{}}
        ).result(),
        "load": lambda: ptsave.load(file),
        "load to the device": lambda: ptsave.load(file, fake.LAST),
        "load_into": lambda: ptsave.load_into(file, model),
        "load_into, another dtype": lambda: ptsave.load_into(file, half),
        "load_checkpoint": lambda: ptsave.load_checkpoint(folder + "/checkpoint.pt", model=model),
        "load_model": lambda: ptsave.load_model(model, shards),
        "load_model of .bin": lambda: ptsave.load_model(model, folder + "/bin"),
        "load_model, another dtype": lambda: ptsave.load_model(half, shards),
        "load_model by loaders": lambda: ptsave.load_model(loading, shards),
        "load of safetensors": lambda: ptsave.load(folder + "/one/model.safetensors", fake.LAST),
        "save_model": lambda: ptsave.save_model(model, folder + "/saved"),
        "get_tensor": get_tensors,
        "convert": lambda: ptsave.convert(file, folder + "/converted.safetensors"),
        "ArchiveWriter": grow,
        "capture": capture,
        "capture of statistics": lambda: capture(tensors=False),
    }}
    if importlib.util.find_spec("zstandard"):
        calls["deltas"] = versions
    touched = {{}}
    for name, call in calls.items():
        fake.forget_contexts()
        call()
        touched[name] = sorted(fake.contexts())
        ptsave.release_staging_memory()
        touched[name + ", released"] = sorted(fake.contexts())
    print(json.dumps(touched))
"""


@pytest.mark.parametrize("chosen", [True, False])
def test_no_context_on_device_0(fake: Any, chosen: bool) -> None:
    """Neither if the caller has made device 1 its own, nor if its tensors just are there."""
    printed = run_on_fake(textwrap.dedent(_CALLS).format(chosen=chosen)).stdout
    touched = json.loads(printed.splitlines()[-1])  # ninja may say more
    assert {name: devices for name, devices in touched.items() if 0 in devices} == {}
    assert touched["convert"] == []  # also of a file that was saved from device 1
