"""Where compiled code lies between runs: a folder of files named by the hash of what made them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

_LIMIT_BYTES = 256 << 20
_PRUNE_EVERY = 64  # files written by this process between two looks at the folder's size
_written = 0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a full disk, a quota and a limit on files say


def folder() -> Path:
    """The user's own cache folder: ``$TINYVLLM_HOME/kernels``, else the platform's cache folder.

    Per user on purpose: a folder that others can write to would let them plant a library.
    Where it can not be written to, a folder for this process alone is used.
    """
    home = os.environ.get("TINYVLLM_HOME")
    path = Path(home) / "kernels" if home else Path(platformdirs.user_cache_dir("tinyvllm")) / "kernels"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError:
        return process_folder()
    return path


_temporary: tempfile.TemporaryDirectory[str] | None = None


def process_folder() -> Path:
    """A folder that goes away with this process."""
    global _temporary
    if _temporary is None:
        _temporary = tempfile.TemporaryDirectory(prefix="tinyvllm-kernels-")
    return Path(_temporary.name)


def key(*parts: str) -> str:
    """A file name for what these texts make: the first 32 hex digits of their SHA-256."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


def get_or_make(name: str, make: Callable[[Path], None]) -> Path:
    """The cached file `name`, made by ``make(path)`` where it is missing.

    Safe with several processes at once: each makes its own file beside it and renames it into place, and
    whoever comes last wins with the same bytes.
    """
    global _written
    refused: OSError | None = None
    for base in (folder, process_folder):
        try:
            directory = base()
        except OSError as error:
            refused = error
            continue
        path = directory / name
        if path.exists():
            with contextlib.suppress(OSError):
                os.utime(path)  # the age that pruning looks at is that of the last use
            return path
        try:
            handle, made = tempfile.mkstemp(prefix=name + ".", suffix=".tmp", dir=directory)
            os.close(handle)
        except OSError as error:
            refused = error
            continue  # the disk is full, or the folder went away: try the next one
        try:
            make(Path(made))
            os.chmod(made, 0o700)
            os.replace(made, path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(made)
            if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
                raise
            refused = error
            continue
        _written += 1
        if _written % _PRUNE_EVERY == 0:
            prune(directory)
        return path
    raise OSError(
        f"no folder for compiled kernels can be written to ({refused}). Free some space, or set TINYVLLM_HOME and "
        "TMPDIR to folders on a disk that has some"
    )


def load(name: str, make: Callable[[Path], None]) -> tuple[ctypes.CDLL, Path]:
    """The cached library `name`, loaded; one that can not be loaded (cut short, say) is made again."""
    path = get_or_make(name, make)
    try:
        return ctypes.CDLL(str(path)), path
    except OSError:
        path.unlink(missing_ok=True)
        path = get_or_make(name, make)
        return ctypes.CDLL(str(path)), path


def prune(directory: Path, limit: int = _LIMIT_BYTES) -> None:
    """Delete the files longest unused until the folder is under `limit` bytes."""
    entries = []
    for entry in os.scandir(directory):
        with contextlib.suppress(OSError):
            status = entry.stat()
            entries.append((status.st_mtime, status.st_size, entry.path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= limit:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
            total -= size
