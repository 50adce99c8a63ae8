"""``ptsave show``: prints one entry of a checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ptsave.cli.arguments import SOURCE, complete_names, with_storage_options
from ptsave.cli.command import Command, with_json, with_recovery, with_trust
from ptsave.cli.listing import Style, file_json, tree_lines
from ptsave.cli.terminal import terminal
from ptsave.inspection.listing import listing_of, select
from ptsave.support.text import dtype_text, printable, shape_text, size_text
from ptsave.tree.containers import is_container
from ptsave.tree.tree import EntryNames

if TYPE_CHECKING:
    from torch import Tensor

_WIDTH = 80
_MAX_VALUES = 1000  # torch also summarises a tensor with more elements
_EXAMPLES = """
ptsave show checkpoint.pt epoch
ptsave show checkpoint.pt optimizer.param_groups
ptsave show model.safetensors embed.weight     # reads this tensor
ptsave show s3://bucket/checkpoint.pt model.head.bias
ptsave show checkpoints/1000 model.embed.weight --json | jq .statistics.max
ptsave show lightning.ckpt hyper_parameters --trust argparse.Namespace
"""


@click.command("show", cls=Command, examples=_EXAMPLES)
@click.argument("file", type=SOURCE)
@click.argument("name", default="", shell_complete=complete_names)
@with_json
@with_recovery
@with_trust
@with_storage_options("FILE")
def command(
    file: str, name: str, *, as_json: bool, recover: bool, storage_options: dict[str, Any] | None
) -> None:
    """Print one entry of FILE.

    NAME is as `ptsave ls` shows it, with dots between the levels, or Python's tuple of keys:
    "('a.b', 0)". Without it, the whole object is shown.

    Of a tensor: dtype, shape, size, the device it was saved from, its numbers as torch prints them,
    and statistics, of the finite elements. Nothing else is read. A container that holds tensors is
    listed, and none of them is read. An object of a class that is not built is an error, which
    names the class.

    With --json: an object with path, name, type and value; where JSON has no such value it is null,
    and text is Python's. Of a tensor: dtype, shape, nbytes, location, note and statistics, and the
    value of up to 1,000 elements, in which NaN and infinities are null. A container that holds
    tensors is an object as of `ptsave ls --json`.
    """
    from ptsave.capturing.statistics import tensor_statistics
    from ptsave.cli.statistics import statistics_json, statistics_line
    from ptsave.comparison.value_numbers import opened
    from ptsave.contents.contents import facts_of
    from ptsave.contents.opening import OpenOptions, open_checkpoint
    from ptsave.inspection.extraction import find_entry
    from ptsave.tree.leaves import read_entry, tensors_over

    contents = open_checkpoint(file, OpenOptions(storage_options, recover=recover))
    entry = find_entry(EntryNames(contents.obj, contents.path).find, name)
    tensors = tensors_over(entry)
    if tensors and is_container(entry):  # none of its tensors is read
        listing = listing_of(contents)
        (numbers,) = select([listing], [name] if name else [])
        if as_json:
            click.echo(json.dumps(file_json(listing, numbers)))
        else:
            click.echo("\n".join(tree_lines(listing, numbers, None, Style(terminal()))))
        return
    shown = f"{contents.path}: {name!r}" if name else contents.path
    value = read_entry(entry, lambda each: contents.read(each, None), shown)
    facts: dict[str, Any] = {"path": contents.path, "name": name, "type": type(value).__name__}
    if not tensors:
        click.echo(json.dumps({**facts, **_value_json(value)}) if as_json else _value_text(value))
        return
    tensor, location = opened(value), contents.places_of(tensors)[0][3]
    ((dtype, shape, _, _, nbytes, _),) = facts_of([tensor])
    found = tensor_statistics(name, tensor, nbytes)
    if as_json:
        facts |= {"dtype": dtype_text(dtype), "shape": [*shape], "nbytes": nbytes}
        facts |= {"location": location, "note": found.note}
        facts |= {"statistics": statistics_json(found.statistics), "value": _numbers_json(tensor)}
        click.echo(json.dumps(facts))
        return
    where = "" if location is None else f", saved from {printable(location)}"
    head = f"{dtype_text(dtype)} {shape_text(shape)}, {size_text(nbytes)}{where}"
    try:
        text = str(tensor)
    except NotImplementedError as error:  # torch cannot read elements of this dtype
        text = f"no numbers: {error}"
    click.echo("\n".join([head, *map(printable, text.splitlines()), statistics_line(found)]))


def _value_text(value: Any) -> str:
    text = repr(value)
    if is_container(value):
        import pprint

        text = pprint.pformat(value, width=terminal().width or _WIDTH, sort_dicts=False)
    return "\n".join(map(printable, text.splitlines()))


def _value_json(value: Any) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # a set, NaN, a list that contains itself
        return {"value": None, "text": repr(value)}
    return {"value": value}


def _numbers_json(tensor: Tensor) -> Any:
    from ptsave.cli.statistics import number_json

    def as_json(numbers: Any) -> Any:
        return [*map(as_json, numbers)] if isinstance(numbers, list) else number_json(numbers)

    if tensor.is_nested or tensor.numel() > _MAX_VALUES:
        return None
    try:
        return as_json(tensor.tolist())
    except RuntimeError:  # a sparse tensor, or a dtype that Python does not have
        return None
