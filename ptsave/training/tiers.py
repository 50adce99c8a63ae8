"""Keeps the checkpoints of a run in several places: a local directory, other hosts, a slow place.

A save goes to the local directory.  Then one thread computes the file's digest, writes its
manifest, and sends copies to ranks on other hosts.  Another thread copies the file to the slow
place, from the local file.  So training waits for neither.  A restore takes each part from the
nearest place that has it undamaged.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ptsave.errors import CheckpointWarning, CorruptCheckpointError
from ptsave.sources.locations import LocalFolder, refuse_url
from ptsave.sources.ranges import LocalFile, open_source
from ptsave.streaming.payload_sources import write_copy
from ptsave.support import config
from ptsave.support.calls import checked_int, warn_user
from ptsave.support.rank_groups import new_token
from ptsave.support.threads import ThreadPool
from ptsave.training import peers
from ptsave.training.directory import (
    GONE,
    MANIFEST,
    CheckpointDirectory,
    PartsOfHosts,
    Retention,
)
from ptsave.training.fallback import read_whole
from ptsave.training.manifests import Copy, Key, Manifest, copies_in, digest_of, manifest_of
from ptsave.training.peers import Address, PeerServer

if TYPE_CHECKING:
    from ptsave.training.rank_parts import RankParts

Found: TypeAlias = "list[dict[str, Any]]"  # each rank's `Tiers.listing`
_N_REMEMBERED = 64
_READ_NBYTES = 8 << 20  # by one request to a URL


class TierOptions(NamedTuple):
    """The options of `AsyncCheckpointer` for several places."""

    folder: str | os.PathLike[str]  # the local directory
    keep: int | None  # in the slow place
    keep_locally: int | None
    every: Mapping[str, int]  # "remote", "peers": steps divisible by the number are copied there
    n_peers: int
    remote: Path | str = ""
    retention: Retention = Retention()  # of the slow place
    storage_options: Mapping[str, Any] | None = None
    fsync: bool = True

    @classmethod
    def of(cls, local: Any, keep: Any, every: Any, n_peers: Any) -> TierOptions:
        """Return the options with these values of the user's; raise TypeError or ValueError."""
        kept = keep if isinstance(keep, Mapping) else {"local": keep, "remote": keep}
        every = {} if every is None else every
        for name, values, places in (
            ("keep", kept, {"local", "remote"}),
            ("every", every, {"local", "remote", "peers"}),
        ):
            if not isinstance(values, Mapping) or not values.keys() <= places:
                raise TypeError(f"{name} must be a dict with keys of {sorted(places)}: {values!r}")
            for place, number in values.items():
                if name != "keep" or number is not None:
                    checked_int(number, f"{name}[{place!r}]", 1)
        if every.get("local", 1) != 1:
            raise ValueError('every["local"] must be 1: each step is saved to the local directory')
        refuse_url(local)
        n_peers = checked_int(n_peers, "peers", 0)
        return cls(local, kept.get("remote", 3), kept.get("local", 3), dict(every), n_peers)

    def is_due(self, step: int, place: str) -> bool:
        """Return whether a step is copied to a place."""
        return step % self.every.get(place, 1) == 0


class Tiers:
    """The places of one run, as one rank sees them.

    `failed` gets the name and the error of a file that could not be copied, and whether to warn
    only.  With `sees_all`, this process knows all ranks of the job, or is the only one.  `pending`
    has the steps of saves for which `saved` has not been called yet.
    """

    def __init__(
        self,
        local: CheckpointDirectory,
        parts: RankParts | None,
        options: TierOptions,
        failed: Callable[[str, BaseException, bool], None],
        *,
        sees_all: bool,
        pending: Mapping[Any, int],
    ) -> None:
        self.path = local.path
        self.domain = config.failure_domain()
        self._local, self._parts, self._options = local, parts, options
        assert isinstance(local.folder, LocalFolder)
        self._folder = local.folder
        self._failed = failed
        self._pending = pending
        self._near = ThreadPool(1, "ptsave-near-copies")
        self._far = ThreadPool(1, "ptsave-far-copies")
        self._lock = threading.Lock()
        self._copies: deque[Future[None]] = deque()
        self._uploads: list[tuple[int, Future[None]]] = []
        self._written: int | None = None  # the step that was saved last
        self._holders: dict[Key, dict[int, list[_Holder]]] = {}
        self._peers: RankPeers | None = None
        naming = None if parts is None else parts.naming
        self._is_alone = not sees_all or (parts is not None and parts.is_alone)
        self._remote = CheckpointDirectory(
            options.remote,
            naming.in_shared_directory() if isinstance(naming, PartsOfHosts) else None,
            options.storage_options,
        )
        local.has_manifests = self._remote.has_manifests = True
        if parts is None and options.n_peers:
            raise TypeError("peers is for several ranks that each save a part of a checkpoint")
        if parts is not None and not self._is_alone:
            self._peers = RankPeers(local, parts, options)
            weakref.finalize(self, self._peers.server.close).atexit = False
            self._note_complete()

    # ------------------------------------------------------------------------------------- copying

    def begin(self, name: str) -> str:
        """Before a save to a file: remove the manifest of an older one, and name the save."""
        self._folder.remove(name + MANIFEST)
        return new_token()

    def saved(self, step: int, path: str, save: str, *, warns: bool) -> None:
        """Copy a new file of the local directory to the other places, on other threads."""
        name = os.path.basename(path)
        self._written = step
        try:
            file = LocalFile.open(path)  # now, because later steps may remove it soon
        except OSError as error:
            self._failed(name, error, warns)
            return
        copy = self._near.submit(
            self._reporting, name, warns, self._copy_near, step, file, save, warns
        )
        with self._lock:
            self._copies.append(copy)

    def wait(self) -> None:
        """Wait until all copies are made, or have failed."""
        while True:
            with self._lock:
                if not self._copies:
                    return
                copy = self._copies[0]
            with suppress(CancelledError):
                copy.exception()
            with self._lock:
                if self._copies and self._copies[0] is copy:
                    self._copies.popleft()

    def _reporting(self, name: str, warns: bool, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:  # also of file systems at URLs, which raise errors of any type
            self._failed(name, error, warns)

    def _copy_near(self, step: int, file: LocalFile, save: str, warns: bool) -> None:
        """Write the manifest, begin the copy to the slow place, send copies to peers, and prune."""
        name = os.path.basename(file.name)
        with closing(file):
            manifest = Manifest(name, file.nbytes, digest_of(file), save, (self.domain,))
            with self._lock:  # or `_note_place` could write an older one afterwards
                manifest.write(self._folder, fsync=self._options.fsync)
            if self._options.is_due(step, "remote"):
                self._begin_upload(step, file, manifest, warns)
            if self._peers is None or not self._peers.addresses:
                self._tell_done(name)
            elif self._options.is_due(step, "peers"):
                self._send(file, manifest, warns)
        self._prune_local()

    def _send(self, file: LocalFile, manifest: Manifest, warns: bool) -> None:
        """Send a file to this rank's peers, and report it to rank 0 once all of them have it."""
        assert self._peers is not None
        is_safe = True
        for domain, address in self._peers.addresses:
            try:
                args = address, self._peers.token, self._peers.timeout_s
                peers.put(*args, file, manifest.at(domain))
            except OSError as error:
                is_safe = False
                self._failed(manifest.file, error, warns)
            else:
                self._note_place(manifest, domain)
        if is_safe:
            self._tell_done(manifest.file)

    def _note_place(self, copied: Manifest, place: str) -> None:
        """Add a place to the manifest in the local directory, if the save is still there."""
        with self._lock:
            manifest = manifest_of(self._folder, copied.file)
            if manifest is not None and manifest.save == copied.save:
                manifest = manifest._replace(places=(*manifest.places, place))
                manifest.write(self._folder, fsync=self._options.fsync)

    def _tell_done(self, name: str) -> None:
        """Report this rank's part to rank 0, and learn which saves are complete on all ranks."""
        if self._peers is None:
            return
        naming = self._peers.naming
        save = naming.save_id(name)
        try:
            naming.known.update(self._peers.tell_done(save))
        except OSError as error:
            message = f"{self.path}: rank 0 does not answer, so old checkpoints stay: {error}"
            warn_user(message, CheckpointWarning)

    def _begin_upload(self, step: int, file: LocalFile, manifest: Manifest, warns: bool) -> None:
        with file.stream() as stream:
            own = LocalFile(stream, file.name)  # stays open if the file is removed
        call = self._upload, step, own, manifest
        upload = self._far.submit(self._reporting, manifest.file, warns, *call)
        with self._lock:
            self._copies.append(upload)
            self._uploads = [each for each in self._uploads if not each[1].done()]
            self._uploads.append((step, upload))
            waiting = [each for each in self._uploads if not each[1].running()]
            limit = self._options.keep_locally
            skipped = waiting[:-limit] if limit is not None else []
        for other, future in skipped:
            if future.cancel():
                message = f"step {other} is not copied there, because later steps wait, too"
                warn_user(f"{self._remote.path}: {message}", CheckpointWarning)

    def _upload(self, step: int, file: LocalFile, manifest: Manifest) -> None:
        """Copy a file and its manifest to the slow place, and prune there."""
        folder, place = self._remote.folder, str(self._remote.path)
        with closing(file):
            if self._parts is None:
                folder.remove(manifest.file + MANIFEST)  # of the file that is replaced
            write_copy(file, folder.file(manifest.file), fsync=self._options.fsync)
            manifest.at(place).write(folder, fsync=self._options.fsync)
        self._note_place(manifest, place)
        if self._parts is None or self._parts.is_first:
            self._remote.prune(self._options.retention, step)
            self._remote.remove_leftovers()

    def _prune_local(self) -> None:
        """Remove old checkpoints from the local directory."""
        try:
            if self._written is not None:
                keep = Retention(keep=self._options.keep_locally)
                self._local.prune(keep, self._written, self._newest)
            self._local.remove_leftovers()
        except OSError as error:
            message = f"{self.path}: old checkpoints cannot be removed: {error}"
            warn_user(message, CheckpointWarning)

    def _newest(self) -> set[int | None]:
        """Return the steps that must stay, if training has gone back to earlier steps."""
        return {*list(self._pending.values()), self._written}  # in this order: see `saved`

    def settle(self) -> None:
        """After all ranks have made their copies: learn what is complete, and prune."""
        if self._peers is not None:
            self._note_complete()
        self._prune_local()

    def _note_complete(self) -> None:
        """Let the names of the local directory know all saves that are complete; collective.

        If hosts send copies to each other, a save without them must not replace one that has them.
        """
        assert self._parts is not None
        assert self._peers is not None
        found = self._parts.ranks.gather(self.listing())
        keys = self.keys(found)
        if self._options.n_peers and len({each["domain"] for each in found}) > 1:
            keys = [key for key in keys if self._is_protected(key)]
        self._peers.naming.note_complete(keys)

    def close(self) -> None:
        """Serve no more requests of other ranks."""
        if self._peers is not None:
            self._peers.server.close()

    def require(self, step: int, found: Found) -> None:
        """Raise a FileNotFoundError if no place has the step; `found` has each rank's `listing`."""
        keys: Iterable[Key] = self.keys(found)
        if self._peers is not None:
            self._peers.naming.note_complete(key for key in keys if key[0] == step)
        if self._parts is None:
            keys = self._holders
        steps = sorted({each for each, _ in keys})
        if step not in steps:
            raise self.no_checkpoint(step, steps)

    def remove_step(self, step: int) -> None:
        """Remove a step from this host's directory and, on the first rank, from the slow place."""
        is_first = self._parts is None or self._parts.is_first
        for place in (self._local, self._remote) if is_first else (self._local,):
            with suppress(FileNotFoundError):  # it may be elsewhere, or another rank removes it
                place.remove_step(step)
            place.remove_leftovers()

    # --------------------------------------------------------------------------------- restoring

    def listing(self) -> dict[str, Any]:
        """Return JSON values: the copies that this rank sees, and how other ranks reach them."""
        lists_remote = self._is_alone or self._parts is None or self._parts.is_first
        return {
            "domain": self.domain,
            "path": str(self.path),
            "address": None if self._peers is None else self._peers.own,
            "local": _listed(self._local, self._n_parts),
            "remote": _listed(self._remote, self._n_parts) if lists_remote else [],
        }

    def keys(self, found: Found) -> list[Key]:
        """Return the saves that each rank can restore; `found` has each rank's `listing`.

        A rank that cannot ask the others counts only saves in the slow place, which all ranks see.
        """
        self._holders = self._holders_in(found)
        n_parts = self._n_parts
        if self._is_alone:
            return [
                key
                for key, holders in self._holders.items()
                if all(
                    any(each.kind == "remote" for each in holders.get(rank, ()))
                    for rank in range(n_parts)
                )
            ]
        return [
            key
            for key, holders in self._holders.items()
            if all(
                any(_reaches(each, holder) for holder in holders.get(rank % n_parts, ()))
                for rank, each in enumerate(found)
            )
        ]

    @property
    def _n_parts(self) -> int:
        return 1 if self._parts is None else self._parts.ranks.size

    def _holders_in(self, found: Found) -> dict[Key, dict[int, list[_Holder]]]:
        holders: dict[Key, dict[int, list[_Holder]]] = {}
        for each in found:
            address = each["address"] and Address(*each["address"])
            for kind in ("local", "remote"):
                for step, save, *rest in each[kind]:
                    copy = Copy(*rest)
                    holder = _Holder(copy, kind, each["domain"], each["path"], address)
                    holders.setdefault((step, save), {}).setdefault(copy.rank, []).append(holder)
        # A process may have ended before it wrote a manifest, or the manifest is damaged: then the
        # file counts as a copy of the newest save of its step.
        for unknown in [key for key in holders if not key[1]]:
            newest = max(key for key in holders if key[0] == unknown[0])
            if newest != unknown:
                for rank, copies in holders.pop(unknown).items():
                    holders[newest].setdefault(rank, []).extend(copies)
        return holders

    def protected(self, found: Found) -> int | None:
        """Return the highest step whose parts each lie in two failure domains, or None."""
        return max((key[0] for key in self.keys(found) if self._is_protected(key)), default=None)

    def _is_protected(self, key: Key) -> bool:
        return all(_is_protected(self._holders[key].get(n, ())) for n in range(self._n_parts))

    def latest(self, found: Found) -> Path | str | None:
        """Return the nearest place of this rank's part of the newest save, or None."""
        key = max(self.keys(found), default=None)
        return None if key is None else self.place_of(self._copies_of(key)[0])

    def candidate(self, key: Key, stack: ExitStack) -> TierCandidate:
        """Return this rank's part of a save, which `keys` has returned."""
        return TierCandidate(self, key[0], self._copies_of(key), stack)

    def _copies_of(self, key: Key) -> list[_Holder]:
        """Return the copies of this rank's part of a save, the nearest first."""
        rank = 0 if self._parts is None else self._parts.ranks.rank
        holders = self._holders[key].get(rank, [])
        here = (self.domain, str(self.path))
        near = [each for each in holders if each.is_here(here)]
        # One rank of each other directory is enough.
        others = {
            (each.domain, each.path): each
            for each in holders
            if each.kind == "local" and each.address
        }
        others.pop(here, None)
        far = [each for each in holders if each.kind == "remote"]
        return [*near[:1], *others.values(), *far[:1]]

    def no_checkpoint(self, step: int | None, steps: list[int]) -> FileNotFoundError:
        """Return the error for a `step` (None: any step) that is not among the `steps`."""
        others: list[str] = []
        with suppress(OSError):
            others = self._remote.folder.regular_files()
        return self._local.no_checkpoint(step, steps, others)

    def place_of(self, holder: _Holder) -> Path | str:
        """Return the path or URL of a copy; a copy on another host is fetched first."""
        if holder.kind == "remote":
            return self._remote.place_of(holder.copy.name)
        if not holder.is_here((self.domain, str(self.path))):
            assert self._peers is not None
            self._peers.fetch(holder, self._folder)
        return Path(self._folder.join(holder.copy.name))

    def opened(self, holder: _Holder, stack: ExitStack) -> Any:
        """Return a copy as an open file or, if a remote copy cannot be stored here, its URL."""
        place = self.place_of(holder)
        if isinstance(place, str):
            if not self._fetch_remote(place, holder.copy.name):
                return place
            place = Path(self._folder.join(holder.copy.name))
        return stack.enter_context(open(place, "rb"))

    def storage_options_of(self, source: Any) -> Mapping[str, Any] | None:
        """Return the options with which a result of `opened` is read."""
        return self._options.storage_options if isinstance(source, str) else None

    def digest_in(self, holder: _Holder) -> str | None:
        """Return the digest in the manifest of a copy that `opened` has opened."""
        folder = self._remote.folder if holder.kind == "remote" else self._folder
        manifest = manifest_of(folder, holder.copy.name)
        return None if manifest is None else manifest.digest

    def _fetch_remote(self, url: str, name: str) -> bool:
        """Copy a file from the slow place to the local directory; return False if that fails.

        A file here that is damaged is replaced.
        """
        options = self._remote.folder.storage_options
        known = manifest_of(self._remote.folder, name)
        with closing(open_source(url, options)) as source:
            manifest = (known or Manifest(name, 0, None)).at(self.domain)
            manifest = manifest._replace(nbytes=source.nbytes)
            begin = 0

            def fill(view: memoryview) -> int:
                nonlocal begin
                ends = range(begin, begin + len(view), _READ_NBYTES)
                ranges = [(at, min(at + _READ_NBYTES, begin + len(view))) for at in ends]
                done = 0
                for piece in source.read(ranges):
                    view[done : done + len(piece)] = piece
                    done += len(piece)
                begin += done
                return done

            try:
                peers.store(self._folder, manifest, fill, fsync=self._options.fsync)
            except OSError:  # the disk is full, for example of files that other ranks copy
                return False
            if manifest.digest is not None:
                with suppress(OSError):  # the file is whole without it
                    manifest.write(self._folder, fsync=self._options.fsync)
        return True


class _Holder(NamedTuple):
    """A copy, and the place that has it."""

    copy: Copy
    kind: str  # "local" or "remote"
    domain: str
    path: str
    address: Address | None

    def is_here(self, here: tuple[str, str]) -> bool:
        """Return whether the copy is in the directory `here`, a failure domain and a path."""
        return self.kind == "local" and (self.domain, self.path) == here


class TierCandidate:
    """The copies of this rank's part of a save, the nearest first; `stack` closes the file."""

    source: Any = None  # the open file, or the URL
    damage: Exception | None = None

    def __init__(
        self, tiers: Tiers, step: int, holders: Sequence[_Holder], stack: ExitStack
    ) -> None:
        self.step = step
        self._tiers = tiers
        self._holders = holders
        self._stack = stack

    def verify(self) -> str | None:
        """Find an undamaged copy, and warn of each other one; return None, or the damage of all.

        Return "" if all copies have been removed since they were listed.
        """
        reports = []
        for holder in self._holders:
            try:
                with ExitStack() as stack:
                    self.source = self._tiers.opened(holder, stack)
                    options = self._tiers.storage_options_of(self.source)
                    read_whole(self.source, options, partial(self._tiers.digest_in, holder))
                    self._stack.push(stack.pop_all())
            except (CorruptCheckpointError, OSError) as error:
                reports.append(getattr(error, "brief", None) or str(error))
                if getattr(error, "errno", None) not in GONE:
                    self.damage = self.damage or error
                continue
            for report in reports:
                message = f"step {self.step} is restored from another copy: {report}"
                warn_user(f"{self._tiers.path}: {message}", CheckpointWarning)
            return None
        return "; ".join(reports) if self.damage is not None else ""


def _listed(place: CheckpointDirectory, n_parts: int) -> list[Any]:
    """Return the copies in a directory as JSON values; warn if it cannot be listed."""
    try:
        return [
            [*key, *copy]
            for key, copy in copies_in(place.folder)
            if copy.n_ranks == n_parts and place.naming.is_checkpoint(copy.name)
        ]
    except OSError as error:
        warn_user(f"{place.path}: the checkpoints cannot be listed: {error}", CheckpointWarning)
        return []


def _reaches(listing: dict[str, Any], holder: _Holder) -> bool:
    """Return whether the rank of a listing can read a copy."""
    if holder.kind == "remote" or holder.address is not None:
        return True
    return holder.is_here((listing["domain"], listing["path"]))


def _is_protected(holders: Iterable[_Holder]) -> bool:
    whole = [each for each in holders if each.copy.has_manifest]
    domains = {each.domain for each in whole if each.kind == "local"}
    return len(domains) > 1 or any(each.kind == "remote" for each in whole)


# ------------------------------------------------------------------------------------------ ranks


class RankPeers:
    """The servers of all ranks, and the ranks to which this one sends copies; a collective call."""

    def __init__(self, local: CheckpointDirectory, parts: RankParts, options: TierOptions) -> None:
        naming = parts.naming
        assert isinstance(naming, PartsOfHosts)
        self.naming = naming
        ranks = parts.ranks
        self.timeout_s = timeout_s = ranks.timeout_s
        self._rank = ranks.rank
        self._fsync = options.fsync
        self._reported: dict[tuple[int, str, int], set[int]] = {}
        self._complete: deque[tuple[int, str, int]] = deque(maxlen=_N_REMEMBERED)
        self._lock = threading.Lock()
        self.token = str(ranks.gather(secrets.token_hex(32))[0])
        self._n_ranks = ranks.size
        folder: Any = local.folder
        with parts.together("listen to other ranks"), peers.advising():
            self.server = PeerServer(
                folder,
                self.token,
                timeout_s,
                fsync=options.fsync,
                accepts=naming.is_checkpoint,
                report=self._report,
            )
            self.own = [peers.own_host(), self.server.port]
        domain = config.failure_domain()
        found = ranks.gather([domain, self.own])
        domains = [each[0] for each in found]
        hosts = [Address(*each[1]) for each in found]
        self._first = self._seen(hosts[0], domains[0])
        self.addresses = [
            (domains[rank], self._seen(hosts[rank], domains[rank]))
            for rank in peers_of(domains, ranks.rank, options.n_peers)
        ]
        if len(self.addresses) < options.n_peers and parts.is_first:
            message = (
                f"{local.path}: peers={options.n_peers}, but only {len(self.addresses)} other "
                "hosts take part in this job, so fewer copies are made"
            )
            warn_user(message, CheckpointWarning)
        reached = "reach the ranks of other hosts; set PTSAVE_PEER_ADDRESS on each host"
        with parts.together(reached), peers.advising():
            for _, address in self.addresses:
                with peers.connected(address, timeout_s):
                    pass

    def _seen(self, address: Address, domain: str) -> Address:
        return address if domain == config.failure_domain() else peers.seen_from_here(address)

    def _report(self, rank: int, save: list[Any]) -> list[Any]:
        """Note on rank 0 that a rank has its part; return the saves that all ranks have noted."""
        step, session, repeat = save
        key = int(step), str(session), int(repeat)
        with self._lock:
            ranks = self._reported.setdefault(key, set())
            ranks.add(rank)
            if len(ranks) == self._n_ranks:
                del self._reported[key]
                self._complete.append(key)
            return [list(each) for each in self._complete]

    def tell_done(self, save: tuple[int, str, int]) -> list[tuple[int, str, int]]:
        """Report a save to rank 0; return the saves that are complete on all ranks."""
        if self._rank == 0:
            found = self._report(0, list(save))
        else:
            args = self._first, self.token, self.timeout_s, self._rank, list(save)
            found = peers.tell_done(*args)
        return [(int(step), str(session), int(repeat)) for step, session, repeat in found]

    def fetch(self, holder: _Holder, folder: LocalFolder) -> None:
        """Copy a file from another host to the local directory."""
        assert holder.address is not None
        address = self._seen(holder.address, holder.domain)
        wanted = Manifest(holder.copy.name, 0, None, places=(config.failure_domain(),))
        peers.get(address, self.token, self.timeout_s, wanted, folder, fsync=self._fsync)


def peers_of(domains: Sequence[str], rank: int, n: int) -> list[int]:
    """Return the ranks in the next `n` failure domains to which `rank` sends copies.

    Ranks of one host send to different ranks of the next host.

    >>> [peers_of(["a", "a", "b", "b"], rank, 1) for rank in range(4)]
    [[2], [3], [0], [1]]
    """
    hosts = list(dict.fromkeys(domains))
    ranks_of = {host: [r for r, each in enumerate(domains) if each == host] for host in hosts}
    own = hosts.index(domains[rank])
    place = ranks_of[domains[rank]].index(rank)
    others = (hosts[(own + i) % len(hosts)] for i in range(1, min(n, len(hosts) - 1) + 1))
    return [ranks_of[host][place % len(ranks_of[host])] for host in others]
