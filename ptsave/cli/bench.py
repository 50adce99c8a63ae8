"""``ptsave bench``: measures saves and loads on this machine."""

from __future__ import annotations

import json
import re
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ptsave.cli.commands import FILE, Command, note, shows_progress
from ptsave.support.text import size_text

if TYPE_CHECKING:
    from ptsave.bench.rounds import Measurement, Plan

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_EXAMPLES = """
ptsave bench                                # in this directory
ptsave bench /mnt/scratch --size 4GiB --rounds 5
ptsave bench --plot speeds.png --markdown > speeds.md
"""


def _size(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Parse a size such as 4GiB, 512M, 1.5g or 1000000."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.I | re.A)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size, such as 512MiB or 4GiB", ctx, option)
    return int(float(match[1]) * _UNITS[match[2].upper()])


@click.command("bench", cls=Command, examples=_EXAMPLES)
@click.argument("directory", metavar="[DIR]", default=".", type=FILE)
@click.option(
    "--size",
    callback=_size,
    help="Tensor bytes in each file.  [default: 1GiB, at most a quarter of free memory and disk]",
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--state",
    type=click.Choice(["as-found", "warmed-up", "cold"]),
    default="as-found",
    show_default=True,
    help="Measure a first call, a later call, or (as root) a first call with cold memory.",
)
@click.option("--markdown", is_flag=True, help="Print a markdown report with the machine's data.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
@click.option("--plot", type=FILE, metavar="FILE", help="Write a picture, too: .png, .svg or .pdf.")
@click.pass_context
def bench_command(
    ctx: click.Context,
    directory: str,
    *,
    size: int | None,
    rounds: int,
    state: str,
    markdown: bool,
    as_json: bool,
    plot: str | None,
) -> None:
    """Measure saves and loads in DIR with torch, safetensors and ptsave.

    Plain reads and writes of the same bytes show the hardware's limit.

    The command saves a GPT-2-like model with and without fsync, and loads it from the disk (cold)
    and from the page cache (warm).  The libraries take turns, in a shuffled order.  Each call
    is the first one of a new process, unless --state says otherwise.  A load ends when every page
    has been touched.  The columns s and GB/s show medians.  Each ratio is computed within a round,
    and its median over the rounds is shown.  The command removes its files at the end.
    """
    from ptsave.bench.rounds import (
        SPEED_HEADER,
        aligned,
        check_plot,
        measure_disk,
        plan_disk,
        plot_speeds,
        speed_rows,
        table,
    )
    from ptsave.bench.system import describe_machine

    if plot is not None:
        check_plot(plot)
    plan = plan_disk(directory, size, rounds, state.replace("-", " "))
    note(
        ctx,
        f"writes {size_text(plan.nbytes_written)} in all to {directory}, "
        f"{size_text(plan.nbytes_on_disk)} at a time, and removes the files",
    )
    found = measure_disk(plan, progress=shows_progress(ctx))
    for remark in found.remarks:
        note(ctx, remark)
    if as_json:
        click.echo(json.dumps(_as_json(plan, found)))
    else:
        rows = [
            row
            for name, workload in found.workloads.items()
            for row in speed_rows(workload, found.results[name])
        ]
        if markdown:
            again = ["ptsave", "bench", "--size", f"{plan.nbytes >> 20}MiB"]
            again += ["--rounds", str(rounds), "--state", state]
            machine = describe_machine(plan.directory, again)
            click.echo(f"{machine}\n\n{table(SPEED_HEADER, rows, 2)}")
        else:
            click.echo(aligned(SPEED_HEADER, rows, 2))
    if plot is not None:
        title = f"{size_text(plan.nbytes)} of tensors, {plan.state}, medians of {rounds} rounds"
        plot_speeds(plot, found.workloads, found.results, title)


def _as_json(plan: Plan, found: Measurement) -> dict[str, Any]:
    from ptsave.bench.rounds import LIMIT, STOCK

    workloads: dict[str, Any] = {}
    for name, results in found.results.items():
        workloads[name] = {
            contender: {
                "nbytes": figures[0].nbytes,
                "seconds": [figure.seconds for figure in figures],
                "median_seconds": median(figure.seconds for figure in figures),
                "times_torch": results.ratio(contender, STOCK),
                "of_limit": results.ratio(contender, LIMIT),
            }
            for contender, figures in results.figures.items()
        }
    return {
        "nbytes": plan.nbytes,
        "rounds": plan.rounds,
        "state": plan.state,
        "workloads": workloads,
        "remarks": found.remarks,
    }
