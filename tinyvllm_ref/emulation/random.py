"""``cp.random``: seeded generators that fill device arrays. The numbers are NumPy's, not cuRAND's."""

from __future__ import annotations

from typing import Any

import numpy as np

from .array import _assign, _check_dtype, _require_array, _to_device, array, missing, ndarray

__all__ = ["Generator", "RandomState", "default_rng"]

_MODULE_FUNCTIONS = (
    "choice", "normal", "permutation", "rand", "randint", "randn", "random", "random_sample", "seed",
    "shuffle", "standard_normal", "uniform",
)  # fmt: skip


def _floats(values: Any, dtype: Any) -> ndarray:
    """Float64 draws as an array of a float dtype."""
    checked = _check_dtype(dtype)
    if checked not in (np.float32, np.float64):
        raise TypeError(f"dtype must be float32 or float64, not {checked}")
    return _to_device(values, checked)


class RandomState:
    """The older of CuPy's two generators, and what ``cp.random.normal`` and its kind draw from.

    Parameters
    ----------
    seed : int, optional
        The same seed gives the same numbers; by default a fresh one.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed(seed)

    def seed(self, seed: int | None = None) -> None:
        """Begin again from a seed."""
        self._generator = np.random.default_rng(seed)

    def rand(self, *size: int, dtype: Any = float) -> ndarray:
        """Uniform on [0, 1), the shape given as arguments."""
        return self.random_sample(size or None, dtype)

    def randn(self, *size: int, dtype: Any = float) -> ndarray:
        """Standard normal, the shape given as arguments."""
        return self.standard_normal(size or None, dtype)

    def random_sample(self, size: Any = None, dtype: Any = float) -> ndarray:
        """Uniform on [0, 1)."""
        return _floats(_below_one(self._generator.random(size), dtype), dtype)

    random = random_sample

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None, dtype: Any = float) -> ndarray:
        """Uniform on [low, high)."""
        return _floats(self._generator.uniform(low, high, size), dtype)

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None, dtype: Any = float) -> ndarray:
        """Normal with mean `loc` and standard deviation `scale`."""
        return _floats(self._generator.normal(loc, scale, size), dtype)

    def standard_normal(self, size: Any = None, dtype: Any = float) -> ndarray:
        """Normal with mean 0 and standard deviation 1."""
        return _floats(self._generator.standard_normal(size), dtype)

    def randint(self, low: int, high: int | None = None, size: Any = None, dtype: Any = int) -> ndarray:
        """Integers from `low` to `high`, without `high`; from 0 to `low` where `high` is not given."""
        return _to_device(self._generator.integers(low, high, size), dtype)

    def permutation(self, a: Any) -> ndarray:
        """``arange(a)``, or a copy of the array `a`, in random order along the first axis."""
        if isinstance(a, ndarray):
            return a[array(self._generator.permutation(len(a)))]
        return array(self._generator.permutation(int(a)))

    def shuffle(self, a: ndarray) -> None:
        """Put an array into random order along its first axis, in place."""
        _require_array(a)
        _assign(a._host, a._host[self._generator.permutation(len(a))])

    def choice(self, a: Any, size: Any = None, replace: bool = True, p: Any = None) -> ndarray:
        """Elements of `a`, or of ``arange(a)``, with or without replacement, with probabilities `p`."""
        weights = p._host if isinstance(p, ndarray) else p
        if isinstance(a, ndarray):
            return a[array(self._generator.choice(len(a), size, replace, weights))]
        return array(self._generator.choice(int(a), size, replace, weights))


class Generator:
    """The newer of CuPy's two generators: ``cp.random.default_rng(seed)``.

    Parameters
    ----------
    bit_generator : numpy.random.Generator
        Where the numbers come from.
    """

    def __init__(self, bit_generator: np.random.Generator) -> None:
        self._generator = bit_generator

    def random(self, size: Any = None, dtype: Any = np.float64, out: ndarray | None = None) -> ndarray:
        """Uniform on [0, 1)."""
        return self._into(out, _below_one(self._generator.random(self._size(size, out)), dtype), dtype)

    def standard_normal(
        self, size: Any = None, dtype: Any = np.float64, out: ndarray | None = None
    ) -> ndarray:
        """Normal with mean 0 and standard deviation 1."""
        return self._into(out, self._generator.standard_normal(self._size(size, out)), dtype)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None, dtype: Any = np.float64) -> ndarray:
        """Uniform on [low, high)."""
        return _floats(self._generator.uniform(low, high, size), dtype)

    def integers(
        self,
        low: int,
        high: int | None = None,
        size: Any = None,
        dtype: Any = np.int64,
        endpoint: bool = False,
    ) -> ndarray:
        """Integers from `low` up to and without `high`, or with it where `endpoint` is true."""
        return _to_device(self._generator.integers(low, high, size, endpoint=endpoint), dtype)

    @staticmethod
    def _size(size: Any, out: ndarray | None) -> Any:
        return out.shape if size is None and out is not None else size

    @staticmethod
    def _into(out: ndarray | None, values: Any, dtype: Any) -> ndarray:
        if out is None:
            return _floats(values, dtype)
        _require_array(out)
        if out.dtype != np.dtype(dtype) or out.shape != np.shape(values):
            raise ValueError(
                f"out is {out.dtype} {out.shape}; it must be {np.dtype(dtype)} {np.shape(values)}"
            )
        _assign(out._host, values)
        return out


def _below_one(values: Any, dtype: Any) -> Any:
    """Draws on [0, 1) that stay below 1 when they are rounded to float32."""
    if np.dtype(dtype) != np.float32:
        return values
    return np.minimum(values, np.nextafter(np.float32(1), np.float32(0)))


def default_rng(seed: Any = None) -> Generator:
    """A :class:`Generator` from a seed; a Generator comes back as it is."""
    return seed if isinstance(seed, Generator) else Generator(np.random.default_rng(seed))


_global_state = RandomState()


def __getattr__(name: str) -> Any:
    """``cp.random.normal`` and its kind draw from one RandomState of the process."""
    if name in _MODULE_FUNCTIONS:
        return getattr(_global_state, name)
    if name.startswith("__"):
        raise AttributeError(name)
    missing(name, "cupy.random")
