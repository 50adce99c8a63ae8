"""Identifies files by their first bytes: checkpoints, HTML, git-lfs pointers, gzip, and others."""

from __future__ import annotations

import codecs
import errno
import os
import re
import stat
import struct
from typing import BinaryIO, Literal, TypeAlias

Kind: TypeAlias = Literal["zip", "legacy", "safetensors", "dcp"]
HEAD_NBYTES = 512
ZIP_MAGIC = b"PK\x03\x04"

MAX_SAFETENSORS_HEADER_NBYTES = 100_000_000  # the library's limit; text, read as a size, is larger

# The pickled magic number that files written before torch 1.6 begin with.
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# A pickle whose first name is the class of DCP's metadata.
_DCP_METADATA = (
    rb"(?s)\x80[\x02-\x05].{0,16}(?:torch\.distributed\.checkpoint\.metadata.{1,8}Metadata"
    rb"|megatron\.core\.dist_checkpointing\..{1,24}MCoreMetadata)"
)
_LFS_POINTER = b"version https://git-lfs"
_GGUF = b"GGUF"
_EMPTY_ZIP = b"PK\x05\x06"
_SIGNATURES = {
    b"\x1f\x8b": "it is compressed with gzip: decompress it first (gunzip)",
    b"BZh": "it is compressed with bzip2: decompress it first (bunzip2)",
    b"\xfd7zXZ\0": "it is compressed with xz: decompress it first (unxz)",
    b"\x28\xb5\x2f\xfd": "it is compressed with zstd: decompress it first (unzstd)",
    b"7z\xbc\xaf\x27\x1c": "it is a 7-Zip archive: unpack it first",
    b"Rar!": "it is a RAR archive: unpack it first",
    b"\x89HDF\r\n\x1a\n": "it is an HDF5 file: open it with h5py",
    b"\x93NUMPY": "it is a NumPy array: load it with numpy.load",
    _GGUF: "it is a GGUF model: open it with the gguf package",
    b"%PDF": "it is a PDF document",
    _EMPTY_ZIP: "it is an empty zip archive",
}
_PAGE = (
    rb"(?i)(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)?<(?:!doctype\s+html|html|head|body|(?P<xml>\?xml))\b"
)
_ONNX = rb"(?s)\x08[\x01-\x1f]\x12.(?:pytorch|onnx|tf2onnx|keras2onnx|skl2onnx)"
_UNKNOWN = "it begins with b"
_NAME_OFFSET = 30  # of the first member's name in a zip archive


def refuse_special_file(path: str | bytes | os.PathLike[str]) -> None:
    """Raise an OSError for a special file, such as a pipe or terminal, which has no known end."""
    _require_contents(os.stat(path).st_mode, path)


def refuse_special_stream(stream: BinaryIO, name: str) -> None:
    """Raise an OSError for an open special file, such as a pipe or terminal."""
    _require_contents(os.fstat(stream.fileno()).st_mode, name)


def regular_only(path: str | bytes | os.PathLike[str], flags: int) -> int:
    """Serve as ``opener`` of `open`, but refuse the files that `refuse_special_file` refuses.

    A pipe is not even opened, because a writer that waits for a reader would then begin to write.
    The open file is checked again, because the path may name another file by then.
    """
    refuse_special_file(path)
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    try:
        _require_contents(os.fstat(descriptor).st_mode, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_contents(mode: int, path: str | bytes | os.PathLike[str]) -> None:
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISBLK(mode)):
        raise OSError(
            errno.ESPIPE,
            f"{os.strerror(errno.ESPIPE)}: this is {_kind_of(mode)}, which does not support "
            "seeking: copy its output to a file",
            os.fspath(path),
        )


def _kind_of(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a character device" if stat.S_ISCHR(mode) else "a special file"


def is_zip(head: bytes) -> bool:
    """Return whether a file begins like a zip archive."""
    return head.startswith(ZIP_MAGIC)


def is_legacy(head: bytes) -> bool:
    """Return whether a file begins like the files that torch wrote before version 1.6."""
    return head.startswith(_LEGACY_MAGIC)


def is_dcp(head: bytes) -> bool:
    """Return whether a file begins like the metadata file of torch.distributed.checkpoint."""
    return re.match(_DCP_METADATA, head) is not None


def is_gguf(head: bytes) -> bool:
    """Return whether a file begins like a GGUF model."""
    return head.startswith(_GGUF)


def is_safetensors(head: bytes, nbytes: int) -> bool:
    """Return whether a file of `nbytes` bytes begins like a safetensors file, even if cut short."""
    if head[8:9] != b"{":
        return False
    (header_nbytes,) = struct.unpack_from("<Q", head)
    return bool(header_nbytes <= max(nbytes - 8, MAX_SAFETENSORS_HEADER_NBYTES))


def kind_of(head: bytes, nbytes: int) -> Kind | None:
    """Return the kind of checkpoint that a file's first bytes and size show, or None."""
    if is_zip(head):
        return "zip"
    if is_legacy(head):
        return "legacy"
    if is_dcp(head):
        return "dcp"
    return "safetensors" if is_safetensors(head, nbytes) else None


def what_it_is(head: bytes, nbytes: int) -> str | None:
    """Describe a file that is not a checkpoint, by its first `HEAD_NBYTES` bytes and its size.

    The result is None for a zip archive that may be a checkpoint.
    """
    if is_zip(head):
        return _what_zip_it_is(head)
    if instead := what_came_instead(head, nbytes):
        return instead
    for signature, what in _SIGNATURES.items():
        if head.startswith(signature):
            return what
    if re.match(_ONNX, head):
        return "it is an ONNX model: load it with the onnx package"
    if head[257:262] == b"ustar":
        return "it is a tar archive: unpack it first (ptsave.load reads it if torch 0.1 wrote it)"
    return _what_text_it_is(head)


def is_known(head: bytes) -> bool:
    """Return whether a file has a known format, such as zip, HDF5 or a plain pickle."""
    is_torchs = is_zip(head) or _is_pickle(head)
    return is_torchs or head[257:262] == b"ustar" or _has_signature(head)


def is_of_another_program(head: bytes) -> bool:
    """Return whether a file has a known format of another program, such as GGUF."""
    return _has_signature(head) and not head.startswith(_EMPTY_ZIP)


def _has_signature(head: bytes) -> bool:
    return head.startswith(tuple(_SIGNATURES)) or re.match(_ONNX, head) is not None


def _is_pickle(head: bytes) -> bool:
    return head.startswith(b"\x80") and head[1:2] <= b"\x05"


def what_it_surely_is(head: bytes, nbytes: int) -> str | None:
    """Describe the format of a file that torch failed to load, if the format is certain.

    The result is None for a checkpoint, a zip archive, a pickle, or an unknown format.
    """
    if is_zip(head) or is_legacy(head) or is_safetensors(head, nbytes) or _is_pickle(head):
        return None
    what = what_it_is(head, nbytes)
    return None if what is None or what.startswith(_UNKNOWN) else what


def what_came_instead(head: bytes, nbytes: int) -> str | None:
    """Describe the result of a failed download, such as an HTML page; None for other files."""
    if nbytes == 0:
        return "it is empty: the program that wrote it has failed or has not finished"
    if head.startswith(_LFS_POINTER):
        return _what_is_in_lfs(head)
    if page := re.match(_PAGE, head):
        kind = "an XML document" if page["xml"] else "an HTML page"
        return (
            f"it is {kind}, which a server may send if the file does not exist or needs a login: "
            "download the file again, from its own address"
        )
    return None


def _what_is_in_lfs(head: bytes) -> str:
    size = re.search(rb"^size (\d+)$", head, re.MULTILINE)
    holds = f" of {int(size[1])} bytes" if size else ""
    return (
        f"it is a git-lfs pointer to a file{holds}, which is missing here: fetch that file with "
        "`git lfs pull`"
    )


def _what_zip_it_is(head: bytes) -> str | None:
    name_nbytes = int.from_bytes(head[26:28], "little")
    name = head[_NAME_OFFSET : _NAME_OFFSET + name_nbytes]
    if name.endswith(b".npy"):
        return "it is a NumPy archive (.npz): load it with numpy.load"
    if name == b"[Content_Types].xml":
        return "it is an office document"
    if b"/" not in name and len(head) >= _NAME_OFFSET + name_nbytes:  # else the name is cut short
        return f"it is a zip archive of other files ({name.decode('utf-8', 'replace')!r}, ...)"
    return None


def _what_text_it_is(head: bytes) -> str:
    if not head.strip(b"\0"):
        return "it begins with zeros: a download or a copy was not finished"
    if _is_pickle(head):
        return (
            "it is a pickle that torch.save has not written: load it with the pickle module, if "
            "you trust it"
        )
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # may end inside a character
    except UnicodeDecodeError:
        text = "\0"
    if all(c.isprintable() or c.isspace() for c in text):
        return f"it is text: {text[:60]!r}"
    return f"it begins with {head[:16]!r}, but no checkpoint begins like that"
