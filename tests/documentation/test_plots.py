"""Every table of figures in benchmarks/results has a plot; one that cannot be drawn is an error."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks._program import Program
from benchmarks._tables import Table, groups_of, tables_of
from benchmarks.plots import RESULTS, draw_report
from ptsave.bench.rounds import Bar, Group

pytest.importorskip("matplotlib")

REPORTS = sorted(RESULTS.glob("*.md"))
_RATIO = re.compile(r"\N{MULTIPLICATION SIGN}|\bx\b|of (the )?limit|times|faster|of torch's|slower")


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.stem)
def test_every_table_with_ratios_has_a_plot(report: Path, tmp_path: Path) -> None:
    pictures = draw_report(report, tmp_path)
    for table in tables_of(report.read_text()):
        has_ratios = any(_RATIO.search(heading) for heading in table.header)
        if has_ratios and not table.is_of_goals():
            assert table.number in pictures, table.header
    for number, picture in pictures.items():
        text = picture.read_text()
        written = {element.text for element in ET.fromstring(text).iter() if element.text}
        (table,) = (each for each in tables_of(report.read_text()) if each.number == number)
        bars = [bar for _, group in groups_of(table.of_one_state()) for bar in group.bars]
        assert {bar.text for bar in bars} <= written
        assert len(text) < 5_000 + 1_000 * len(bars)
        dark = picture.with_stem(f"{picture.stem}-dark").read_text()
        assert len(dark) == len(text)
        assert "#262626" not in dark


def of(*lines: str) -> Table:
    (table,) = tables_of("".join(f"| {line} |\n" for line in lines))
    return table


def test_contenders_are_rows() -> None:
    table = of(
        "workload | contender | s | min - max | of limit",
        "--- | --- | ---: | ---: | ---:",
        "load, cold | stock | 2.0 | 1.5 - 2.5 | 0.5",
        "load, cold | limit: direct read, 4 threads | 1.0 | 0.9 - 1.1 | 1.0",
        "load, warm | ptsave | 1,000 | 900 - 1,100 | 1.0",
    )
    cold = [Bar("stock", 2, 1.5, 2.5, "2.0 s"), Bar("limit", 1, 0.9, 1.1, "1.0 s", is_limit=True)]
    warm = [Bar("ptsave", 1000, 900, 1100, "1,000 s")]
    assert groups_of(table) == [("s", Group("load, cold", cold)), ("s", Group("load, warm", warm))]


def test_contenders_are_columns() -> None:
    table = of(
        "workload | | torch | ptsave | min - max | limit | of the limit",
        "--- | --- | ---: | ---: | ---: | ---: | ---:",
        "rows | seconds | 4 | 2 | 1 - 3 | 4.0 x | 0.5",
        "small | save, us | 30 |  |  |  |",
    )
    rows = [Bar("torch", 4, 4, 4, "4 s"), Bar("ptsave", 2, 1, 3, "2 s")]
    limit = Bar("limit", 1, 1, 1, "1 s", is_limit=True)
    small = [Bar("torch", 30, 30, 30, "30 us")]
    expected = [("s", Group("rows", [*rows, limit])), ("us", Group("small: save, us", small))]
    assert groups_of(table) == expected


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("name | color", "--- | ---", "a | red"), r"no figures in \| name \| color \|: a heading"),
        (("name | s", "--- | ---:", "a | soon"), r"no figures"),
        (("a | s | min - max", "--- | ---: | ---:", "b | 1 | often"), "'often' is no figure"),
    ],
)
def test_a_table_that_cannot_be_drawn(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    report = tmp_path / "report.md"
    report.write_text("# A\n\n" + "".join(f"| {line} |\n" for line in lines))
    with pytest.raises(ValueError, match=rf"report\.md, table 1: {message}"):
        draw_report(report, tmp_path)


def test_a_benchmark_draws_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = "| call | s | min - max |\n| --- | ---: | ---: |\n| save | 1.0 | 0.5 - 2.0 |"
    program = Program("it", "It", "", lambda: None, lambda *_: made, folder=tmp_path)
    report, plots = str(tmp_path / "it.md"), str(tmp_path / "plots")
    monkeypatch.setattr("sys.argv", ["it", "--output", report, "--plots", plots])
    program.main()
    assert sorted(path.name for path in Path(plots).iterdir()) == ["it-1-dark.svg", "it-1.svg"]
    monkeypatch.setattr("sys.argv", ["it", "--plots", plots])
    with pytest.raises(SystemExit, match="name one with --output"):
        program.main()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("sys.argv", ["it", "--output", report, "--plots", plots])
    with pytest.raises(SystemExit, match="plots need matplotlib"):
        program.main()
