"""What a contained process may take, set by itself before anything of a learner's runs; it can not be raised again."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Limits of one contained process and its children.

    Attributes
    ----------
    cpu_seconds : int
        Of each process.
    memory_bytes : int
        Writable memory of each process (RLIMIT_DATA: the emulation reserves 512 GiB of addresses, so that a limit
        on addresses would mean nothing), and resident memory of all of them together, which the judge watches.
    processes : int
        With threads.
    file_bytes : int
        Of a file, and of all files together where bubblewrap is.
    reply_bytes : int
        Of one message to the judge.
    patience : float
        Seconds that a reply may take beyond what the exercise allows for its cases.
    nbval_seconds : float
        For a whole notebook.
    """

    cpu_seconds: int = 300
    memory_bytes: int = 3 << 30
    processes: int = 96
    file_bytes: int = 256 << 20
    reply_bytes: int = 64 << 20
    patience: float = 30.0
    nbval_seconds: float = 300.0

    def as_dict(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)


def apply(limits: Limits, uid: int | None) -> None:
    """Set the limits on this process; where `uid` is given, become that user, for good."""
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, 512),
    ):
        _lower(kind, value)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _gain_nothing()
    _lower(resource.RLIMIT_NPROC, limits.processes)


def _gain_nothing() -> None:
    """No program that this process starts makes it another user again, such as one that is setuid root."""
    if sys.platform == "linux":
        number = 38  # PR_SET_NO_NEW_PRIVS, linux/prctl.h
        ctypes.CDLL(None, use_errno=True).prctl(number, 1, 0, 0, 0)


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))
