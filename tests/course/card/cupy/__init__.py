"""A stand-in for CuPy on a card: the emulation once more, under CuPy's name and with arrays of its own.

It lies on a test's ``PYTHONPATH``, and with ``TINYVLLM_DEVICE=cuda`` the project takes it for a GPU. What mixes its
arrays, kernels or allocators with those of ``tinyvllm_ref.emulation`` fails, as it does with a card's.
"""

# The names that the emulation brings in hide Python's own (`max`), so that there is little code here.
import importlib.util as _importing
import pathlib as _pathlib
import typing as _typing

_package = _importing.find_spec("tinyvllm_ref")
assert _package is not None
assert _package.submodule_search_locations
_file = _pathlib.Path(_package.submodule_search_locations[0]) / "emulation" / "__init__.py"
__path__ = [str(_file.parent)]  # so `cupy.memory` is a module of its own, made from the emulation's file
exec(compile(_file.read_text(encoding="utf-8"), str(_file), "exec"))

__version__ = "0 (a stand-in)"


def __getattr__(name: str) -> _typing.Any:
    raise AttributeError(f"module 'cupy' has no attribute {name!r}")


import card_ways as _card_ways  # noqa: E402

_card_ways.change(_typing.cast(_typing.Any, globals()))
