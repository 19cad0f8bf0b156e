"""``earlier``: the parts that a lesson builds on, from the learner or from the reference."""

from __future__ import annotations

from typing import Any

from tinyvllm_ref.assembly import Parts
from tinyvllm_ref.parts import LESSONS

from . import my_engine


def earlier(*names: str) -> Any:
    """Parts of earlier lessons, and a line that says whose they are.

    Parameters
    ----------
    *names : str
        Such as ``"BF16_CUDA", "BLOCK_SUM_CUDA"``.

    Returns
    -------
    part or tuple of parts
        The learner's where it has passed, else the reference's.
    """
    if not names:
        raise TypeError('earlier() needs the name of a part: earlier("BF16_CUDA")')
    unknown = [name for name in names if name not in LESSONS]
    if unknown:
        raise LookupError(f"there is no part {unknown[0]!r}; the parts are {', '.join(LESSONS)}")
    parts = my_engine.parts()
    owners = parts.owners()
    for name in names:
        whose = (
            "yours"
            if owners.get(name) == "learner"
            else "the reference's, until you pass lesson " + LESSONS[name][0]
        )
        print(f"{name}: {whose}")
    # An engine leaves out the attention parts that it does not call; a lesson may still build on them.
    found = tuple(getattr(parts, name) or getattr(Parts.reference(), name) for name in names)
    return found[0] if len(found) == 1 else found
