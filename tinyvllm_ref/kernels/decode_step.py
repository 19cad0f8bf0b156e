"""Launches ``decode_step.cu``: one token of one request through the whole model, by one persistent kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import ModelConfig
from ..device import cp, is_gpu
from . import decode_attention as attention
from .launch import Contract, Float, Int, ceil_div, multiprocessors
from .source import kernel

PIECE = 1024  # columns that a warp takes at a time: of decode_step.cu
_WARPS, _STAGES, _LEAST_STAGES = 8, 6, 2  # of the ring: as many as there is memory for
_MAX_SHARED_PER_BLOCK = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
_MIN_CAPABILITY = 90
# Whether the emulation takes the path of cards, with a copying warp, as some tests do; without is faster there.
_EMULATED_COPIES = False
_MOST_SPLITS = 16  # blocks that share the keys of a head: MANY_SPLITS of decode_step.cu

_contract = Contract(
    "decode_step",
    ids="int32 1",
    block_table="int32 M",
    context_len="int32 1",
    keys="bf16 L NB BS Hk D",
    values="bf16 L NB BS Hk D",
    logits="float32 V",
    chosen="int32 1",
)


def pieces_of(width: int) -> int:
    """Into how many pieces a row of a matrix is cut: a power of two."""
    pieces = 1
    while pieces * PIECE < width:
        pieces *= 2
    return pieces


class DecodeStep:
    """The persistent decode of one model: addresses of its weights, and the memory that a step works in.

    Parameters
    ----------
    config : ModelConfig
    weights : Weights
        Must live as long as this does.
    blocks : int, optional
        Of the launch; by default one a multiprocessor, in the emulation one (its blocks run one after the other
        and so can not wait for each other).

    Raises
    ------
    ValueError
        The model is such as :meth:`unsupported` names.
    """

    def __init__(self, config: ModelConfig, weights: Any, blocks: int | None = None) -> None:
        reason = self.unsupported(config, blocks)
        if reason:
            raise ValueError(f"decode_step: {reason}")
        self.config = config
        self._weights = weights
        layers = range(config.num_hidden_layers)
        matrices = [
            weights[f"layers.{i}.{name}"]
            for i in layers
            for name in ("qkv", "o_proj", "gate_up", "down_proj")
        ]
        norms = [
            weights[f"layers.{i}.{name}"]
            for i in layers
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        for array in (*matrices, weights.lm_head, *norms, weights["norm"]):
            if array.data.ptr % 16:
                raise ValueError(
                    f"decode_step: a weight starts at {array.data.ptr:#x}, no multiple of 16 bytes"
                )
        self._matrices = _addresses([*matrices, weights.lm_head])
        self._norms = _addresses([*norms, weights["norm"]])
        self._blocks = blocks or _default_blocks()
        self._copies = _has_copying_warp()
        self._warps, self._stages, self._shared = _layout(config, self._blocks)
        heads, dim = config.num_attention_heads, config.head_dim
        words = config.q_size + 2 * config.kv_size + config.q_size // 2 + 2 * config.hidden_size
        words += config.intermediate_size // 2
        # Attention over many keys is shared by blocks, which exchange their parts: as decode_step.cu says.
        words += heads * (dim + 2) * _MOST_SPLITS
        self._exchange = cp.zeros(words, np.uint64)
        self._candidates = cp.empty((self._blocks, 2), np.float32)
        self._meeting = cp.asarray(np.array([1, 0], np.uint32))  # exchange 0 is what zeros would belong to

    @staticmethod
    def unsupported(config: ModelConfig, blocks: int | None = None) -> str:
        """Why a model can not be run by this kernel, with so many blocks; "" where it can."""
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if not attention.supports(heads, kv_heads, dim):
            return (
                f"heads are {heads} on {kv_heads} of {dim} columns, which decode_attention does not support"
            )
        for name in ("hidden_size", "intermediate_size", "q_size"):
            width = getattr(config, name)
            if width % 8 or pieces_of(width) > _WARPS:
                return f"{name} is {width}; it must be a multiple of 8 up to {_WARPS * PIECE}"
        if is_gpu and int(cp.cuda.Device().compute_capability) < _MIN_CAPABILITY:
            return f"compute capability is {cp.cuda.Device().compute_capability}; it must be {_MIN_CAPABILITY} or more"
        if blocks is not None and not 1 <= blocks <= _default_blocks():
            return (
                f"blocks is {blocks}; it must be from 1 to {_default_blocks()}, for all run at the same time"
            )
        shared = _layout(config, blocks or _default_blocks())[2]
        if shared > _shared_limit():
            return f"the shared memory of a block is {shared}; it must be at most {_shared_limit()}"
        return ""

    def __call__(
        self,
        ids: Any,
        block_table: Any,
        context_len: Any,
        keys: Any,
        values: Any,
        logits: Any,
        chosen: Any,
    ) -> Any:
        """Compute a token.

        Parameters
        ----------
        ids : (1,) int32
            The token, from 0 to V - 1.
        block_table : (max_blocks,) int32
        context_len : (1,) int32
            Tokens in the cache after this step, this one included.
        keys, values : (layers, NB, BS, Hk, D) bf16
            The whole cache; changed at the token's slot.
        logits : (V,) float32
        chosen : (1,) int32
            The index of the largest logit, as :func:`tinyvllm_ref.kernels.argmax.argmax` gives it.

        Returns
        -------
        chosen
        """
        config = self.config
        sizes = _contract(
            *(ids, block_table, context_len, keys, values, logits, chosen),
            **{"V": config.vocab_size, "L": config.num_hidden_layers},
            **{"Hk": config.num_key_value_heads, "D": config.head_dim},
        )
        _contract.check_aligned(keys=keys, values=values)
        group = config.num_attention_heads // config.num_key_value_heads
        compiled = kernel(
            "decode_step",
            HIDDEN=config.hidden_size,
            FFN=config.intermediate_size,
            KV_HEADS=config.num_key_value_heads,
            GROUP=group,
            HEAD_DIM=config.head_dim,
            BLOCK_SIZE=sizes["BS"],
            WARPS=self._warps,
            STAGES=self._stages,
            EMULATED_BULK_COPY=int(self._copies and not is_gpu),
        )
        shared = self._shared
        if compiled.max_dynamic_shared_size_bytes < shared:
            compiled.max_dynamic_shared_size_bytes = shared
        args = (
            *(ids, block_table, context_len, self._matrices, self._norms, self._weights["embed_tokens"]),
            *(self._weights["inv_freq"], keys, values, self._exchange),
            *(logits, self._candidates, chosen, self._meeting, np.int64(keys[0].size)),
            *(
                Int(config.num_hidden_layers),
                Int(config.vocab_size),
                Int(_sums(config, self._blocks)),
            ),
            *(Float(config.rms_norm_eps), Float(config.head_dim**-0.5)),
        )
        block = 32 * (self._warps + self._copies)
        compiled((self._blocks,), (block,), args, shared_mem=shared)
        return chosen


def _sums(config: ModelConfig, blocks: int) -> int:
    """float32 values that the sums of a block's rows take, of the matrix that has most of them."""
    products = (
        (config.q_size + 2 * config.kv_size, config.hidden_size),
        (config.hidden_size, config.q_size),
        (config.hidden_size, config.intermediate_size),
        (2 * config.intermediate_size, config.hidden_size),
        (config.vocab_size, config.hidden_size),
    )
    most = max((ceil_div(rows, blocks) + 4) * pieces_of(width) for rows, width in products)
    return ceil_div(most, 4) * 4


def _layout(config: ModelConfig, blocks: int) -> tuple[int, int, int]:
    """Warps of a block that compute, stages of its ring, and bytes of shared memory as the kernel lays it out.

    That is the ring, work memory, sums, the block's rows of the stream, reductions; and some statically.
    """
    widths = (config.hidden_size, config.q_size, config.intermediate_size)
    warps = _WARPS if _has_copying_warp() else max(map(pieces_of, widths))
    group = config.num_attention_heads // config.num_key_value_heads
    attention_work = ceil_div(attention.attention_floats(warps, group, config.head_dim), 4) * 4
    work = max(attention_work + (group + 2) * config.head_dim, max(widths) // 2)
    own = (config.hidden_size // blocks + 4) // 4 * 4
    rest = 4 * (work + _sums(config, blocks) + own + 4 * warps)
    if not _has_copying_warp():
        return warps, 1, rest
    stage = max(
        4 * max(warps // pieces_of(width) * width for width in widths),
        attention.chunk_bytes(config.head_dim),
    )
    stages = max(_LEAST_STAGES, min(_STAGES, (_shared_limit() - rest) // stage))
    return warps, stages, stages * stage + rest


def _has_copying_warp() -> bool:
    """Whether one more warp of a block does nothing but copy."""
    return is_gpu or _EMULATED_COPIES


def _addresses(arrays: list[Any]) -> Any:
    return cp.asarray(np.array([array.data.ptr for array in arrays], np.uint64))


def _default_blocks() -> int:
    """One a multiprocessor; in the emulation blocks run one after the other, and can not wait for each other."""
    return multiprocessors(1)


def _shared_limit() -> int:
    """Bytes that a block may lay out: what the card gives (227 KB at 9.0, 99 KB at 12.0), less what is static."""
    most = (
        cp.cuda.runtime.deviceGetAttribute(_MAX_SHARED_PER_BLOCK, cp.cuda.Device().id)
        if is_gpu
        else 227 << 10
    )
    return int(most) - 4096
