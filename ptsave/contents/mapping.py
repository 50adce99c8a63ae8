"""Mapped checkpoints: `ptsave.share` and `ptsave.verified`."""

from __future__ import annotations

import os
from typing import Any

from ptsave.archive.loading import LoadOptions
from ptsave.archive.maps import checks_for, mapping, require_checks, wait_for
from ptsave.contents.archive import Archive
from ptsave.contents.contents import OneFile
from ptsave.contents.loading import load_source


def share(
    path: str | os.PathLike[str],
    *,
    pickle_module: Any = None,
    weights_only: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load a local checkpoint file so that all processes of a host share one verified copy.

    The tensors are views of the file in the page cache.  A page that a process writes to becomes a
    copy of its own (``MAP_PRIVATE``); the file and other processes do not change.  The first
    process compares the file with its checksums; others wait, and use the verdict.  A verdict is
    remembered in ``~/.cache/ptsave/verdicts`` until the file changes, see ``PTSAVE_VERDICTS``.

    Parameters
    ----------
    path : str or os.PathLike
        A ``.pt`` file of torch 1.6 or later that is not compressed, a safetensors file with
        ptsave's checksums, or an index or directory of such files.  Replacing it by a rename, as
        saves do, is safe.  If another program truncates the file, touching the map ends the
        process (SIGBUS).
    pickle_module, weights_only, **pickle_load_args
        As for :func:`ptsave.load`.

    Returns
    -------
    object
        The saved object, with all tensors in CPU memory.

    Raises
    ------
    CorruptCheckpointError
        If the file is damaged; the message names the entries.
    ValueError
        If the file cannot be mapped: a URL, a file object, another format, another device.  If a
        safetensors file has no checksums.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "model.pt")
    ...     ptsave.save({"weight": torch.ones(2)}, path)
    ...     ptsave.share(path)
    {'weight': tensor([1., 1.])}
    """
    options = LoadOptions(
        None, pickle_module, weights_only, mmap=True, pickle_load_args=pickle_load_args
    )
    return load_source(path, mapping(path, options, waits=True))


def verified(obj: Any, timeout: float | None = None) -> None:
    """Wait until the mapped files whose tensors are in `obj` are compared with their checksums.

    Parameters
    ----------
    obj : object
        A result of ``load(mmap=True, verify="background")`` or :func:`ptsave.share`, a part of it,
        a module to which its tensors were assigned, or an :class:`Archive` of ``open(map=True)``.
    timeout : float or None
        Seconds; None waits as long as it takes.

    Raises
    ------
    CorruptCheckpointError
        If a file is damaged; the message names the entries.
    OSError
        If a file cannot be read to its end, for example because it has been cut short.
    concurrent.futures.TimeoutError
        If there is no verdict within `timeout`.
    ValueError
        If `obj` has tensors, but none of them is in a mapped file that is checked.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "model.pt")
    ...     ptsave.save({"weight": torch.ones(2)}, path)
    ...     state = ptsave.load(path, mmap=True, verify="background")
    ...     ptsave.verified(state)
    """
    if isinstance(obj, Archive):
        parts = [part.map_check for part in obj._contents.parts if isinstance(part, OneFile)]
        checks = require_checks([check for check in parts if check is not None], obj)
    else:
        checks = checks_for(obj)
    wait_for(checks, timeout)
