"""`load_model`: fills a model from published weights, as inference engines do.

Before the model changes, every file is opened, and all names, shapes and sizes are checked. The
files stay open. So if another process replaces them, the model still gets the old files.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ptsave.errors import CheckpointWarning
from ptsave.models.filling import Filling, items_of
from ptsave.models.packed_modules import PackedModules, PackedModulesMapping, note_parts
from ptsave.models.shards import Entry, Shard, ShardReader, open_model
from ptsave.models.weight_plan import (
    Assignment,
    LazyBuffers,
    LoadedWeights,
    ModelTensors,
    ModuleLoadOptions,
    WeightPlan,
)
from ptsave.sources.locations import describe, refuse_url
from ptsave.state.renaming import Rename, Renaming
from ptsave.state.trusted_loading import have_code_of_their_own, overrides_load_state_dict
from ptsave.support.calls import (
    ProgressCallback,
    check_flags,
    failing_together,
    has_others,
    one_of,
    pausing_garbage_collection,
    progress_bar,
    warn_user,
)
from ptsave.support.text import some_of
from ptsave.support.torch_modules import (
    apply_to_tensors_of,
    buffers_of,
    modules_in,
    parameters_of,
    tensors_in,
)
from ptsave.support.torch_names import is_distributed_tensor, make_subclass

if TYPE_CHECKING:
    from ptsave.models.group_weights import GroupWeights


def load_model(
    model: nn.Module,
    path: Any,
    *,
    packed_modules_mapping: PackedModulesMapping | None = None,
    rename: Rename | None = None,
    prefix: str = "",
    strict: bool = True,
    ignore_mismatched_sizes: bool = False,
    assign: bool = False,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
    map_location: torch.device | str | int | None = None,
    key_mapping: Rename | None = None,
) -> LoadedWeights:
    """Fill a model's parameters and buffers from a directory of shards, or one file.

    Before the first byte of the model changes, all files are opened, and names, shapes, headers and
    sizes are checked.  Then several threads read every byte once, directly into the parameters
    where possible.  Other tensors first go to a buffer of at most 128 MiB, or as large as the
    largest tensor for a ``weight_loader``.  If loaders copy to an accelerator, the buffer is
    page-locked, up to ``PTSAVE_MAX_PINNED_BYTES`` (an environment variable).  Parts of a
    safetensors file that are already in the page cache are used there, without the buffer.

    Parameters
    ----------
    model : torch.nn.Module
        The model.  If a parameter has an attribute ``weight_loader``, `load_model` calls it to
        fill the parameter: ``weight_loader(parameter, tensor)``, or for a part of a packed
        parameter ``weight_loader(parameter, tensor, shard_id)``.  For a shard id
        ``("w1", 3)``, a loader with an argument `expert_id`, such as the loader of vLLM's
        ``FusedMoE``, also gets the parameter's name, ``shard_id="w1"`` and ``expert_id=3``.  The
        tensor is on the CPU, and the loader may keep it.  A loader with the attribute
        ``takes_slices = True`` gets a `WeightSlice` instead, and reads only the parts that it needs
        (``weight[begin:end]``, ``weight.narrow(dim, begin, length)``).  The calls are in the order
        of the files.  Of a DTensor (FSDP2, tensor parallelism), each rank reads only its own part.
    path : str, os.PathLike, file-like or ptsave.deltas.Weights
        The path or URL of a directory or a file: an index of shards, a safetensors file, or
        anything that :func:`torch.load` reads with ``weights_only=True``.  A seekable file object
        is also allowed.  A file's content, not its name, decides how it is read.  In a directory,
        the first of these patterns that matches any file selects the files: ``*.safetensors``,
        ``pytorch_model*.bin``, ``model*.bin``, ``*.pt``, ``consolidated.*.pth``, ``*.pth``.  If
        there is an index, the index names the files.
    packed_modules_mapping : mapping or list, optional
        Modules of the checkpoint that the model packs into one.  A mapping gives each module the
        packed name and a shard id: ``{"q_proj": ("qkv_proj", "q"), ...}``.  The shard id
        may be a tuple (``("w1", 3)``).  A list of pairs (packed name, shard id) sends one tensor to
        several places.  ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}`` has the shard ids 0, 1 and
        2.  Instead of a mapping, a list of tuples ``(packed name, name, shard id)`` is allowed.
        The mapping's names match complete components of a tensor's name; of several matches, the
        one with the most components is used.  If a tensor fits nowhere, names also match within
        components.  If the model lacks the packed parameter, the tensor keeps its name.  If a
        packed parameter has no ``weight_loader``, the parts are placed one after another, in the
        order of the mapping, along the dimension in which their sizes add up to the parameter's
        size.  Default: the model's attribute ``packed_modules_mapping``, if it exists.
    rename : callable or mapping, optional
        New names for the checkpoint's tensors, applied before `packed_modules_mapping`.  A function
        gets the old name and returns the new one.  The keys of a mapping are complete names, or
        some components of names (``{"transformer.h": "layers", "gamma": "weight"}``).  A tensor
        whose new name is None is not loaded.
    prefix : str, default ""
        Loads only tensors whose names begin with the prefix, and removes the prefix from the names.
        For example, ``"vision_tower."`` loads this part of a checkpoint.
    strict : bool, default True
        Whether to raise an error for tensors that are missing, unexpected or duplicate, and for
        missing parts of a packed parameter.  If False, the last of several duplicates is loaded.
    ignore_mismatched_sizes : bool, default False
        Whether to leave out tensors with a wrong shape, and name them in the result, instead of
        raising an error.
    assign : bool, default False
        Whether new tensors with the file's dtypes replace parameters and buffers, as
        ``load_state_dict(assign=True)`` does, once all tensors are read.  Packed parameters and
        parameters with a ``weight_loader`` are filled in place.  With `assign`, a model on the meta
        device needs no `device`.
    device : torch.device, str or int, optional
        Device to move the model to.  A tensor on the meta device gets memory on this device, as
        :meth:`torch.nn.Module.to_empty` gives it, but stays tied and keeps its attributes.  By
        default, the model stays where it is.
    dtype : torch.dtype, optional
        The model's floating-point tensors are converted to this dtype before they are filled, as
        :meth:`torch.nn.Module.to` does.  With `assign`, the dtype of the new tensors.
    progress : bool, default False
        Whether to show a progress bar.
    storage_options : mapping, optional
        Arguments for the file system of a URL.
    process_group : torch.distributed.ProcessGroup, optional
        One rank of the group reads the files for all ranks, or one rank of each host if the hosts
        have equal files.  All ranks call this with the same path, each with its own model and
        options.  If one fails, all raise.  If a model does not fit, all raise before any change.
        For a ``weight_loader`` with ``takes_slices``, each complete tensor is received first.
    map_location, key_mapping : optional
        Other names of `device` and `rename`.

    Returns
    -------
    LoadedWeights
        The names of tensors that did not fit.

    Raises
    ------
    RuntimeError
        Names or shapes do not fit, as from :meth:`torch.nn.Module.load_state_dict`; the message
        names the file and the tensor.  Or the model is on the meta device, and `device` is missing.
        Or an expanded tensor for a ``weight_loader`` takes more than 1 GiB of memory, and more than
        8 times the bytes of its storage.
    CorruptCheckpointError
        A file is damaged or cut short, is not a checkpoint (a git-lfs pointer, a web page), or
        lacks a tensor that the index assigns to it.
    FileNotFoundError
        There is no file with weights, or a file that the index names is missing.
    UnsupportedUrlError
        `path` is a URL that fsspec cannot read.
    OSError
        A file cannot be read.
    UnsupportedSourceError
        With `process_group`, `path` is a file object.
    TypeError
        A file holds objects that are not tensors, or an argument has a wrong type.
    ValueError
        The directory holds several models, or the parts of one model for several ranks (the same
        names in ``consolidated.00.pth`` and ``consolidated.01.pth``).

    Notes
    -----
    If parameters or buffers share memory, the checkpoint needs only one of their names.  If it has
    several of these names, the last one in the model's order is loaded, as
    ``load_state_dict`` does.  Non-persistent buffers may be missing.  Lazy buffers
    (:func:`ptsave.register_lazy_buffer`) take the checkpoint's shape, and become None if the
    checkpoint lacks them.  Hooks, overrides of ``_load_from_state_dict``, versions of modules,
    extra state and lazy modules work as in :meth:`torch.nn.Module.load_state_dict`.  Tensors
    that a hook or an override reads stay in memory until its module is loaded.  All other tensors
    are read directly into the model.
    The CRCs in files of :func:`torch.save` are verified, except for tensors that are read in part.
    Safetensors files have no checksums.

    Examples
    --------
    >>> import tempfile, torch, ptsave
    >>> trained, fresh = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ptsave.save_model(trained, folder)
    ...     ptsave.load_model(fresh, folder)
    <All weights loaded>
    >>> torch.equal(trained.weight, fresh.weight)
    True
    """
    with failing_together(process_group, describe(path)):
        device = one_of(device=device, map_location=map_location)
        rename = one_of(rename=rename, key_mapping=key_mapping)
        _check_arguments(model, path, dtype)
        check_flags(
            strict=strict,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            assign=assign,
            progress=progress,
        )
        if packed_modules_mapping is None:
            packed_modules_mapping = getattr(model, "packed_modules_mapping", None) or {}
        packed = PackedModules(packed_modules_mapping)
        renaming = Renaming(rename, prefix)
        if isinstance(path, bytes):
            refuse_url(path)
            path = os.fsdecode(path)
    # There may be 100,000 entries, all in use.
    with (
        pausing_garbage_collection() as pause,
        opened_weights(path, storage_options, process_group) as weights,
    ):
        shards, entries = weights.shards, weights.entries
        modules = modules_in(model)
        lazy_buffers = LazyBuffers(modules, entries, renaming)
        tensors = ModelTensors(model, modules, lazy_buffers)
        skip = ignore_mismatched_sizes
        plan = WeightPlan(tensors, packed, shards, entries, renaming, skip_mismatched=skip)
        options = ModuleLoadOptions(
            strict, ignore_mismatched_sizes, assign, device, dtype, progress
        )
        is_code = overrides_load_state_dict(model) or have_code_of_their_own(modules, plan.names)
        if is_code or plan.loaders:
            pause.end()
        if is_code:
            _fill_by_code(model, weights, plan, options)
        else:
            _fill_by_names(model, weights, plan, lazy_buffers, options)
        if packed.places:
            present = tensors_in(model, modules)
            note_parts(
                (present[each.name], each.shard_id, each.entry.shape)
                for each in plan.deliveries
                if each.shard_id is not None
            )
    return plan.report


def _check_arguments(model: Any, path: Any, dtype: Any) -> None:
    if isinstance(path, nn.Module):
        raise TypeError("the arguments are in the wrong order: call load_model(model, path)")
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module to fill, not {model!r:.100}")
    is_dtype = dtype is None or isinstance(dtype, torch.dtype)
    if not is_dtype or (dtype and not (dtype.is_floating_point or dtype.is_complex)):
        raise TypeError(f"dtype must be a floating-point dtype of torch, not {dtype!r}")


def _fill_by_names(
    model: nn.Module,
    weights: LocalWeights | GroupWeights,
    plan: WeightPlan,
    lazy_buffers: LazyBuffers,
    options: ModuleLoadOptions,
) -> None:
    """Fill a model that has no hooks or other code that runs during loading."""
    extra_state = [key for shard in plan.shards for key in shard.objects]
    plan.report.unexpected_keys.extend(key for key in extra_state if plan.renaming(key) is not None)
    plan.check(model, strict=options.strict)
    weights.agree()
    tied_names = plan.tied_names()
    assignment = None
    if options.assign:
        assignment = Assignment(model, plan, options.dtype)
    on_meta = _move(model, plan, options, set() if assignment is None else assignment.names)
    if on_meta:
        filled = {name for names in tied_names.values() for name in names}
        filled.update(each.name for each in plan.deliveries)
        _warn_of_garbage([name for name in on_meta if name not in filled])
    has_moved = options.device is not None or options.dtype is not None
    tensors = tensors_in(model) if has_moved else dict(plan.tensors.by_name)
    tensors.update(lazy_buffers.allocate())
    if assignment is not None:
        tensors.update(assignment.allocate(tensors, options.device))
    items = items_of(tensors, plan)
    nbytes = sum(item.nbytes for item in items) if options.progress else 0
    with (
        closing(ShardReader(item.entry.shard for item in items)) as reader,
        progress_bar(options.progress, "loading", nbytes) as callback,
    ):
        weights.filling(reader, callback).fill(items, is_all=True)
    _renew_ties(tensors, tied_names)
    lazy_buffers.put()
    if assignment is not None:
        assignment.put()


def _fill_by_code(
    model: nn.Module,
    weights: LocalWeights | GroupWeights,
    plan: WeightPlan,
    options: ModuleLoadOptions,
) -> None:
    """Fill a model that has hooks or other code that runs during loading."""
    from ptsave.models.module_code import ModuleLoad

    load = ModuleLoad(model, plan, options)
    weights.agree()
    tied_names = plan.tied_names()
    on_meta = _move(model, plan, options, load.names if options.assign else set())
    nbytes = sum(entry.nbytes for entry in plan.entries)
    with (
        closing(ShardReader(entry.shard for entry in plan.entries)) as reader,
        progress_bar(options.progress, "loading", nbytes) as callback,
    ):
        filling = weights.filling(reader, callback)
        items = load.items(filling, reader)
        by_name = items_of(tensors_in(model), plan)
        filling.fill([*by_name, *items], is_all=True)
        load.finish()
    _warn_of_garbage([name for name in on_meta if not load.is_filled(name)])
    _renew_ties(tensors_in(model), tied_names)
    if options.assign:  # the assigned tensors still have the file's dtypes
        model.to(device=options.device, dtype=options.dtype)


# ------------------------------------------------------------------------------- where the model is


def _move(
    model: nn.Module, plan: WeightPlan, options: ModuleLoadOptions, assigned: Collection[str]
) -> list[str]:
    """Move the model, and return the names of the meta tensors that got memory."""
    device, dtype = options.device, options.dtype
    on_meta = [
        name
        for name, tensor in plan.tensors.by_name.items()
        if tensor.is_meta and name not in assigned
    ]
    if device is None:
        if planned := {delivery.name for delivery in plan.deliveries}.intersection(on_meta):
            raise RuntimeError(
                f"{len(planned)} parameters, such as {min(planned)}, are on the meta device and "
                "have no memory: pass device="
            )
        if dtype is not None:
            model.to(dtype)
        return []
    device = torch.empty(0, device=device).device  # raises torch's error for a bad device
    if dtype is not None:
        model.to(dtype)
    if on_meta:
        _allocate(model, device, assigned)
    if any(name in assigned and tensor.is_meta for name, tensor in tensors_in(model).items()):
        apply_to_tensors_of(model)(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        model.to(device)
    return on_meta


def _allocate(model: nn.Module, device: torch.device, assigned: Collection[str]) -> None:
    """Give memory on `device` to every tensor on the meta device that is not in `assigned`.

    ``to_empty`` would separate tied parameters. Here they stay tied, and tensors keep their types
    and attributes, such as ``weight_loader``.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old tensors, so that ids stay unique
    for prefix, module in model.named_modules():
        tables: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
        for table in tables:
            for name, tensor in table.items():
                full_name = f"{prefix}.{name}" if prefix else name
                if tensor is None or not tensor.is_meta or full_name in assigned:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = tensor, _allocated(tensor, device)
                table[name] = made[id(tensor)][1]


def _allocated(tensor: Tensor, device: torch.device) -> Tensor:
    with torch.no_grad():
        memory = torch.empty_like(tensor, device=device)
    if is_distributed_tensor(tensor):
        if isinstance(tensor, nn.Parameter):
            memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    elif isinstance(tensor, nn.Parameter) or type(tensor) is not Tensor:
        memory = make_subclass(type(tensor), memory, tensor.requires_grad)
    memory.__dict__.update(tensor.__dict__)
    return memory


def _warn_of_garbage(names: list[str]) -> None:
    if names:
        warn_user(
            f"the model was on the meta device, and the checkpoint has no values for "
            f"{some_of(names, 8)}: set them before you use the model",
            CheckpointWarning,
        )


def _renew_ties(tensors: dict[str, Tensor], tied_names: dict[str, list[str]]) -> None:
    """Copy the loaded values to each tensor that has lost its tie because the model was moved."""
    with torch.no_grad():
        for name, names in tied_names.items():
            for other in names:
                if tensors[other] is not tensors[name] and (
                    tensors[other].data_ptr() != tensors[name].data_ptr()
                ):
                    tensors[other].copy_(tensors[name])


class LocalWeights:
    """A model's files, which this process reads itself, and the tensors in them."""

    def __init__(self, opened: tuple[Sequence[Shard], list[Entry]]) -> None:
        self.shards, self.entries = opened

    def agree(self) -> None:
        """Do nothing: there are no other ranks."""

    def filling(self, reader: ShardReader, progress: ProgressCallback | None) -> Filling:
        """Return an object that fills a model's tensors through `reader`."""
        return Filling(reader, progress)


@contextmanager
def opened_weights(
    f: Any, storage_options: Mapping[str, Any] | None, group: Any
) -> Iterator[LocalWeights | GroupWeights]:
    """Open a model's files in this process; with a group, only on the ranks that read for all."""
    if has_others(group):
        from ptsave.models.group_weights import group_weights

        with group_weights(f, storage_options, group) as received:
            yield received
        return
    with ExitStack() as stack:
        yield LocalWeights(open_model(f, storage_options, stack))
