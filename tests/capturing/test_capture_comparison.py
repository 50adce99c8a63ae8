"""`compare_captures`: runs that are equal, differ in one place, or in how they were made."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_line
import fsspec
import pytest
import torch
from torch import Tensor, nn

import ptsave
from ptsave.capturing.comparison import CaptureComparison, Tolerances, compare_captures

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # dynamo's imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo asks for it
]

Hook = Callable[[nn.Module], object]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + scale * down


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


def run(
    path: Path,
    model: nn.Module | None = None,
    *,
    steps: int = 1,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> str:
    model = network() if model is None else model
    model.to(dtype)
    generator = torch.Generator().manual_seed(1)
    with ptsave.capture(model, path, **options) as capture:
        for _ in range(steps):
            model(torch.randn(4, 8, generator=generator).to(dtype)).sum().backward()
            capture.step()
    return str(path)


@pytest.fixture
def runs(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    def make(change: Hook | None = None, **options: Any) -> tuple[str, str]:
        changed = network()
        if change is not None:
            change(changed)
        return run(tmp_path / "a.pt", **options), run(tmp_path / "b.pt", changed, **options)

    return make


Runs = Callable[..., tuple[str, str]]


def perturb(model: nn.Module) -> None:
    with torch.no_grad():
        model[1].up.bias.add_(1.0)  # type: ignore[index]


def test_equal_runs(runs: Runs) -> None:
    found = compare_captures(*runs(steps=2), exact=True)
    assert found.equal
    assert (found.first, found.remarks) == (None, [])
    with ptsave.open(runs()[0]) as one:
        n_values = len(one.captured_values())
    assert len(compare_captures(*runs(), exact=True).compared) == n_values
    assert found.nbytes > 0


def test_the_perturbed_layer_comes_first(runs: Runs) -> None:
    paths = runs(perturb, what=["inputs", "outputs"])
    found = compare_captures(*paths)
    first = found.first
    assert first is not None
    assert first.name == "0/forward/1.up#0/outputs"
    assert first.numbers is not None
    assert first.numbers.max_abs == pytest.approx(1.0, abs=1e-5)
    assert first.numbers.first == (0, 0)
    torch_a, torch_b = (torch.load(path)[first.name] for path in paths)
    assert first.numbers.n_different == int((torch_a != torch_b).sum())
    later = {each.call for each in found.differences}
    assert later == {f"0/forward/{name}#0" for name in ("1.up", "1.down", "1", "2", "")}
    with_params = compare_captures(*runs(perturb))
    assert with_params.first is not None
    assert with_params.first.name == "0/params/1.up#0/bias"


def test_inputs_are_shared_and_read_once(runs: Runs) -> None:
    found = compare_captures(*runs(what=["inputs", "outputs"]))
    tensors = [each for each in found.compared if each.a.kind == "tensor"]
    assert found.nbytes == sum({each.a.stored: each.a.nbytes for each in tensors}.values())
    assert len(tensors) > len({each.a.stored for each in tensors})


def test_two_dtypes(tmp_path: Path) -> None:
    a = run(tmp_path / "a.pt", what=["outputs"])
    b = run(tmp_path / "b.pt", what=["outputs"], dtype=torch.bfloat16)
    found = compare_captures(a, b, rtol=0.1, atol=0.1)
    assert found.equal
    outputs = [each for each in found.compared if each.numbers is not None]
    assert any(each.numbers.n_different for each in outputs if each.numbers)
    assert all(each.numbers.cosine > 0.99 for each in outputs if each.numbers)
    assert not compare_captures(a, b, rtol=0, atol=0).equal


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_runs(tmp_path: Path, backend: str) -> None:
    torch.compiler.reset()
    a = run(tmp_path / "a.pt", what=["inputs", "outputs"])
    model = network()
    with ptsave.capture(model, tmp_path / "b.pt", what=["inputs", "outputs"]) as capture:
        compiled = torch.compile(model, backend=backend)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        compiled(x).sum().backward()
        capture.step()
    assert compare_captures(a, str(tmp_path / "b.pt")).equal


class Branches(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        return sum((getattr(self, name)(x) for name in self.names), torch.zeros(()))


def test_reordered_and_missing_calls(tmp_path: Path) -> None:
    options: dict[str, Any] = {"what": ["outputs"], "include": ["left", "right"]}
    a = run(tmp_path / "a.pt", Branches(["left", "right"]), **options)
    b = run(tmp_path / "b.pt", Branches(["right", "left"]), **options)
    found = compare_captures(a, b, exact=True)
    assert found.equal
    assert [each.call for each in found.compared] == ["0/forward/left#0", "0/forward/right#0"]
    c = run(tmp_path / "c.pt", Branches(["right"]), **options)
    found = compare_captures(a, c)
    assert (found.only_in_a, found.only_in_b) == (["0/forward/left#0"], [])
    assert (found.equal, found.first) == (False, None)
    assert compare_captures(c, a).only_in_b == ["0/forward/left#0"]
    d = run(tmp_path / "d.pt", Branches(["right"]), what=["outputs"], include=["right"])
    found = compare_captures(a, d)
    assert found.equal
    assert "have different options" in found.remarks[0]


def test_not_a_number(runs: Runs) -> None:
    def spoil(model: nn.Module) -> None:
        with torch.no_grad():
            model[0].up.bias[3] = math.nan  # type: ignore[index]

    found = compare_captures(*runs(spoil, what=["outputs"]))
    assert found.first is not None
    assert found.first.numbers is not None
    assert found.first.name == "0/forward/0.up#0/outputs"
    assert found.first.numbers.n_nan_only_b == 4
    assert found.first.relative_error == math.inf
    path = str(runs(spoil, what=["outputs"])[1])
    assert compare_captures(path, path).equal


def test_statistics_alone(runs: Runs, tmp_path: Path) -> None:
    assert compare_captures(*runs(tensors=False), exact=True).equal
    found = compare_captures(*runs(perturb, what=["outputs"], tensors=False))
    assert found.first is not None
    assert (found.first.kind, found.first.name) == ("statistics", "0/forward/1.up#0/outputs")
    assert 0 < found.first.relative_error < math.inf
    whole = run(tmp_path / "whole.pt", what=["outputs"])
    part = run(tmp_path / "part.pt", what=["outputs"], tensors=False)
    assert compare_captures(whole, part, exact=True).equal
    bare = run(tmp_path / "bare.pt", what=["outputs"], tensors=False, statistics=False)
    found = compare_captures(whole, bare)
    assert "neither their values nor their statistics" in found.remarks[0]


def test_steps(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a.pt", steps=3), run(tmp_path / "b.pt", steps=2)
    found = compare_captures(a, b)
    assert not found.equal
    assert (found.only_in_a, found.only_in_b, found.first) == (["step 2"], [], None)
    assert compare_captures(b, a).only_in_b == ["step 2"]
    result = command_line.run("diff", "--capture", a, b)
    assert result.exit_code == 1
    assert "- step 2  only in" in result.stdout
    assert "different: 1 only in A" in result.stdout
    one = compare_captures(a, b, step=1)
    assert one.equal
    assert {each.name.split("/")[0] for each in one.compared} == {"1"}
    with pytest.raises(ValueError, match="no step 2 in common: their steps are 0, 1, 2 and 0, 1"):
        compare_captures(a, b, step=2)


def test_captures_that_were_asked_for_other_steps(tmp_path: Path) -> None:
    """What one has alone was to be expected."""
    paths = [str(tmp_path / name) for name in ("a.pt", "b.pt", "c.pt")]
    for path, steps in zip(paths, (range(3), [0, 2], range(3)), strict=True):
        model = network()
        with ptsave.capture(model, path, steps=steps) as capture:
            for step in range(3 if path != paths[2] else 2):
                model(torch.full((4, 8), float(step)))
                capture.step()
    a, b, c = paths
    found = compare_captures(a, b)
    assert found.equal
    reason = "the captures have different options"
    assert found.remarks == [f"only in {a}, because {reason}: step 1"]
    assert not compare_captures(a, c).equal


def test_killed_runs(runs: Runs, tmp_path: Path) -> None:
    whole, _ = runs(steps=2)
    model = network()
    capture = ptsave.capture(model, tmp_path / "killed.pt").start()
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        model(torch.randn(4, 8, generator=generator)).sum().backward()
        capture.step()
    capture._writer.flush()
    (leftover,) = tmp_path.glob(".killed.pt.*.ptsave")
    copied = shutil.copy(leftover, tmp_path / "copied.pt")
    capture.stop()
    with pytest.raises(ptsave.CorruptCheckpointError):
        compare_captures(whole, copied)
    found = compare_captures(whole, copied, recover=True)
    assert found.equal
    assert found.compared


def test_a_damaged_run(runs: Runs, tmp_path: Path) -> None:
    """A run without its end: of a damaged tensor there are the statistics."""
    whole, other = runs()
    content = bytearray(Path(other).read_bytes())
    name = "0/forward/1.up#0/outputs"
    content[content.index(torch.load(other)[name].detach().numpy().tobytes())] ^= 1
    Path(other).write_bytes(content[:-100])
    with pytest.warns(ptsave.CheckpointWarning, match=f"without the entries {name}"):
        found = compare_captures(whole, other, recover=True)
    assert found.equal
    assert {each.name: each.kind for each in found.compared}[name] == "statistics"


def test_a_checkpoint(tmp_path: Path) -> None:
    model = network()
    ptsave.save({f"module.{k}": v for k, v in model.state_dict().items()}, tmp_path / "model.pt")
    path = run(tmp_path / "a.pt", model, what=["params"], steps=2)
    file = str(tmp_path / "model.pt")
    found = compare_captures(path, file, exact=True)
    assert found.equal
    assert len(found.compared) == len(model.state_dict())
    other = {**network().state_dict(), "extra": torch.ones(1)}
    other["2.weight"] = other["2.weight"] + 1
    del other["2.bias"]
    ptsave.save({"model": other}, tmp_path / "other.pt")
    found = compare_captures(str(tmp_path / "other.pt"), path, step=1)
    assert [each.name for each in found.differences] == ["1/params/2#0/weight"]
    assert found.only_in_b == ["1/params/2#0/bias"]
    remark = f"not compared: 1 tensor of {tmp_path}/other.pt, because not parameters"
    assert found.remarks == [remark]
    with pytest.raises(ValueError, match="no parameters of step 7; steps with parameters: 0, 1"):
        compare_captures(path, file, step=7)
    with pytest.raises(ValueError, match=r"neither .* nor .* is a capture"):
        compare_captures(file, file)


def test_other_values(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self, scale: float, *, tuples: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block, self.scale, self.tuples = Block(), scale, tuples

        def forward(self, x: Tensor) -> Any:
            return self.block(x, scale=self.scale)

    a = run(tmp_path / "a.pt", Model(1.0, tuples=False), what=["inputs", "outputs"])
    b = run(tmp_path / "b.pt", Model(2.0, tuples=False), what=["inputs", "outputs"])
    first = compare_captures(a, b).first
    assert first is not None
    assert (first.kind, first.name) == ("value", "0/forward/block#0/inputs/scale")
    assert (first.a.value, first.b.value) == (1.0, 2.0)


def test_pieces_and_strides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptsave.comparison import tensors

    class Turn(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.place = place

        def forward(self, x: Tensor) -> Tensor:
            y = torch.arange(60.0).reshape(5, 12).clone()
            y.view(-1)[self.place] += 5
            return (y * self.weight).t()

    monkeypatch.setattr(tensors, "_PIECE_NBYTES", 64)
    a = run(tmp_path / "a.pt", Turn(0), what=["outputs"])
    b = run(tmp_path / "b.pt", Turn(41), what=["outputs"])
    numbers = compare_captures(a, b).first.numbers  # type: ignore[union-attr]
    assert numbers is not None
    assert (numbers.numel, numbers.n_different, numbers.max_abs) == (60, 2, 5)
    assert numbers.first == (0, 0)


class Returns(nn.Module):
    """A module with an output of any kind."""

    def __init__(self, value: Callable[[], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.value = value

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.value(), self.weight * 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("size", [3, 2_000_000])
def test_nested_tensors(tmp_path: Path, size: int) -> None:
    def make(shift: float, n: int = size) -> Path:
        parts = [torch.ones(2, 3), torch.ones(n, 3)]
        parts[1][1, 2] += shift
        path = tmp_path / f"{shift}-{n}.pt"
        model = Returns(lambda: torch.nested.nested_tensor(parts))
        with ptsave.capture(model, path, what=["outputs"], statistics=False):
            model(torch.ones(1))
        return path

    assert compare_captures(make(0.0), make(0.0)).equal
    found = compare_captures(make(0.0), make(1.0))
    (difference,) = found.differences
    assert difference.numbers is not None
    assert (difference.numbers.n_different, difference.numbers.max_abs) == (1, 1.0)
    assert difference.numbers.first == (1, 1, 2)
    other = compare_captures(make(0.0), make(0.0, size + 1))
    assert list(other.incomparable) == ["0/forward/#0/outputs/0"] or not other.equal


def test_what_no_measure_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said of the one, and the others are compared."""
    from ptsave.capturing import comparison

    def refuse(a: Tensor, b: Tensor) -> Any:
        if a.dtype == torch.int16:
            raise RuntimeError("internal error")
        return a, b

    monkeypatch.setattr(comparison, "dense_values", refuse)
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for weight, path in enumerate(paths):
        model = Returns(lambda: torch.ones(3, dtype=torch.int16))
        nn.init.constant_(model.weight, weight)
        with ptsave.capture(model, path, what=["outputs"], statistics=False):
            model(torch.ones(1))
    found = compare_captures(*paths)
    assert [each.name for each in found.differences] == ["0/forward/#0/outputs/1"]
    assert "cannot be compared (internal error)" in found.incomparable["0/forward/#0/outputs/0"]
    result = command_line.run("diff", *paths, "--capture")
    assert result.exit_code == 1
    assert "? 0/forward/#0/outputs/0: values of Tensor of torch.int16" in result.stdout
    result = command_line.run("diff", *paths[:1] * 2, "--capture")
    assert result.exit_code == 2
    assert "but 1 cannot be compared" in result.stdout


def test_hostile_captures(tmp_path: Path) -> None:
    path = run(tmp_path / "a.pt", what=["outputs"])
    entries = torch.load(path)
    name = "0/forward/1.up#0/outputs"
    for change, words in (
        (lambda found: found.pop(name), "missing"),
        (lambda found: found.update({name: 3}), "missing"),
        (lambda found: found["capture"].update(version="x"), "version"),
        (lambda found: found["0/records/0"].update(values=[1]), "not tuples"),
    ):
        changed = {**entries, "capture": {**entries["capture"]}}
        changed["0/records/0"] = {**entries["0/records/0"]}
        change(changed)  # type: ignore[no-untyped-call]
        torch.save(changed, tmp_path / "b.pt")
        with pytest.raises(ptsave.CorruptCheckpointError, match=words):
            compare_captures(path, tmp_path / "b.pt")
    entries[name] = torch.ones(3)  # not of the shape that its record says
    torch.save(entries, tmp_path / "b.pt")
    found = compare_captures(path, tmp_path / "b.pt")
    assert found.first is not None
    assert (found.first.kind, found.first.name) == ("shape", name)


def test_tolerances() -> None:
    """They are those of torch, found by its verdict about numbers just inside and outside."""
    tolerances = Tolerances(None, None)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        found = tolerances.of(dtype, dtype)
        expected = torch.zeros(2, dtype=torch.float64)
        expected[1] = 1e6
        for factor, is_near in ((0.99, True), (1.01, False)):
            for place in range(2):
                actual = expected.clone()
                actual[place] += factor * (found.atol + found.rtol * float(expected[place]))
                assert _is_near_for_torch(actual, expected, dtype) is is_near
    with pytest.raises(ValueError, match="cannot be combined"):
        Tolerances(1e-3, None, exact=True)
    with pytest.raises(ValueError, match="rtol must be 0 or more"):
        Tolerances(-1.0, None)


def _is_near_for_torch(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return its verdict with the defaults of a dtype; numbers in float64 lose no digits."""
    from torch.testing._comparison import default_tolerances

    rtol, atol = default_tolerances(dtype)
    return torch.allclose(actual, expected, rtol=rtol, atol=atol)


def test_one_file_twice(runs: Runs) -> None:
    path, _ = runs()
    assert compare_captures(path, path, exact=True).equal
    with open(path, "rb") as file:
        assert compare_captures(file, file, exact=True).equal
    assert isinstance(compare_captures(path, path), CaptureComparison)


def test_kinds_of_sources(runs: Runs, tmp_path: Path) -> None:
    a, b = runs()
    memory = fsspec.filesystem("memory")
    memory.pipe("/captures/a.pt", Path(a).read_bytes())
    try:
        stream = io.BytesIO(Path(a).read_bytes())
        for source in (Path(a), "memory://captures/a.pt", stream):
            assert compare_captures(source, b, exact=True).equal
        assert stream.tell() == 0
        (tmp_path / "renamed.bin").write_bytes(Path(a).read_bytes())  # contents decide
        assert compare_captures(tmp_path / "renamed.bin", b).equal
        refused: list[tuple[Any, type[Exception], str]] = [
            (tmp_path, ValueError, "pass the path of one"),
            (tmp_path / "nothing", FileNotFoundError, "No such file"),
            (3, TypeError, "expected a path, a URL or a seekable file"),
        ]
        for source, error, words in refused:
            with pytest.raises(error, match=words):
                compare_captures(source, b)
        with pytest.raises(TypeError, match="storage_options are only for URLs"):
            compare_captures(a, b, a_storage_options={"anon": True})
    finally:
        memory.rm("/captures", recursive=True)
