"""The three things that can be set: how much is checked, how long a kernel may run, and on how many cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from . import native

MODES = ("full", "fast")


def _initial_mode() -> str:
    return _checked_mode(os.environ.get("TINYVLLM_CHECKS", "full"), "TINYVLLM_CHECKS")


def _checked_mode(mode: str, where: str) -> str:
    if mode not in MODES:
        raise ValueError(f"{where} is {mode!r}; it must be 'full' (every access checked) or 'fast'")
    return mode


_mode: ContextVar[str | None] = ContextVar("tinyvllm_checks", default=None)
_timeout: ContextVar[float | None] = ContextVar("tinyvllm_timeout", default=None)
_DEFAULT_TIMEOUT = {"full": 20.0, "fast": 120.0}


def current_mode() -> str:
    """The mode in which kernels are launched now: ``"full"`` or ``"fast"``."""
    return _mode.get() or _initial_mode()


def set_checks(mode: str) -> None:
    """Launch kernels in this mode from now on.

    Parameters
    ----------
    mode : {"full", "fast"}
        ``"full"`` checks every access for bounds, uninitialised reads and races, counts bytes, sectors and
        bank conflicts, and takes one core. ``"fast"`` runs on all cores and checks what costs nothing.
    """
    _mode.set(_checked_mode(mode, "mode"))


@contextmanager
def checks(mode: str) -> Iterator[None]:
    """Launch kernels in this mode inside of a ``with`` block; see :func:`set_checks`."""
    token = _mode.set(_checked_mode(mode, "mode"))
    try:
        yield
    finally:
        _mode.reset(token)


def current_timeout() -> float:
    """Seconds after which a kernel is stopped."""
    return _timeout.get() or _DEFAULT_TIMEOUT[current_mode()]


@contextmanager
def timeout(seconds: float) -> Iterator[None]:
    """Stop kernels that run longer than `seconds` inside of a ``with`` block, with KernelTimeout."""
    if not seconds > 0:
        raise ValueError(f"timeout({seconds!r}): the number of seconds must be greater than 0")
    token = _timeout.set(float(seconds))
    try:
        yield
    finally:
        _timeout.reset(token)


def set_workers(count: int) -> None:
    """Run the blocks of a launch on `count` cores in fast mode; 0 means all of them."""
    if count < 0:
        raise ValueError(f"set_workers({count}): the count must be 0 (every core) or more")
    native.runtime().emu_set_workers(count)
