"""Recognizes the ranks of one host, and makes process groups of them."""

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

# By group and ranks: a host's group holds connections, so it is kept as long as the whole group.
_made: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
# Gloo waits this many times its timeout for a rank to connect, even if the rank has ended.
_GLOO_CONNECTS = 5
_MIN_CONNECTING = timedelta(seconds=5)


def host_identity() -> str:
    """Return a text that is the same in all processes of a host, and different elsewhere.

    It holds the kernel's boot ID, and the host's name, which differs between containers.
    """
    start = ""
    with suppress(OSError):
        start = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename} {start}"


def in_global_order(group: Any, ranks: Sequence[int]) -> list[int]:
    """Return ranks of a group in the order of a new group made of them."""
    return sorted(ranks, key=lambda rank: distributed.get_global_rank(group, rank))


def host_group(group: Any, ranks: Sequence[int]) -> Any:
    """Return the process group of some ranks of a group, with its backend and timeout.

    Only these ranks make the call, all at the same time.
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
    """Return the timeout that makes gloo give up connecting after `timeout`."""
    if timeout is None:
        return None
    return max(timeout / _GLOO_CONNECTS, min(timeout, _MIN_CONNECTING))
