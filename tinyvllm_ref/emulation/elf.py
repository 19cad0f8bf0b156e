"""ELF files, read with pyelftools, which is imported when the first one is read: it takes long to load."""

from __future__ import annotations

import os
import threading
from typing import Any, BinaryIO

# A process that forks while another of its threads is inside an import has a child in which that import never ends:
# Python holds the import system's own lock over a fork, but not the locks of single modules.
_importing = threading.RLock()
os.register_at_fork(
    before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release
)


def elf_file(file: BinaryIO) -> Any:
    """An open file as pyelftools' `ELFFile`."""
    with _importing:
        from elftools.elf.elffile import ELFFile
    return ELFFile(file)
