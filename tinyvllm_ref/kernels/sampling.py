"""Draws tokens (``sampling.cu``), and says in NumPy what drawing means.

The randomness of a token is a function of its request's seed and its number in the completion. So a request
gets the same tokens alone, in a batch, and after it was preempted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dependent_launch import launch
from ..device import is_gpu
from .launch import Contract, Int, ceil_div
from .source import kernel

_penalties = Contract(
    "apply_penalties",
    logits="float32 R V",
    rows="int32 P",
    tokens="int32 P",
    counts="int32 P",
    repetition="float32 R",
    presence="float32 R",
    frequency="float32 R",
)
_sampling = Contract(
    "sample_rows",
    logits="float32 R V",
    temperature="float32 R",
    top_k="int32 R",
    top_p="float32 R",
    min_p="float32 R",
    seeds="uint64 R",
    steps="int32 R",
    out="int32 R",
)
_THREADS = 128  # of apply_penalties
_FEW_ROWS, _FEW_ROWS_THREADS, _MANY_ROWS_THREADS = 128, 1024, 512
_MOST_TOKENS = 1 << 20  # so many weights of 2^44 fit into 64 bits
_WIDTHS = f"at least 1 and at most {_MOST_TOKENS - 1}"
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def apply_penalties(
    logits: Any,
    rows: Any,
    tokens: Any,
    counts: Any,
    repetition: Any,
    presence: Any,
    frequency: Any,
) -> Any:
    """Make tokens that a request has seen less probable, in place.

    Parameters
    ----------
    logits : (R, V) float32
    rows, tokens : (P,) int32
        Which logit; each pair once. A token of the prompt or the completion of row's request.
    counts : (P,) int32
        How often the completion has it: 0 for one that only the prompt has.
    repetition, presence, frequency : (R,) float32
        Positive logits are divided by `repetition` and others multiplied; then, for tokens of the completion,
        presence + frequency * count is subtracted.

    Returns
    -------
    logits

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong.
    """
    sizes = _penalties(logits, rows, tokens, counts, repetition, presence, frequency)
    entries = sizes["P"]
    if entries:
        args = (logits, rows, tokens, counts, repetition, presence, frequency, Int(entries), Int(sizes["V"]))
        kernel("sampling", "apply_penalties")((ceil_div(entries, _THREADS),), (_THREADS,), args)
    return logits


def sample_rows(
    logits: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seeds: Any,
    steps: Any,
    out: Any,
    *,
    dependent: bool = False,
) -> Any:
    """Draw one token of each row, by one launch, which allocates nothing.

    Parameters
    ----------
    logits : (R, V) float32
    temperature : (R,) float32
        Divides the logits; 0 takes the most probable token, the lowest id on ties.
    top_k : (R,) int32
        Keep so many of the most probable; 0 or less keeps all.
    top_p : (R,) float32
        Of these, keep the smallest set of the most probable whose probabilities sum to at least this.
    min_p : (R,) float32
        Drop those less probable than this times the most probable.
    seeds : (R,) uint64
    steps : (R,) int32
        Number of the token in its completion.
    out : (R,) int32
    dependent : bool
        Let the kernel start before the one before it is done.

    Returns
    -------
    out
        A row whose largest logit is infinite gives the first such token. A NaN is drawn only from a row of
        nothing else.

    Raises
    ------
    ValueError
        A shape, dtype or layout is wrong, or V is 0 or above 1,048,575.
    """
    sizes = _sampling(logits, temperature, top_k, top_p, min_p, seeds, steps, out)
    rows, vocab = sizes["R"], sizes["V"]
    _sampling.check("the width of logits", vocab, 0 < vocab < _MOST_TOKENS, _WIDTHS)
    if rows:
        threads = _threads(rows)
        args = (logits, temperature, top_k, top_p, min_p, seeds, steps, out, Int(vocab))
        made = kernel("sampling", "sample_rows", THREADS=threads)
        launch(made, (rows,), (threads,), args, dependent=dependent)
    return out


def _threads(rows: int) -> int:
    """Threads of a row's block; they have no part in what is drawn.

    Beyond a row for each multiprocessor, two blocks share one. In the emulation threads run one after another.
    """
    return (_FEW_ROWS_THREADS if rows <= _FEW_ROWS else _MANY_ROWS_THREADS) if is_gpu else 1


# ---------------- the specification


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def uniform(seed: int, step: int) -> float:
    """The number from 0 to 1 (1 excluded) that a request with this seed has for its token `step`.

    >>> uniform(0, 0) == uniform(0, 0) != uniform(0, 1)
    True
    """
    stream = _mix(seed + _GOLDEN & _MASK)
    return (_mix(stream + (step + 1) * _GOLDEN & _MASK) >> 40) / 2**24


def kept_probabilities(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """What may be drawn, in NumPy and float64: the specification of :func:`sample_rows`.

    Parameters
    ----------
    logits : (V,) float
    temperature : float
        Above 0.
    top_k, top_p, min_p
        As in :func:`sample_rows`.

    Returns
    -------
    ids : (n,) int64
        From the most probable to the least; on ties the lower id first.
    probabilities : (n,) float64
        Of these tokens; they sum to 1.
    """
    ids = np.argsort(-logits, kind="stable")
    values = logits[ids].astype(np.float64)
    if top_k > 0:
        ids, values = ids[:top_k], values[:top_k]
    weights = np.exp((values - values[0]) / temperature)
    sums = np.cumsum(weights)
    kept = len(ids)
    if top_p < 1:
        kept = min(kept, int(np.searchsorted(sums, top_p * sums[-1])) + 1)
    kept = min(kept, int(np.sum((weights >= min_p) & (weights > 0))))
    return ids[:kept], weights[:kept] / weights[:kept].sum()


def sample_specification(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, step: int
) -> int:
    """One row of :func:`sample_rows`, in NumPy and float64."""
    if temperature == 0:
        return int(np.argmax(logits))
    ids, probabilities = kept_probabilities(logits, temperature, top_k, top_p, min_p)
    position = np.searchsorted(np.cumsum(probabilities), uniform(seed, step), side="right")
    return int(ids[min(int(position), len(ids) - 1)])
