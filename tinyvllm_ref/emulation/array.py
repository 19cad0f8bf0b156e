"""``ndarray`` and the array functions: the part of CuPy that works on whole arrays.

An array's bytes lie in device memory (memory.py), and NumPy does the arithmetic on them in place. What is
CuPy's is the rule book: no implicit conversion to or from NumPy, reductions that give 0-d arrays, a view from
every integer index, CuPy's parameters and nothing that only NumPy has. So what runs here runs on a card.

The functions are a written list: the tables from ``ELEMENTWISE`` to ``WRITING`` and the functions that are
written out below them. ``cp.anything_else`` raises AttributeError and says so (:func:`missing`).
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from . import memory, native
from .memory import MemoryPointer

if TYPE_CHECKING:
    from .cuda import Device

# ---------------- the written list
#
# In a table: the function's name (NumPy's, which does the work) and the names of its parameters, in CuPy's
# order; after "*" by keyword only. What CuPy has not got is not listed, even where NumPy has it.


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Element by element, with broadcasting, on arrays or scalars. They also take out=, dtype=, casting=.
ELEMENTWISE = _words("""
    abs absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_and bitwise_count
    bitwise_invert bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor cbrt
    ceil conj conjugate copysign cos cosh deg2rad degrees divide divmod equal exp exp2 expm1 fabs
    float_power floor floor_divide fmax fmin fmod frexp gcd greater greater_equal heaviside hypot
    invert isfinite isinf isnan lcm ldexp left_shift less less_equal log log10 log1p log2 logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor maximum minimum mod modf multiply
    negative nextafter not_equal positive pow power rad2deg radians reciprocal remainder right_shift
    rint sign signbit sin sinh sqrt square subtract tan tanh true_divide trunc
""")

# The first argument must be an array.
ARRAY = {
    # reductions
    "all": "a axis out keepdims",
    "any": "a axis out keepdims",
    "amax": "a axis out keepdims",
    "amin": "a axis out keepdims",
    "argmax": "a axis * out keepdims",
    "argmin": "a axis * out keepdims",
    "average": "a axis weights returned * keepdims",
    "count_nonzero": "a axis",
    "max": "a axis out keepdims",
    "mean": "a axis dtype out keepdims",
    "median": "a axis out overwrite_input keepdims",
    "min": "a axis out keepdims",
    "nanargmax": "a axis * out keepdims",
    "nanargmin": "a axis * out keepdims",
    "nanmax": "a axis out keepdims",
    "nanmean": "a axis dtype out keepdims",
    "nanmin": "a axis out keepdims",
    "nansum": "a axis dtype out keepdims",
    "percentile": "a q axis out overwrite_input method keepdims",
    "prod": "a axis dtype out keepdims",
    "ptp": "a axis out keepdims",
    "quantile": "a q axis out overwrite_input method keepdims",
    "std": "a axis dtype out ddof keepdims",
    "sum": "a axis dtype out keepdims",
    "trace": "a offset axis1 axis2 dtype out",
    "var": "a axis dtype out ddof keepdims",
    # scans and differences
    "cumprod": "a axis dtype out",
    "cumsum": "a axis dtype out",
    "cumulative_sum": "x * axis dtype out include_initial",
    "diff": "a n axis prepend append",
    # sorting, searching, counting
    "argpartition": "a kth axis",
    "argsort": "a axis kind",
    "argwhere": "a",
    "bincount": "x weights minlength",
    "digitize": "x bins right",
    "flatnonzero": "a",
    "histogram": "x bins range density weights",
    "isin": "element test_elements assume_unique invert",
    "nonzero": "a",
    "partition": "a kth axis",
    "searchsorted": "a v side sorter",
    "sort": "a axis kind",
    "unique": "ar return_index return_inverse return_counts axis * equal_nan",
    # shapes
    "append": "arr values axis",
    "array_split": "ary indices_or_sections axis",
    "broadcast_to": "array shape",
    "delete": "arr indices axis",
    "diag": "v k",
    "diagonal": "a offset axis1 axis2",
    "expand_dims": "a axis",
    "flip": "a axis",
    "fliplr": "a",
    "flipud": "a",
    "hsplit": "ary indices_or_sections",
    "moveaxis": "a source destination",
    "pad": "array pad_width mode * constant_values",
    "permute_dims": "a axes",
    "ravel": "a order",
    "repeat": "a repeats axis",
    "reshape": "a newshape order * copy",
    "roll": "a shift axis",
    "rollaxis": "a axis start",
    "rot90": "a k axes",
    "split": "ary indices_or_sections axis",
    "squeeze": "a axis",
    "swapaxes": "a axis1 axis2",
    "tile": "A reps",
    "transpose": "a axes",
    "tril": "m k",
    "triu": "m k",
    "vsplit": "ary indices_or_sections",
    # gathering
    "compress": "condition a axis out",
    "extract": "condition a",
    "take": "a indices axis out",
    "take_along_axis": "a indices axis",
    "where": "condition x y",
    # rounding and comparing
    "allclose": "a b rtol atol equal_nan",
    "around": "a decimals out",
    "array_equal": "a1 a2 equal_nan",
    "clip": "a a_min a_max out",
    "fix": "x out",
    "isclose": "a b rtol atol equal_nan",
    "nan_to_num": "x copy nan posinf neginf",
    "round": "a decimals out",
    # products
    "dot": "a b out",
    "inner": "a b",
    "kron": "a b",
    "matmul": "a b out * dtype casting",
    "outer": "a b out",
    "tensordot": "a b axes",
    "vdot": "a b",
    # parts, bits, interpolation
    "angle": "z deg",
    "imag": "val",
    "interp": "x xp fp left right",
    "packbits": "a axis bitorder",
    "real": "val",
    "unpackbits": "a axis bitorder",
}

# The first argument is a sequence of arrays.
SEQUENCE = {
    "column_stack": "tup",
    "concat": "tup axis out * dtype casting",
    "concatenate": "tup axis out * dtype casting",
    "dstack": "tup",
    "hstack": "tup * dtype casting",
    "lexsort": "keys",
    "stack": "tup axis out * dtype casting",
    "vstack": "tup * dtype casting",
}

# Any number of arrays, and keywords.
VARIADIC = {
    "atleast_1d": "",
    "atleast_2d": "",
    "atleast_3d": "",
    "broadcast_arrays": "",
    "einsum": "dtype optimize",
    "ix_": "",
    "meshgrid": "copy sparse indexing",
}

# Numbers in, a new array out.
CREATION = {
    "arange": "start stop step dtype",
    "eye": "N M k dtype order",
    "frombuffer": "buffer dtype count offset",
    "identity": "n dtype",
    "indices": "dimensions dtype",
    "linspace": "start stop num endpoint retstep dtype axis",
    "logspace": "start stop num endpoint base dtype axis",
    "tri": "N M k dtype",
    "tril_indices": "n k m",
    "triu_indices": "n k m",
}

# Write into the first argument and return nothing.
WRITING = {
    "copyto": "dst src casting where",
    "fill_diagonal": "a val wrap",
    "place": "arr mask vals",
    "put": "a ind v mode",
    "put_along_axis": "arr indices values axis",
    "putmask": "a mask values",
}

# Answers that are Python objects.
PLAIN = _words("""
    broadcast_shapes can_cast finfo format_float_positional iinfo iscomplexobj isrealobj isscalar
    issubdtype may_share_memory ndim promote_types result_type set_printoptions shape shares_memory
""")

# Of cp.linalg.
LINALG = {
    "cholesky": "a",
    "det": "a",
    "eigh": "a UPLO",
    "inv": "a",
    "norm": "x ord axis keepdims",
    "qr": "a mode",
    "solve": "a b",
    "svd": "a full_matrices compute_uv",
}

# NumPy's own objects under the same name.
CONSTANTS = _words("""
    bool_ complex128 complex64 complexfloating dtype e euler_gamma float16 float32 float64 floating
    generic index_exp inexact inf int16 int32 int64 int8 int_ integer intc intp nan newaxis number
    pi printoptions s_ signedinteger uint16 uint32 uint64 uint8 unsignedinteger
""")

_IMPLICIT = (
    "Implicit conversion to a NumPy array is not allowed. "
    "Please use `.get()` to construct a NumPy array explicitly."
)
_SCALARS = (bool, int, float, complex, np.generic)
_COMPARISONS = {"equal", "greater", "greater_equal", "less", "less_equal", "not_equal"}
_MOST_RUNS = 1024  # pieces of a view that are marked as written one by one

# ---------------- between NumPy and the device


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """A GPU does not warn of overflow or a division by zero."""
    return np.errstate(all="ignore")


def _address(host: np.ndarray) -> int:
    return int(host.__array_interface__["data"][0])


def _check_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype in this machine's byte order, if CuPy has it."""
    checked: np.dtype[Any] = np.dtype(dtype)
    if checked.kind not in "biufc" or checked.char in "gG" or checked.num >= 256:
        raise ValueError(
            f"Unsupported dtype {checked}: an array holds bool, integer, float or complex numbers"
        )
    return checked.newbyteorder("=")


def _mark(host: np.ndarray) -> None:
    """Tell the checks that host code wrote the elements of this view."""
    if host.size == 0:
        return
    library = native.runtime()
    start = _address(host)
    if host.flags.c_contiguous or host.flags.f_contiguous:
        library.emu_mark_initialized(start, host.nbytes)
        return
    # Axes from the widest stride to the narrowest; the inner ones that lie gapless are one run.
    axes = sorted((abs(s), s, n) for s, n in zip(host.strides, host.shape, strict=True) if n > 1)
    run = host.itemsize
    while axes and axes[0][0] == run:
        width, stride, length = axes.pop(0)
        start += min(stride, 0) * (length - 1)
        run = width * length
    if math.prod(length for _, _, length in axes) > _MOST_RUNS:
        low = start + sum(min(s, 0) * (n - 1) for _, s, n in axes)
        high = start + sum(max(s, 0) * (n - 1) for _, s, n in axes) + run
        library.emu_mark_initialized(low, high - low)
        return
    for offsets in itertools.product(*(range(0, s * n, s) if s else (0,) for _, s, n in axes)):
        library.emu_mark_initialized(start + sum(offsets), run)


def _mark_selected(host: np.ndarray, key: Any) -> None:
    """:func:`_mark` for an assignment through index arrays."""
    if host.size <= 1 << 20:
        positions = np.arange(host.size).reshape(host.shape)[key].reshape(-1)
        if positions.size <= _MOST_RUNS:
            for where in zip(*np.unravel_index(positions, host.shape), strict=True):
                _mark(host[(*where, ...)])
            return
    _mark(host)


def _new(shape: Any, dtype: Any, order: str = "C", like: np.ndarray | None = None) -> ndarray:
    """An array of memory that nothing has written; with `like`, in that array's order of axes."""
    if like is not None and not like.flags.c_contiguous:
        strides = np.empty_like(like, dtype=dtype).strides
        return ndarray(like.shape, dtype, strides=strides)
    return ndarray(shape, dtype, order=order)


def _to_device(host: Any, dtype: Any = None, *, keep_layout: bool = False) -> ndarray:
    """A new array with the values of a NumPy array or scalar."""
    host = np.asarray(host)
    made = _new(
        host.shape, _check_dtype(host.dtype if dtype is None else dtype), like=host if keep_layout else None
    )
    with _quiet():
        np.copyto(made._host, host, casting="unsafe")
    _mark(made._host)
    return made


def _view(source: ndarray, host: np.ndarray) -> ndarray:
    """An array over `host`, a NumPy view into the memory of `source`."""
    made = object.__new__(ndarray)
    made._host = host
    made.data = MemoryPointer(source.data.mem, _address(host) - source.data.mem.ptr)
    made.base = source if source.base is None else source.base
    return made


def _lies_in(host: np.ndarray, source: ndarray) -> bool:
    mem = source.data.mem
    return host.size > 0 and mem.ptr <= _address(host) < mem.ptr + mem.size


def _wrap(result: Any, sources: Sequence[ndarray], *, keep_layout: bool = False) -> Any:
    """What NumPy answered, as CuPy would: views stay views, scalars become 0-d arrays."""
    if isinstance(result, np.ndarray):
        for source in sources:
            if _lies_in(result, source):
                return _view(source, result)
        return _to_device(result, keep_layout=keep_layout)
    if isinstance(result, (list, tuple)):
        wrapped = [_wrap(item, sources, keep_layout=keep_layout) for item in result]
        return tuple(wrapped) if isinstance(result, tuple) else wrapped
    if isinstance(result, (bool, int, float, complex, np.generic)):
        return _to_device(result)
    return result


def _unwrap(value: Any, sources: list[ndarray]) -> Any:
    """The NumPy view of an array, the arrays of a list; NumPy's own arrays are refused, as CuPy does."""
    if isinstance(value, ndarray):
        sources.append(value)
        return value._host
    if isinstance(value, np.ndarray):
        raise TypeError(
            f"Unsupported type {type(value)}: use cp.asarray(...) to copy a NumPy array to the device"
        )
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrap(item, sources) for item in value)
    return value


def _require_array(value: Any) -> None:
    if not isinstance(value, ndarray):
        hint = (
            ": use cp.asarray(...) to copy it to the device" if isinstance(value, (np.ndarray, list)) else ""
        )
        raise TypeError(f"Unsupported type {type(value)}{hint}")


def _require_operand(value: Any) -> None:
    if not isinstance(value, (ndarray, *_SCALARS)):
        _require_array(value)


# ---------------- functions from the tables


def _bind(
    name: str, parameters: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Check arguments against CuPy's parameters; leading keywords become positional: NumPy's names differ."""
    positional, _, keyword_only = parameters.partition("*")
    names, more = positional.split(), keyword_only.split()
    if len(args) > len(names):
        raise TypeError(
            f"cupy.{name}() takes at most {len(names)} positional arguments, {len(args)} were given"
        )
    for key in kwargs:
        if key not in names and key not in more:
            raise TypeError(
                f"cupy.{name}() got an unexpected keyword argument {key!r}; "
                f"it takes {', '.join(names + more)}"
            )
        if key in names[: len(args)]:
            raise TypeError(f"cupy.{name}() got multiple values for argument {key!r}")
    args_out, rest = list(args), dict(kwargs)
    for key in names[len(args) :]:
        if key not in rest:
            break
        args_out.append(rest.pop(key))
    return args_out, rest


def _call(
    name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], keep_layout: bool = False
) -> Any:
    """Call a NumPy function on the arguments' memory and give its answer back as arrays."""
    sources: list[ndarray] = []
    host_args = [_unwrap(value, sources) for value in args]
    host_kwargs = {key: _unwrap(value, sources) for key, value in kwargs.items()}
    with _quiet():
        result = function(*host_args, **host_kwargs)
    out = kwargs.get("out")
    if out is not None:
        for array in out if isinstance(out, tuple) else (out,):
            _mark(array._host)
        return out
    return _wrap(result, sources, keep_layout=keep_layout)


def _out_by_name(parameters: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Move an `out` that came by position to the keywords, and check that it is an array."""
    names = parameters.partition("*")[0].split()
    if "out" in names and len(args) > names.index("out"):
        at = names.index("out")
        for key, value in list(zip(names, args, strict=False))[at:]:
            kwargs[key] = value
        del args[at:]
    if kwargs.get("out", "absent") is None:
        del kwargs["out"]
    if "out" in kwargs and not isinstance(kwargs["out"], ndarray):
        raise TypeError(f"Output arguments type must be cupy.ndarray, not {type(kwargs['out'])}")


def _named(function: Callable[..., Any], name: str, text: str) -> Callable[..., Any]:
    function.__name__ = name
    function.__qualname__ = name
    function.__doc__ = text
    return function


def _elementwise(name: str) -> Callable[..., Any]:
    ufunc = getattr(np, name)

    def call(*args: Any, out: Any = None, dtype: Any = None, casting: str = "same_kind") -> Any:
        if len(args) > ufunc.nin + ufunc.nout or len(args) < ufunc.nin:
            raise TypeError(
                f"cupy.{name}() takes {ufunc.nin} arrays and out, {len(args)} arguments were given"
            )
        inputs = args[: ufunc.nin]
        if len(args) > ufunc.nin:
            if out is not None:
                raise ValueError("Cannot specify 'out' as both a positional and keyword argument")
            out = args[ufunc.nin :] if ufunc.nout > 1 else args[ufunc.nin]
        for value in inputs:
            _require_operand(value)
        for value in out if isinstance(out, tuple) else (out,):
            if value is not None and not isinstance(value, ndarray):
                raise TypeError(f"Output arguments type must be cupy.ndarray, not {type(value)}")
        kwargs = {"casting": casting} | ({} if dtype is None else {"dtype": dtype})
        if out is not None:
            kwargs["out"] = out
        return _call(name, ufunc, inputs, kwargs, keep_layout=True)

    return _named(call, name, f"numpy.{name} on arrays of the device, element by element.")


def _array_function(
    name: str, parameters: str, function: Callable[..., Any], title: str
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        args_out, kwargs = _bind(title, parameters, args, kwargs)
        if args_out:
            _require_array(args_out[0])
        _out_by_name(parameters, args_out, kwargs)
        return _call(title, function, args_out, kwargs)

    return _named(
        call, name, f"numpy.{title} on arrays of the device. Parameters: {parameters.replace(' ', ', ')}."
    )


def _stable(name: str) -> Callable[..., Any]:
    """`sort` or `argsort`: CuPy's keep the order of equal elements, and know no other kind."""
    function = getattr(np, name)

    def call(a: Any, axis: Any = -1, kind: str | None = None) -> Any:
        if kind not in (None, "stable"):
            raise ValueError(f"kind can only be None or 'stable'; {name} got {kind!r}")
        return function(a, axis=axis, kind="stable")

    return call


def _sequence_function(name: str, parameters: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        args_out, kwargs = _bind(name, parameters, args, kwargs)
        if args_out and not isinstance(args_out[0], ndarray):
            for value in args_out[0]:
                _require_array(value)
            args_out[0] = list(args_out[0])
        _out_by_name(parameters, args_out, kwargs)
        return _call(name, function, args_out, kwargs)

    return _named(call, name, f"numpy.{name} on a sequence of arrays of the device.")


def _variadic_function(name: str, parameters: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        for key in kwargs:
            if key not in parameters.split():
                raise TypeError(f"cupy.{name}() got an unexpected keyword argument {key!r}")
        for value in args:
            if not isinstance(value, (str, list, tuple)):
                _require_operand(value)
        return _call(name, function, args, kwargs)

    return _named(call, name, f"numpy.{name} on any number of arrays of the device.")


def _creation_function(name: str, parameters: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        args_out, kwargs = _bind(name, parameters, args, kwargs)
        return _wrap(function(*args_out, **kwargs), (), keep_layout=True)

    return _named(call, name, f"numpy.{name}, made on the device.")


def _writing_function(name: str, parameters: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def call(*args: Any, **kwargs: Any) -> None:
        args_out, kwargs = _bind(name, parameters, args, kwargs)
        if args_out:
            _require_array(args_out[0])
        sources: list[ndarray] = []
        host_args = [_unwrap(value, sources) for value in args_out]
        with _quiet():
            function(*host_args, **{key: _unwrap(value, sources) for key, value in kwargs.items()})
        _mark(host_args[0])

    return _named(call, name, f"numpy.{name}: writes into its first argument.")


def _plain_function(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*(a._host if isinstance(a, ndarray) else a for a in args), **kwargs)

    return _named(call, name, f"numpy.{name}.")


def _wide_product(function: Callable[..., Any]) -> Callable[..., Any]:
    """A product that adds float16 up in float32, as cuBLAS does."""

    def product(a: Any, b: Any, out: Any = None, **kwargs: Any) -> Any:
        kwargs |= {} if out is None else {"out": out}
        if out is None and np.result_type(a, b) == np.float16:
            wide = function(np.asarray(a, np.float32), np.asarray(b, np.float32), **kwargs)
            return np.asarray(wide).astype(np.float16)
        return function(a, b, **kwargs)

    return product


# ---------------- the array

FUNCTIONS: dict[str, Any] = {}  # every function of the list, by its name under `cp.`; filled at the end


class Flags:
    """How an array lies in memory: ``c_contiguous``, ``f_contiguous``, ``owndata``; or ``flags["..."]``."""

    def __init__(self, c_contiguous: bool, f_contiguous: bool, owndata: bool) -> None:
        self.c_contiguous = c_contiguous
        self.f_contiguous = f_contiguous
        self.owndata = owndata

    @property
    def fnc(self) -> bool:
        return self.f_contiguous and not self.c_contiguous

    @property
    def forc(self) -> bool:
        return self.f_contiguous or self.c_contiguous

    def __getitem__(self, name: str) -> bool:
        if name not in ("C_CONTIGUOUS", "F_CONTIGUOUS", "OWNDATA"):
            raise KeyError(f"{name} is not defined for cupy.ndarray.flags")
        return bool(getattr(self, name.lower()))

    def __repr__(self) -> str:
        lines = (f"  {n} : {self[n]}" for n in ("C_CONTIGUOUS", "F_CONTIGUOUS", "OWNDATA"))
        return "\n".join(lines)


def _operator(name: str) -> Any:
    def call(self: ndarray, other: Any) -> Any:
        if getattr(other, "__array_ufunc__", 0) is None:
            return NotImplemented
        return FUNCTIONS[name](self, other)

    return call


def _reflected(name: str) -> Any:
    def call(self: ndarray, other: Any) -> Any:
        return FUNCTIONS[name](other, self)

    return call


def _in_place(name: str) -> Any:
    def call(self: ndarray, other: Any) -> ndarray:
        made: ndarray = FUNCTIONS[name](self, other, out=self)
        return made

    return call


def _unary(name: str) -> Any:
    def call(self: ndarray) -> Any:
        return FUNCTIONS[name](self)

    return call


def _method(name: str) -> Any:
    """A method that is the function of the same name."""

    def call(self: ndarray, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[name](self, *args, **kwargs)

    return _named(call, name, f"cupy.{name} of this array.")


class ndarray:
    """An array in device memory.

    Parameters
    ----------
    shape : int or tuple of int
        Its shape.
    dtype : dtype
        Type of its elements: bool, integer, float or complex.
    memptr : MemoryPointer, optional
        Where its first element lies; by default in new memory, which is not initialised.
    strides : tuple of int, optional
        Bytes from one element to the next along each axis.
    order : {"C", "F"}
        Layout where no strides are given.

    Attributes
    ----------
    data : MemoryPointer
        Where the first element lies; ``a.data.ptr`` is its address.
    base : ndarray or None
        The array whose memory this one shares.
    """

    __slots__ = ("__weakref__", "_host", "base", "data")
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]
    __class_getitem__: Any = classmethod(types.GenericAlias)

    _host: np.ndarray
    base: ndarray | None
    data: MemoryPointer

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
        order: str = "C",
    ) -> None:
        shape = _shape_tuple(shape)
        if order not in ("C", "F"):
            raise ValueError(f"order not understood. order={order}; it must be 'C' or 'F'")
        if strides is not None and len(strides) != len(shape):
            raise ValueError(f"len(shape) != len(strides): {len(shape)} and {len(strides)}")
        dtype = _check_dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        self.data = memory.alloc(nbytes) if memptr is None else memptr
        self.base = None
        if nbytes == 0:
            self._host = np.empty(shape, dtype, order="F" if order == "F" else "C")
            return
        mem = self.data.mem
        layout: dict[str, Any] = {"order": order} if strides is None else {"strides": strides}
        try:
            self._host = np.ndarray(shape, dtype, mem.buffer(), self.data.ptr - mem.ptr, **layout)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"an array of shape {shape} and dtype {dtype} does not fit: {mem.size:,} bytes of memory, "
                f"from byte {self.data.ptr - mem.ptr:,} ({error})"
            ) from None

    # ---- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        return self._host.shape

    @shape.setter
    def shape(self, value: Any) -> None:
        reshaped = self._host.reshape(value)
        if self.size and _address(reshaped) != self.data.ptr:
            raise AttributeError("incompatible shape: this array can not be reshaped without a copy")
        self._host = reshaped

    @property
    def strides(self) -> tuple[int, ...]:
        return self._host.strides

    @property
    def dtype(self) -> np.dtype:
        return self._host.dtype

    @property
    def size(self) -> int:
        return self._host.size

    @property
    def ndim(self) -> int:
        return self._host.ndim

    @property
    def itemsize(self) -> int:
        return self._host.itemsize

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    @property
    def flags(self) -> Flags:
        flags = self._host.flags
        return Flags(flags.c_contiguous, flags.f_contiguous, self.base is None)

    @property
    def device(self) -> Device:
        return self.data.device

    @property
    def T(self) -> ndarray:
        return self.transpose()

    @property
    def mT(self) -> ndarray:
        """The last two axes exchanged."""
        if self.ndim < 2:
            raise ValueError("matrix transpose with ndim < 2 is undefined")
        return _view(self, self._host.swapaxes(-1, -2))

    @property
    def real(self) -> ndarray:
        return self if self.dtype.kind != "c" else _view(self, self._host.real)

    @property
    def imag(self) -> ndarray:
        return _view(self, self._host.imag) if self.dtype.kind == "c" else zeros_like(self)

    # ---- to and from the host

    def get(
        self, stream: Any = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True
    ) -> np.ndarray:
        """Copy to the host.

        Parameters
        ----------
        stream : Stream, optional
            Without effect: work is done when it is asked for.
        order : {"C", "F", "A"}
            Layout of the result.
        out : numpy.ndarray, optional
            Written and returned; its shape and dtype must be this array's, and it must be contiguous.
        blocking : bool
            Without effect.

        Returns
        -------
        numpy.ndarray
        """
        if out is None:
            made: np.ndarray = np.array(self._host, order=order)  # type: ignore[call-overload]
            return made
        if not isinstance(out, np.ndarray):
            raise TypeError(f"Only numpy.ndarray can be obtained from cupy.ndarray, not {type(out)}")
        if out.dtype != self.dtype:
            raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
        if out.shape != self.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}")
        if not (out.flags.c_contiguous or out.flags.f_contiguous):
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        np.copyto(out, self._host)
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        """Copy a NumPy array of the same shape and dtype into this array, which must be contiguous."""
        if not isinstance(arr, np.ndarray):
            raise TypeError(f"Only numpy.ndarray can be set to cupy.ndarray, not {type(arr)}")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        np.copyto(self._host, arr)
        _mark(self._host)

    def item(self) -> Any:
        """The only element, as a Python number."""
        if self.size != 1:
            raise ValueError(
                f"can only convert an array of size 1 to a Python scalar, not one of shape {self.shape}"
            )
        return self._host.item()

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers."""
        return self._host.tolist()

    def tobytes(self, order: str = "C") -> bytes:
        """The elements' bytes."""
        return self._host.tobytes(order)  # type: ignore[arg-type]

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise TypeError(_IMPLICIT)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        function = FUNCTIONS.get(ufunc.__name__)
        if method != "__call__" or function is None:
            return NotImplemented
        if ufunc.__name__ in _COMPARISONS:  # NumPy gives its scalars as 0-d arrays here (numpy#12142)
            inputs = tuple(x[()] if isinstance(x, np.ndarray) and x.ndim == 0 else x for x in inputs)
        if "out" in kwargs:
            if len(kwargs["out"]) != 1:
                raise ValueError("The 'out' parameter must have exactly one array value")
            kwargs["out"] = kwargs["out"][0]
        return function(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        function = FUNCTIONS.get(func.__name__)
        if function is None or any(t not in (ndarray, np.ndarray) for t in types):
            return NotImplemented
        return function(*args, **kwargs)

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        raise AttributeError(
            "__cuda_array_interface__: this array is not on a GPU, the emulation keeps it on the CPU"
        )

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        raise BufferError("this array is not on a GPU: the emulation does not export it; use .get()")

    def __reduce__(self) -> Any:
        return array, (self.get(),)

    # ---- writing

    def fill(self, value: Any) -> None:
        """Set every element to a scalar."""
        if isinstance(value, (np.ndarray, ndarray)) and value.ndim:
            kind = "numpy" if isinstance(value, np.ndarray) else "cupy"
            raise ValueError(f"non-scalar {kind}.ndarray cannot be used for fill")
        _assign(self._host, value.item() if isinstance(value, np.ndarray) else value)

    def __setitem__(self, key: Any, value: Any) -> None:
        key = _host_key(key)
        if _is_basic(key):
            if isinstance(value, np.ndarray) and value.ndim:
                raise ValueError(
                    "non-scalar numpy.ndarray cannot be used for fill: "
                    "use cp.asarray(...) to copy a NumPy array to the device first"
                )
            _assign(self._host[_with_ellipsis(key)], value.item() if isinstance(value, np.ndarray) else value)
            return
        with _quiet():
            self._host[key] = value._host if isinstance(value, ndarray) else np.asarray(value)
        _mark_selected(self._host, key)

    # ---- reading

    def __getitem__(self, key: Any) -> ndarray:
        key = _host_key(key)
        if _is_basic(key):
            return _view(self, self._host[_with_ellipsis(key)])
        try:
            made: ndarray = _wrap(self._host[key], (self,))
        except IndexError as error:
            raise IndexError(
                f"{error} (a card would take the index modulo the size and say nothing)"
            ) from None
        return made

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[ndarray]:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(
                "The truth value of an array with more than one element is ambiguous. Use a.any() or a.all()"
            )
        return bool(self._host.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __format__(self, spec: str) -> str:
        return format(self._host.item() if self.ndim == 0 else self._host, spec)

    def __repr__(self) -> str:
        return repr(self._host)

    def __str__(self) -> str:
        return str(self._host)

    # ---- other shapes, layouts and types

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        """The elements in another dtype; the array itself if ``copy=False`` and nothing is to be done."""
        if casting is not None and not np.can_cast(self.dtype, dtype, casting):
            raise TypeError(
                f"Cannot cast array data from {self.dtype} to {np.dtype(dtype)} according to {casting!r}"
            )
        dtype = _check_dtype(dtype)
        if (
            not copy
            and dtype == self.dtype
            and (order in "KA" or getattr(self.flags, f"{order.lower()}_contiguous"))
        ):
            return self
        return _converted(self._host, dtype, order)

    def copy(self, order: str = "C") -> ndarray:
        """A copy in memory of its own."""
        return _converted(self._host, self.dtype, order)

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()

    def flatten(self, order: str = "C") -> ndarray:
        """A one-dimensional copy."""
        return _to_device(self._host.flatten(order))  # type: ignore[arg-type]

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        """The same memory, as elements of another dtype where one is given."""
        host = self._host.view() if dtype is None else self._host.view(_check_dtype(dtype))
        return _view(self, host)

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> ndarray:
        """The elements in another shape; a view where that is possible."""
        if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)):
            shape = tuple(shape[0])
        made: ndarray = FUNCTIONS["reshape"](self, shape, order=order, copy=copy)
        return made

    def transpose(self, *axes: Any) -> ndarray:
        """A view with the axes in another order, reversed by default."""
        if len(axes) == 1 and (axes[0] is None or not isinstance(axes[0], (int, np.integer))):
            return _view(self, self._host.transpose(axes[0]))
        return _view(self, self._host.transpose(axes or None))

    def sort(self, axis: int = -1, kind: str | None = None) -> None:
        """Sort in place."""
        _assign(self._host, _stable("sort")(self._host, axis, kind))

    def partition(self, kth: Any, axis: int = -1) -> None:
        """Put the `kth` smallest element in its place, the smaller ones before it."""
        _assign(self._host, np.partition(self._host, kth, axis=axis))

    def scatter_add(self, slices: Any, value: Any) -> None:
        """Add `value` to the elements that an index names, once for each time that it names them."""
        key = _host_key(slices)
        _require_operand(value)
        np.add.at(self._host, key, value._host if isinstance(value, ndarray) else value)

    all, any = _method("all"), _method("any")
    argmax, argmin = _method("argmax"), _method("argmin")
    argpartition, argsort = _method("argpartition"), _method("argsort")
    clip = _method("clip")
    conj, conjugate = _method("conj"), _method("conjugate")
    cumprod, cumsum = _method("cumprod"), _method("cumsum")
    diagonal, dot = _method("diagonal"), _method("dot")
    max, mean, min = _method("max"), _method("mean"), _method("min")
    nonzero, prod, ptp = _method("nonzero"), _method("prod"), _method("ptp")
    put, ravel, repeat, round = _method("put"), _method("ravel"), _method("repeat"), _method("round")
    searchsorted, squeeze, std, sum = (_method(n) for n in ("searchsorted", "squeeze", "std", "sum"))
    swapaxes, take, trace, var = (_method(n) for n in ("swapaxes", "take", "trace", "var"))

    # ---- operators

    __add__, __radd__, __iadd__ = _operator("add"), _reflected("add"), _in_place("add")
    __sub__, __rsub__, __isub__ = _operator("subtract"), _reflected("subtract"), _in_place("subtract")
    __mul__, __rmul__, __imul__ = _operator("multiply"), _reflected("multiply"), _in_place("multiply")
    __truediv__, __rtruediv__ = _operator("true_divide"), _reflected("true_divide")
    __itruediv__ = _in_place("true_divide")
    __floordiv__, __rfloordiv__ = _operator("floor_divide"), _reflected("floor_divide")
    __ifloordiv__ = _in_place("floor_divide")
    __mod__, __rmod__, __imod__ = _operator("remainder"), _reflected("remainder"), _in_place("remainder")
    __divmod__, __rdivmod__ = _operator("divmod"), _reflected("divmod")
    __pow__, __rpow__, __ipow__ = _operator("power"), _reflected("power"), _in_place("power")
    __and__, __rand__, __iand__ = (
        _operator("bitwise_and"),
        _reflected("bitwise_and"),
        _in_place("bitwise_and"),
    )
    __or__, __ror__, __ior__ = _operator("bitwise_or"), _reflected("bitwise_or"), _in_place("bitwise_or")
    __xor__, __rxor__, __ixor__ = (
        _operator("bitwise_xor"),
        _reflected("bitwise_xor"),
        _in_place("bitwise_xor"),
    )
    __lshift__, __rlshift__ = _operator("left_shift"), _reflected("left_shift")
    __ilshift__ = _in_place("left_shift")
    __rshift__, __rrshift__ = _operator("right_shift"), _reflected("right_shift")
    __irshift__ = _in_place("right_shift")
    __matmul__, __rmatmul__ = _operator("matmul"), _reflected("matmul")
    __eq__, __ne__ = _operator("equal"), _operator("not_equal")
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")
    __neg__, __pos__, __invert__, __abs__ = (
        _unary(n) for n in ("negative", "positive", "invert", "absolute")
    )


def _shape_tuple(shape: Any) -> tuple[int, ...]:
    """A shape as a tuple of ints, none of them negative."""
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if not all(isinstance(n, (int, np.integer)) for n in sizes):
        raise TypeError(f"a shape must consist of integers, not {shape!r}")
    if any(n < 0 for n in sizes):
        raise ValueError(f"Negative dimensions are not allowed: shape {shape}")
    return tuple(int(n) for n in sizes)


def _host_key(key: Any) -> Any:
    """An index with its arrays as NumPy has them."""
    if isinstance(key, tuple):
        return tuple(_host_key(item) for item in key)
    return key._host if isinstance(key, ndarray) else key


def _is_basic(key: Any) -> bool:
    """Whether an index gives a view: integers, slices, None and ... alone."""
    items = key if isinstance(key, tuple) else (key,)
    return all(
        item is None
        or item is Ellipsis
        or isinstance(item, (slice, np.integer))
        or (isinstance(item, int) and not isinstance(item, bool))
        for item in items
    )


def _with_ellipsis(key: Any) -> tuple[Any, ...]:
    """The same basic index, in the form for which NumPy gives a view even of one element."""
    items = key if isinstance(key, tuple) else (key,)
    return items if any(item is Ellipsis for item in items) else (*items, Ellipsis)


def _assign(target: np.ndarray, value: Any) -> None:
    """Write a scalar or an array into memory and mark it."""
    if isinstance(value, ndarray):
        value = value._host
    elif not isinstance(value, (np.ndarray, *_SCALARS)):
        _require_array(value)
    with _quiet():
        np.copyto(target, value, casting="unsafe")
    _mark(target)


def _converted(host: np.ndarray, dtype: np.dtype, order: str | None) -> ndarray:
    """A new array with the values of `host` in another dtype and layout, written straight into its memory."""
    if order not in (None, "K", "A", "C", "F"):
        raise ValueError(f"order not understood. order={order}; it must be 'K', 'A', 'C' or 'F'")
    if order == "A":
        order = "F" if host.flags.fnc else "C"
    made = _new(host.shape, dtype, like=host) if order in (None, "K") else _new(host.shape, dtype, str(order))
    _assign(made._host, host)
    return made


# ---------------- functions that are written out


def array(
    obj: Any,
    dtype: Any = None,
    copy: bool | None = True,
    order: str | None = "K",
    subok: bool = False,
    ndmin: int = 0,
    *,
    blocking: bool = False,
) -> ndarray:
    """Make an array of a NumPy array, numbers, nested lists of them, or arrays.

    Parameters
    ----------
    obj : array, numpy.ndarray, number or nested list
        The values; a list of arrays of one shape is stacked.
    dtype : dtype, optional
        By default that of the values.
    copy : bool or None
        None or False: an array that is already right is returned as it is.
    order : {"K", "A", "C", "F"}
        Layout.
    subok : bool
        Must be False.
    ndmin : int
        Axes of length 1 are put in front until there are as many.
    blocking : bool
        Without effect.

    Returns
    -------
    ndarray
    """
    if subok:
        raise NotImplementedError("subok=True is not supported")
    if isinstance(obj, ndarray):
        made = obj.astype(obj.dtype if dtype is None else dtype, order or "K", copy=bool(copy))
    else:
        host = np.asarray(_plain_values(obj))
        wanted = _check_dtype(host.dtype if dtype is None else dtype)
        made = _converted(host, wanted, "A" if order in (None, "K") else order)
    while made.ndim < ndmin:
        made = made[None]
    return made


def _plain_values(obj: Any) -> Any:
    """`obj` with its arrays as NumPy has them."""
    if isinstance(obj, ndarray):
        return obj._host
    return [_plain_values(item) for item in obj] if isinstance(obj, (list, tuple)) else obj


def asarray(
    a: Any, dtype: Any = None, order: str | None = None, *, copy: bool | None = None, blocking: bool = False
) -> ndarray:
    """Like :func:`array`, without a copy where `a` is already such an array."""
    if copy is False and not isinstance(a, ndarray):
        raise ValueError("Unable to avoid copy while creating an array as requested.")
    return array(a, dtype, copy, order)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    """`a` in C order, at least one-dimensional; without a copy where it is already."""
    return array(a, dtype, False, "C", ndmin=1)


def asfortranarray(a: Any, dtype: Any = None) -> ndarray:
    """`a` in Fortran order; without a copy where it is already."""
    return array(a, dtype, False, "F")


def asnumpy(
    a: Any, stream: Any = None, order: str = "C", out: np.ndarray | None = None, *, blocking: bool = True
) -> np.ndarray:
    """Copy an array to the host; anything else becomes a NumPy array as ``numpy.asarray`` makes it."""
    if isinstance(a, ndarray):
        return a.get(stream, order, out, blocking)
    host: np.ndarray = np.asarray(a, order=order)  # type: ignore[call-overload]
    if out is None:
        return host
    np.copyto(out, host)
    return out


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """An array that nothing has written: its bytes are 0xFF, full mode reports a kernel that reads them."""
    return ndarray(shape, dtype, order=order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    """An array filled with one value."""
    if dtype is None:
        dtype = fill_value.dtype if isinstance(fill_value, ndarray) else np.asarray(fill_value).dtype
    made = ndarray(shape, dtype, order=order)
    made.fill(fill_value)
    return made


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """An array of zeros."""
    return full(shape, 0, dtype, order)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """An array of ones."""
    return full(shape, 1, dtype, order)


def empty_like(
    prototype: ndarray, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> ndarray:
    """An array of the same shape and dtype that nothing has written."""
    if subok is not None:
        raise TypeError("subok is not supported yet")
    _require_array(prototype)
    dtype = _check_dtype(prototype.dtype if dtype is None else dtype)
    if order == "A" or (order == "K" and shape is not None):
        order = "F" if prototype.flags.fnc else "C"
    if order == "K":
        return _new(prototype.shape, dtype, like=prototype._host)
    return _new(prototype.shape if shape is None else shape, dtype, order)


def full_like(
    a: ndarray, fill_value: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> ndarray:
    """An array of the same shape and dtype, filled with one value."""
    made = empty_like(a, dtype, order, subok, shape)
    made.fill(fill_value)
    return made


def zeros_like(
    a: ndarray, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> ndarray:
    """An array of zeros of the same shape and dtype."""
    return full_like(a, 0, dtype, order, subok, shape)


def ones_like(
    a: ndarray, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> ndarray:
    """An array of ones of the same shape and dtype."""
    return full_like(a, 1, dtype, order, subok, shape)


def copy(a: ndarray, order: str = "K") -> ndarray:
    """A copy in memory of its own."""
    _require_array(a)
    return a.copy(order)


def astype(x: ndarray, dtype: Any, /, *, copy: bool = True) -> ndarray:
    """The elements converted to another dtype."""
    _require_array(x)
    return x.astype(dtype, copy=copy)


def size(a: Any, axis: int | None = None) -> int:
    """The number of elements, of all or along one axis."""
    return int(np.size(a._host if isinstance(a, ndarray) else a, axis))


def get_array_module(*args: Any) -> types.ModuleType:
    """This module when one of the arguments is an array of the device, else NumPy."""
    if any(isinstance(value, ndarray) for value in args):
        return sys.modules[__package__ or ""]
    return np


def get_default_memory_pool() -> memory.MemoryPool:
    """The pool that arrays are allocated from."""
    return memory.default_memory_pool


def get_default_pinned_memory_pool() -> memory.PinnedMemoryPool:
    """The pool of pinned host memory."""
    return memory.default_pinned_memory_pool


WRITTEN_OUT: tuple[Callable[..., Any], ...] = (
    array, asarray, ascontiguousarray, asfortranarray, asnumpy, astype, copy, empty, empty_like,
    full, full_like, get_array_module, get_default_memory_pool, get_default_pinned_memory_pool,
    ones, ones_like, size, zeros, zeros_like,
)  # fmt: skip


def _table() -> dict[str, Callable[..., Any]]:
    """Every function of the list, by its name under ``cp.``."""
    table: dict[str, Callable[..., Any]] = {name: _elementwise(name) for name in ELEMENTWISE}
    special = {"matmul": _wide_product(np.matmul), "dot": _wide_product(np.dot)}
    special |= {name: _stable(name) for name in ("sort", "argsort")}
    for name, parameters in ARRAY.items():
        table[name] = _array_function(name, parameters, special.get(name, getattr(np, name)), name)
    table |= {name: _sequence_function(name, parameters) for name, parameters in SEQUENCE.items()}
    table |= {name: _variadic_function(name, parameters) for name, parameters in VARIADIC.items()}
    table |= {name: _creation_function(name, parameters) for name, parameters in CREATION.items()}
    table |= {name: _writing_function(name, parameters) for name, parameters in WRITING.items()}
    table |= {name: _plain_function(name) for name in PLAIN}
    table |= {function.__name__: function for function in WRITTEN_OUT}
    table["asanyarray"] = asarray
    return table


FUNCTIONS.update(_table())

linalg = types.SimpleNamespace(
    **{n: _array_function(n, p, getattr(np.linalg, n), f"linalg.{n}") for n, p in LINALG.items()},
    LinAlgError=np.linalg.LinAlgError,
)

__all__ = sorted({"linalg", "ndarray", "random", *FUNCTIONS, *CONSTANTS})


def __getattr__(name: str) -> Any:
    """The functions of the tables, which are no globals here: `sum` and `max` would hide Python's own."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if name in CONSTANTS:
        return getattr(np, name)
    if name == "random":  # imports this module
        return importlib.import_module(".random", __package__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def missing(name: str, module: str = "cupy") -> NoReturn:
    """Raise the AttributeError for a name that the emulation has not got.

    Parameters
    ----------
    name : str
        What was asked for.
    module : str
        Where: ``"cupy"``, ``"cupy.cuda.runtime"``.
    """
    raise AttributeError(
        f"{module}.{name} is not in the CPU emulation, which has a written list of CuPy's functions: those "
        f"that the course and the engine use (the tables at the top of tinyvllm_ref/emulation/array.py). "
        f"Use one of those, or a card with CuPy."
    )
