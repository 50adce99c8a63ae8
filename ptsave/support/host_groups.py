"""Recognizes the ranks of one host, and makes groups of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import distributed
from torch.distributed import distributed_c10d

from ptsave.support.torch_distributed import timeout_of_group

__all__ = ["host_group", "host_identity", "in_global_order"]

# By the group, and the ranks of it: a group takes connections, and lives as long as that.
_made: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
# Gloo waits for a rank to connect, which may have ended, so many times as long as for its data.
_GLOO_CONNECTS = 5
_MIN_CONNECTING = timedelta(seconds=5)


def host_identity() -> str:
    """Return the same text in all processes of a host, and another one on every other host.

    That is the number of the kernel's last start, and the name of the host, which containers of one
    kernel have each for itself.

    Examples
    --------
    >>> host_identity() == host_identity()
    True
    """
    start = ""
    with suppress(OSError):
        start = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename} {start}"


def in_global_order(group: Any, ranks: Sequence[int]) -> list[int]:
    """Return ranks of a group in the order that they have in a group made of them."""
    return sorted(ranks, key=lambda rank: distributed.get_global_rank(group, rank))


def host_group(group: Any, ranks: Sequence[int]) -> Any:
    """Return the group of these ranks of another one, with its backend and timeout.

    Only they make the call, at the same time.
    """
    made = _made.setdefault(group, {})
    key = tuple(ranks)
    if key not in made:
        timeout = timeout_of_group(group)
        backend = distributed.get_backend_config(group)
        near = distributed.new_group(
            [distributed.get_global_rank(group, rank) for rank in ranks],
            timeout=_connecting(timeout) if "gloo" in backend else timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc="ptsave: the ranks of a host",
        )
        if timeout is not None and "gloo" in backend:
            distributed_c10d._set_pg_timeout(timeout, near)
        made[key] = near
    return made[key]


def _connecting(timeout: timedelta | None) -> timedelta | None:
    """Return the timeout with which gloo ends to connect when another timeout is over."""
    if timeout is None:
        return None
    return max(timeout / _GLOO_CONNECTS, min(timeout, _MIN_CONNECTING))
