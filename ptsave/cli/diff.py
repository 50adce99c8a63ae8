"""``ptsave diff``: shows the differences between two checkpoints or two captured runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click

from ptsave.cli.commands import (
    FAILED,
    NEGATIVE,
    SOURCE,
    Command,
    note,
    shows_progress,
    with_storage_options,
)
from ptsave.support.text import printable

_COLORS = {"-": "red", "+": "green", ">": "cyan", "~": "yellow", "!": "red"}
_EXAMPLES = """
ptsave diff before.pt after.pt
ptsave diff model.pt model.safetensors      # in different formats: only tensors are compared
ptsave diff old/ new/ --rtol 1e-3 --top 20  # directories of shards; the 20 largest differences
ptsave diff a.pt b.pt --shapes              # names, types, dtypes and shapes: reads no values
ptsave diff a.pt b.pt --only 'model.*' --ignore-dtype --json
ptsave diff run-a.pt run-b.pt --capture     # captured runs: the first call that differs
ptsave diff run.pt model.pt --capture --step 0  # the parameters of a step
"""


@click.command("diff", cls=Command, examples=_EXAMPLES)
@click.argument("a", type=SOURCE)
@click.argument("b", type=SOURCE)
@click.option("--rtol", type=float, help="Tolerance relative to the values in B.")
@click.option("--atol", type=float, help="Absolute tolerance.")
@click.option("--names-only", is_flag=True, help="Compare names and types only.")
@click.option("--shapes", is_flag=True, help="Compare names, types, dtypes and shapes only.")
@click.option("--ignore-dtype", is_flag=True, help="Compare values of different dtypes.")
@click.option("--only", metavar="GLOB", multiple=True, help="Compare only entries that match GLOB.")
@click.option(
    "--top", metavar="N", type=click.IntRange(min=0), help="Show the N largest differences only."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--capture", is_flag=True, help="Compare captured runs, or a run with a checkpoint.")
@click.option("--step", type=click.IntRange(min=0), help="With --capture: this step only.")
@click.option("--exact", is_flag=True, help="With --capture: values must have equal bits.")
@click.option("--recover", is_flag=True, help="With --capture: read files of killed runs.")
@click.option("--plot", metavar="PNG", help="With --capture: draw the errors along the network.")
@with_storage_options("A", "a")
@with_storage_options("B", "b")
@click.pass_context
def diff_command(
    ctx: click.Context,
    /,
    a: str,
    b: str,
    *,
    names_only: bool,
    shapes: bool,
    ignore_dtype: bool,
    only: tuple[str, ...],
    top: int | None,
    as_json: bool,
    capture: bool,
    step: int | None,
    exact: bool,
    recover: bool,
    plot: str | None,
    **options: Any,
) -> None:
    """Compare two checkpoints: names, types, dtypes, shapes, values.

    A and B are files (.pt, .safetensors), directories, or URLs. For two directories, all files are
    compared: checkpoints with the same name or step, and other files byte by byte. Tensors are
    equal if their bits are equal: 0.0 and -0.0 differ (by 0), and two NaNs may differ, too.
    With --rtol or --atol, values are equal if |a - b| <= atol + rtol * |b|, as for
    torch.testing.assert_close, and NaN equals any NaN.

    With --capture, A and B are runs that ptsave.capture has recorded. Their calls are matched by
    step, module and call number. The command prints the first call that differs, then the worst
    figures of each module. The error is the largest distance divided by the root mean square of B.
    The cosine of two all-zero tensors is 1; "-" means that a cosine is not defined. The tolerance
    is assert_close's default for the coarser dtype, unless --rtol, --atol or --exact is given. If A
    or B is a checkpoint, its tensors are compared with the parameters of --step, or the first step.

    Exit code: 0 if A and B are equal, 1 if they differ, 2 if a value could not be compared. A step
    or call that only one run has is a difference, if both captures have the same options.
    """
    options["progress"] = shows_progress(ctx)
    if capture:
        from ptsave.bench.rounds import check_plot
        from ptsave.capturing.comparison import compare_captures
        from ptsave.cli.differences import capture_json, capture_lines, plot_errors

        if names_only or shapes or ignore_dtype or only:
            raise click.UsageError(
                "--names-only, --shapes, --ignore-dtype and --only cannot be used with --capture"
            )
        if plot is not None:
            check_plot(plot)
        runs = compare_captures(a, b, exact=exact, step=step, recover=recover, **options)
        if plot is not None:
            plot_errors(plot, runs, f"{a} / {b}")
        if as_json:
            click.echo(json.dumps(capture_json(a, b, runs)))
        else:
            _show(ctx, runs.remarks, capture_lines(a, b, runs, top))
        ctx.exit(NEGATIVE if not runs.equal else FAILED if runs.incomparable else 0)
    if exact or recover or step is not None or plot is not None:
        raise click.UsageError("--step, --exact, --recover and --plot need --capture")
    from ptsave.cli.differences import comparison_json, comparison_lines
    from ptsave.comparison.compare import compare

    found = compare(
        a,
        b,
        detail="names" if names_only else "shapes" if shapes else "values",
        ignore_dtype=ignore_dtype,
        patterns=only,
        **options,
    )
    if as_json:
        click.echo(json.dumps(comparison_json(a, b, found, top)))
    else:
        _show(ctx, found.remarks, comparison_lines(a, b, found, top))
    ctx.exit(NEGATIVE if found.differences else FAILED if found.not_compared else 0)


def _show(ctx: click.Context, remarks: Sequence[str], lines: Iterable[str]) -> None:
    for remark in remarks:
        note(ctx, printable(remark))
    for line in lines:
        click.echo(click.style(line, fg=_COLORS.get(line[:1])))
