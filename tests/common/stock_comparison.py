"""What the compatibility tests share: stock torch as it was, and "the same" for objects and errors.

Importable by every test module (pytest puts this directory on ``sys.path``).
"""

from __future__ import annotations

import dataclasses
import io
import re
import zipfile
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

import ptsave

stock_load, stock_save = torch.serialization.load, torch.serialization.save


def _torch_checks_record_sizes() -> bool:
    """Whether torch refuses a record that is larger or smaller than its storage; 2.9 does not."""
    stream = io.BytesIO()
    stock_save(torch.ones(3), stream)
    stream.seek(0)
    reader = torch._C.PyTorchFileReader(stream)
    try:
        reader.get_storage_from_record("data/0", 11, torch.uint8)
    except RuntimeError:
        return True
    return False


TORCH_CHECKS_RECORD_SIZES = _torch_checks_record_sizes()

_ATOMS = (type(None), bool, int, str, bytes, type, FunctionType, ModuleType)
_TORCH_ATOMS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme)
# Where in torch's sources an error was raised is not part of what people match on.
SOURCE_PLACE = re.compile(r"\[enforce fail at [\w.]+:\d+\] *\. *")


# ------------------------------------------------------------------------------------ saving


def saved_bytes(save: Callable[..., object], obj: object, **options: Any) -> bytes:
    """Save to memory."""
    stream = io.BytesIO()
    save(obj, stream, **options)
    return stream.getvalue()


def assert_same_bytes(obj: object, folder: Path, *, name: str = "file.pt", **options: Any) -> bytes:
    """Both engines must write the same file, to a path and to memory; returns the latter."""
    expected = saved_bytes(stock_save, obj, **options)
    assert saved_bytes(ptsave.save, obj, **options) == expected, "in memory"
    stock_path, path = folder / "stock" / name, folder / "ptsave" / name
    for each in (stock_path, path):
        each.parent.mkdir(parents=True, exist_ok=True)
    stock_save(obj, stock_path, **options)
    ptsave.save(obj, path, **options)
    assert path.read_bytes() == stock_path.read_bytes(), "to a path"
    return expected


def assert_interchangeable(
    obj: object,
    folder: Path,
    *,
    weights_only: Sequence[bool] = (True, False),
    load_options: dict[str, Any] | None = None,
    **save_options: Any,
) -> None:
    """Either engine must read what either has written, with the same result.

    As the files are the same bytes, comparing two loads of one file covers both directions.
    """
    data = assert_same_bytes(obj, folder, **save_options)
    path = folder / "ptsave" / "file.pt"
    for restricted in weights_only:
        options = {"weights_only": restricted, **(load_options or {})}
        expected = stock_load(io.BytesIO(data), **options)
        assert_same_object(ptsave.load(io.BytesIO(data), **options), expected)
        assert_same_object(ptsave.load(path, **options), expected)
        with path.open("rb") as stream:
            assert_same_object(ptsave.load(stream, **options), expected)


def storage_bytes(storage: Any) -> bytes:
    """Return what is in a CPU storage (``bytes(storage)`` takes a second for a megabyte)."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def zip_records(data: bytes) -> dict[str, bytes]:
    """Return the records of an archive, without their root folder, as other readers see them."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def zipped(records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """Write records, as of `zip_records`, as another zip writer would: no padding, no marks."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(f"archive/{name}", content)
    return stream.getvalue()


def deflated(data: bytes) -> bytes:
    """Return an archive with its records compressed."""
    return zipped(zip_records(data), zipfile.ZIP_DEFLATED)


def save_without_checksums(obj: Any, file: Path | io.BytesIO) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        stock_save(obj, file)
    finally:
        torch.serialization.set_crc32_options(True)


def typed_storage(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor's ``TypedStorage``, without the warning that torch gives for the type."""
    return torch.storage.TypedStorage(
        wrap_storage=tensor.untyped_storage(), dtype=dtype or tensor.dtype, _internal=True
    )


class Calls:
    """An object that is built by a call."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call = call, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def dtypes(names: str) -> list[torch.dtype]:
    """Return the dtypes of these names."""
    return [getattr(torch, name) for name in names.split()]


# ------------------------------------------------------------------------------------ errors


def failure_of(call: Callable[[], object]) -> BaseException:
    """Return what a call raises; it must raise."""
    try:
        result = call()
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised; the result is {result!r}")


def assert_same_failure(
    ours: Callable[[], object], stock: Callable[[], object], *, ignore: str = ""
) -> BaseException:
    """Our error must be of stock's type, or a subclass, and its message must contain stock's.

    `ignore` is a regular expression for what cannot be the same (addresses, paths).
    """
    expected, actual = failure_of(stock), failure_of(ours)
    assert isinstance(actual, type(expected)), f"{actual!r} in place of {expected!r}"
    wanted, found = (_message(error, ignore) for error in (expected, actual))
    assert wanted in found, f"\n{found}\ndoes not contain\n{wanted}"
    return actual


def assert_same_outcome(
    ours: Callable[[], object], stock: Callable[[], object], *, ignore: str = ""
) -> None:
    """Our call must have stock's result, or fail as stock's does."""
    try:
        expected = stock()
    except Exception:
        assert_same_failure(ours, stock, ignore=ignore)
    else:
        assert_same_object(ours(), expected)


def _made(source: Any) -> Any:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    return source() if callable(source) else source


def assert_same_load(source: Any, *, ignore: str = "", **options: Any) -> None:
    """Compare what loads come to; `source` is a path, contents, or makes a file object."""
    ours, stock = (partial(_load, load, source, options) for load in (ptsave.load, stock_load))
    assert_same_outcome(ours, stock, ignore=ignore)


def assert_same_load_failure(source: Any, *, ignore: str = "", **options: Any) -> BaseException:
    """Compare failures of loads; `source` is that of `assert_same_load`."""
    ours, stock = (partial(_load, load, source, options) for load in (ptsave.load, stock_load))
    return assert_same_failure(ours, stock, ignore=ignore)


def _load(load: Callable[..., Any], source: Any, options: dict[str, Any]) -> Any:
    return load(_made(source), **options)


def assert_same_save_failure(
    obj: object, target: Any = io.BytesIO, *, ignore: str = "", **options: Any
) -> BaseException:
    """Compare failures of saves; `target` is a path, or makes a file object."""
    return assert_same_failure(
        lambda: ptsave.save(obj, _made(target), **options),
        lambda: stock_save(obj, _made(target), **options),
        ignore=ignore,
    )


def _message(error: BaseException, ignore: str) -> str:
    text = SOURCE_PLACE.sub("", str(error))
    return re.sub(ignore, "", text) if ignore else text


# ----------------------------------------------------------------------------------- objects


def assert_same_object(actual: Any, expected: Any) -> None:
    """Compare two object graphs: types, values bit by bit, and which parts are shared.

    Sharing of storages and of objects must be the same in both: what is one storage (or one list)
    in one graph is one in the other.
    """
    _Comparison().compare(actual, expected, "object")


class _Comparison:
    def __init__(self) -> None:
        self._partners: dict[tuple[str, int], int] = {}
        self._kept: list[object] = []  # so that no id is used twice

    def compare(self, actual: Any, expected: Any, where: str) -> None:
        if type(actual) is not type(expected):
            raise AssertionError(f"{where}: {type(actual)} is not {type(expected)}")
        if isinstance(expected, _ATOMS + _TORCH_ATOMS):
            assert actual == expected, where
        elif isinstance(expected, (float, complex)):
            assert repr(actual) == repr(expected), where  # NaN is NaN, -0.0 is not 0.0
        elif self._pair("object", id(actual), id(expected), where):
            self._kept += [actual, expected]
            self._compare_parts(actual, expected, where)

    def _pair(self, kind: str, actual: int, expected: int, where: str) -> bool:
        """Note that two things correspond; returns whether that is new."""
        known = self._partners.setdefault((f"actual {kind}", actual), expected)
        back = self._partners.setdefault((f"expected {kind}", expected), actual)
        assert known == expected, f"{where}: shares its {kind} where stock's does not"
        assert back == actual, f"{where}: does not share its {kind} where stock's does"
        seen = self._partners.setdefault((f"pair {kind}", expected), 0)
        self._partners[f"pair {kind}", expected] = 1
        return not seen

    def _compare_parts(self, actual: Any, expected: Any, where: str) -> None:
        if isinstance(expected, torch.Tensor):
            self._compare_tensors(actual, expected, where)
        elif isinstance(expected, torch.storage.TypedStorage):
            assert actual.dtype == expected.dtype, where
            self._compare_storages(actual._untyped_storage, expected._untyped_storage, where)
        elif isinstance(expected, torch.UntypedStorage):
            self._compare_storages(actual, expected, where)
        elif isinstance(expected, (np.ndarray, np.generic)):
            assert actual.dtype == expected.dtype, where
            assert actual.shape == expected.shape, where
            assert actual.tobytes() == expected.tobytes(), where
        else:
            self._compare_containers(actual, expected, where)
        if getattr(expected, "layout", None) is not torch.jagged:  # has symbols of its own as sizes
            self._compare_attributes(actual, expected, where)

    def _compare_containers(self, actual: Any, expected: Any, where: str) -> None:
        if isinstance(expected, dict):
            assert len(actual) == len(expected), where
            pairs = zip(actual.items(), expected.items(), strict=True)
            for i, ((key, value), (expected_key, expected_value)) in enumerate(pairs):
                self.compare(key, expected_key, f"{where}, key {i}")
                self.compare(value, expected_value, f"{where}[{expected_key!r:.40}]")
        elif isinstance(expected, (list, tuple, deque)):
            assert len(actual) == len(expected), where
            for i, (part, expected_part) in enumerate(zip(actual, expected, strict=True)):
                self.compare(part, expected_part, f"{where}[{i}]")
        elif not hasattr(expected, "__dict__") and not hasattr(expected, "__slots__"):
            assert actual == expected, where

    def _compare_attributes(self, actual: Any, expected: Any, where: str) -> None:
        if hasattr(expected, "__dict__"):
            mine, theirs = (dict(vars(each)) for each in (actual, expected))
            self.compare(mine, theirs, f"{where}.__dict__")
        names = (name for cls in type(expected).__mro__ for name in vars(cls).get("__slots__", ()))
        for name in names:
            if name not in ("__dict__", "__weakref__") and hasattr(expected, name):
                self.compare(getattr(actual, name), getattr(expected, name), f"{where}.{name}")
        if dataclasses.is_dataclass(expected):
            assert repr(actual) == repr(expected), where

    def _compare_tensors(self, actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
        # A nested tensor's shape is not known, or known by a name that differs in each tensor.
        names = ["dtype", "device", "layout", "requires_grad", "is_leaf", "is_nested"]
        for name in names if expected.is_nested else [*names, "shape"]:
            mine, theirs = getattr(actual, name), getattr(expected, name)
            assert mine == theirs, f"{where}.{name}: {mine} is not {theirs}"
        if expected.layout is not torch.strided or expected.is_nested:
            self.compare(_components(actual), _components(expected), f"{where}, components")
        elif hasattr(expected, "__tensor_flatten__"):
            names, context = expected.__tensor_flatten__()
            assert actual.__tensor_flatten__() == (names, context), where  # type: ignore[attr-defined]
            for name in names:
                self.compare(getattr(actual, name), getattr(expected, name), f"{where}.{name}")
        else:
            self._compare_strided(actual, expected, where)

    def _compare_strided(self, actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
        assert actual.stride() == expected.stride(), where
        assert actual.storage_offset() == expected.storage_offset(), where
        assert actual.is_conj() == expected.is_conj(), where
        assert actual.is_neg() == expected.is_neg(), where
        if expected.is_quantized:
            assert _quantizer(actual) == _quantizer(expected), where
        self._compare_storages(actual.untyped_storage(), expected.untyped_storage(), where)

    def _compare_storages(self, actual: Any, expected: Any, where: str) -> None:
        assert actual.nbytes() == expected.nbytes(), where
        assert actual.device == expected.device, where
        offsets = [getattr(each, "_checkpoint_offset", None) for each in (actual, expected)]
        assert offsets[0] == offsets[1], f"{where}: checkpoint offsets {offsets}"
        if not self._pair("storage", actual._cdata, expected._cdata, where):
            return
        self._kept += [actual, expected]
        if expected.device.type != "meta":
            mine, theirs = (
                torch.empty(0, dtype=torch.uint8, device=each.device).set_(each)
                for each in (actual, expected)
            )
            assert torch.equal(mine, theirs), f"{where}: other bytes in the storage"


def _components(tensor: torch.Tensor) -> list[Any]:
    """Return the strided tensors that a sparse or nested tensor consists of, and its flags."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values(), tensor.is_coalesced()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout is torch.jagged:
        return [tensor.values(), tensor._offsets]  # type: ignore[attr-defined]
    return [
        tensor._nested_tensor_size(),
        tensor._nested_tensor_strides(),
        tensor._nested_tensor_storage_offsets(),
        tensor.values(),
    ]


def _quantizer(tensor: torch.Tensor) -> list[object]:
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [scheme, tensor.q_scale(), tensor.q_zero_point()]
    return [
        scheme,
        tensor.q_per_channel_axis(),
        tensor.q_per_channel_scales().tolist(),
        tensor.q_per_channel_zero_points().tolist(),
    ]


def sparse_tensors_to_validate() -> list[torch.Tensor]:
    """Return torch's list of what it is about to validate; of each thread from torch 2.15 on."""
    of_thread = getattr(torch._utils, "_get_sparse_tensors_to_validate", None)
    tensors: list[torch.Tensor]
    tensors = of_thread() if of_thread else torch._utils._sparse_tensors_to_validate
    return tensors
