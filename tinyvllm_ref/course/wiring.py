"""Parts that call other parts: within an engine they call those of that engine.

A learner's `decoder_layer` and `forward` name the parts that they are made of, and find them in the module where they
were defined. Where one of these has been exchanged (for one that counts, records, or makes a mistake) they must find
the one that took its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tinyvllm_ref.parts import Parts

COMPOSED = ("decoder_layer", "forward")
"""The parts that a learner puts together from other parts."""


@contextmanager
def wired(parts: Parts) -> Iterator[None]:
    """Within the block, the composed parts of this record call the other parts of this record.

    Only names that such a part already has are exchanged; at the end all is as before.
    """
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    seen: set[int] = set()
    try:
        for composed in COMPOSED:
            names = getattr(inspect.unwrap(getattr(parts, composed) or wired), "__globals__", {})
            if getattr(parts, composed) is None or id(names) in seen:
                continue
            seen.add(id(names))
            changed = {
                name: getattr(parts, name)
                for name in parts.owners()
                if name != composed and name in names and callable(names[name])
            }
            kept.append((names, {name: names[name] for name in changed}))
            names.update(changed)
        yield
    finally:
        for names, before in reversed(kept):
            names.update(before)
