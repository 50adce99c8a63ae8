"""Messages between the benchmark and its workers, so that neither imports the other."""

from __future__ import annotations

from dataclasses import dataclass

from ptsave.bench.system import REST_SECONDS, WARMED_UP


@dataclass(frozen=True)
class Task:
    """One measurement, sent to a worker."""

    action: str  # "probe", "save" or "load"
    contender: str  # "torch", "ptsave" or "safetensors"
    path: str = ""
    nbytes: int = 0  # least bytes of tensors, for a save
    fsync: bool = False
    page_cache: str = "warm"  # or "cold", for a load
    mmap: bool = False
    drop_all: bool = False  # drop all files from the page cache if the file alone cannot be
    state: str = WARMED_UP  # of the process and of free memory
    rest: float = REST_SECONDS  # before the call, unless the state is warmed up


@dataclass(frozen=True)
class Figure:
    """One measured figure, sent back by a worker."""

    seconds: float
    nbytes: int  # of tensors
    peak_nbytes: int  # resident memory above the tensors
    checksum: int  # over one byte of every page of every tensor
    touch_seconds: float = 0.0  # the part of `seconds` spent on touching every page, for a load
