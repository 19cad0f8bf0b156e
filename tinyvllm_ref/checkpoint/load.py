"""Weights from the files' map to the device: one allocation, copied tensor by tensor."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tinyvllm_ref.bf16 import float_to_bf16
from tinyvllm_ref.checkpoint.safetensors import TensorView
from tinyvllm_ref.checkpoint.weights import CheckpointError, weight_plan
from tinyvllm_ref.config import ModelConfig
from tinyvllm_ref.device import cp

ALIGNMENT = 256  # bytes at which a group starts: what CUDA's own allocations keep, and vector loads need
_TILE = 1 << 20  # elements that are converted at a time


def load_weights(
    views: Mapping[str, TensorView],
    config: ModelConfig,
    to_bf16: Callable[[Any], Any] = float_to_bf16,
) -> dict[str, Any]:
    """Copy a checkpoint's tensors into one arena on the device.

    Parameters
    ----------
    views : mapping of str to TensorView
        All tensors that the config describes, as :func:`~tinyvllm_ref.checkpoint.weights.open_checkpoint`
        gives them: BF16, F16 or F32.
    config : ModelConfig
    to_bf16 : callable
        Rounds a NumPy float32 array to uint16 bits.

    Returns
    -------
    dict of str to (...) bf16, on the device
        The groups of :func:`~tinyvllm_ref.checkpoint.weights.weight_plan`, under their names: views of one
        allocation. Each starts at a multiple of 256 bytes, and its tensors follow each other with no gap, so
        that query, key and value (and gate and up) are one matrix.

    Raises
    ------
    CheckpointError
        A tensor is missing, or of another size or dtype.

    Notes
    -----
    Besides the arena, one tile of 2**20 elements is in memory at a time. Pages of the file that have been
    copied are given back to the operating system.
    """
    weights = allocate_weights(config)
    for group in weight_plan(config):
        flat = weights[group.name].reshape(-1)
        written = 0
        for name in group.sources:
            if name not in views:
                raise CheckpointError(f"tensor {name!r} is missing; {group.name!r} is made of it")
            written += _copy(name, views[name], flat[written:], to_bf16)
        if written != flat.size:
            raise CheckpointError(
                f"{', '.join(group.sources)} have {written:,} elements; {group.name!r} takes {flat.size:,}"
            )
    return weights


def allocate_weights(config: ModelConfig) -> dict[str, Any]:
    """Room for all weights, as :func:`load_weights` lays them out.

    Parameters
    ----------
    config : ModelConfig

    Returns
    -------
    dict of str to (...) bf16, on the device
        Zeros, in the order of :func:`~tinyvllm_ref.checkpoint.weights.weight_plan`.
    """
    plan = weight_plan(config)
    offsets, total = [], 0
    for group in plan:
        offsets.append(total)
        total += -(-int(np.prod(group.shape)) * 2 // ALIGNMENT) * ALIGNMENT
    # Zeros and not just memory: what lies between the groups is defined, and the emulation need not keep a record of
    # which bytes of so large an array were written.
    arena = cp.zeros(total // 2, np.uint16)
    weights = {}
    for group, offset in zip(plan, offsets, strict=True):
        elements = int(np.prod(group.shape))
        weights[group.name] = arena[offset // 2 : offset // 2 + elements].reshape(group.shape)
    return weights


def _copy(name: str, view: TensorView, out: Any, to_bf16: Callable[[Any], Any]) -> int:
    """Write one tensor to the beginning of `out`; returns its elements."""
    if view.dtype not in ("BF16", "F16", "F32"):
        raise CheckpointError(f"tensor {name!r} is {view.dtype}; it must be BF16, F16 or F32")
    source = np.frombuffer(view.data, {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[view.dtype])
    if source.size > out.size:
        raise CheckpointError(f"tensor {name!r} has {source.size:,} elements; there is room for {out.size:,}")
    for start in range(0, source.size, _TILE):
        tile = source[start : start + _TILE]
        bits = tile if view.dtype == "BF16" else to_bf16(tile.astype(np.float32))
        out[start : start + tile.size].set(np.ascontiguousarray(bits, np.uint16))
    _forget_pages(view.data, source)
    return source.size


def _forget_pages(data: memoryview, source: np.ndarray) -> None:
    """Let the system take back the pages of the file that hold these bytes: they will not be read again."""
    mapped = data.obj
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED") or not source.size:
        return
    base = np.frombuffer(mapped, np.uint8).ctypes.data
    begin = source.ctypes.data - base
    first, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, begin + source.nbytes
    if end > first:
        mapped.madvise(mmap.MADV_DONTNEED, first, end - first)
