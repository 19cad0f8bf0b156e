"""From an address in a compiled kernel to the line of its source, through the library's DWARF tables.

A function of ours that was inlined (an atomic, a warp function, an operator of bfloat16) counts as the line
that called it: what is asked for is always the innermost line of the caller's own source.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .compiler import SOURCE_NAME
from .elf import elf_file


def line_of(path: Path, offset: int) -> int:
    """The source line of an instruction at `offset` from the start of the library; 0 where it is unknown."""
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return _line_from_atos(path, offset)
    rows, inlined = _tables(str(path))
    best = 0
    for low, high, line in rows:
        if low <= offset < high:
            best = line
            break
    if best:
        return best
    calls = [(high - low, line) for low, high, line in inlined if low <= offset < high and line]
    if calls:
        return min(calls)[1]
    # An instruction that the optimiser gave to no line: the last line before it.
    return max(((high, line) for _, high, line in rows if high <= offset), default=(0, 0))[1]


def _is_source(program: Any, number: int) -> bool:
    """Is this entry of the file table the kernel's source?"""
    entries = program["file_entry"]
    return 1 <= number <= len(entries) and Path(entries[number - 1].name.decode()).name == SOURCE_NAME


def _line_rows(dwarf: Any, unit: Any) -> Iterator[tuple[int, int, int]]:
    """(first address, end, line) of the stretches that belong to the source itself."""
    program = dwarf.line_program_for_CU(unit)
    if program is None:
        return
    previous = None
    for entry in program.get_entries():
        state = entry.state
        if state is None:
            continue
        if previous is not None and previous.address < state.address and _is_source(program, previous.file):
            yield previous.address, state.address, previous.line
        previous = None if state.end_sequence else state


def _ranges(dwarf: Any, unit: Any, die: Any) -> list[tuple[int, int]]:
    """The address ranges of an inlined call (in DWARF 4, which kernels are compiled with)."""
    attributes = die.attributes
    if "DW_AT_high_pc" in attributes:
        low, high = attributes["DW_AT_low_pc"].value, attributes["DW_AT_high_pc"]
        return [(low, high.value if high.form == "DW_FORM_addr" else low + high.value)]
    if "DW_AT_ranges" not in attributes:
        return []
    base = unit.get_top_DIE().attributes.get("DW_AT_low_pc")
    start, out = base.value if base is not None else 0, []
    for entry in dwarf.range_lists().get_range_list_at_offset(attributes["DW_AT_ranges"].value, unit):
        if hasattr(entry, "base_address"):
            start = entry.base_address
        else:
            out.append((entry.begin_offset + start, entry.end_offset + start))
    return out


@functools.lru_cache(maxsize=64)
def _tables(path: str) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Line stretches of the source, and (start, end, calling line) of what was inlined into it."""
    rows: list[tuple[int, int, int]] = []
    inlined: list[tuple[int, int, int]] = []
    with open(path, "rb") as file:
        dwarf = elf_file(file).get_dwarf_info()
        for unit in dwarf.iter_CUs():
            rows += _line_rows(dwarf, unit)
            program = dwarf.line_program_for_CU(unit)
            for die in unit.iter_DIEs():
                if die.tag != "DW_TAG_inlined_subroutine" or "DW_AT_call_line" not in die.attributes:
                    continue
                if program is None or not _is_source(program, die.attributes["DW_AT_call_file"].value):
                    continue
                line = die.attributes["DW_AT_call_line"].value
                inlined += [(low, high, line) for low, high in _ranges(dwarf, unit, die)]
    return rows, inlined


def _line_from_atos(path: Path, offset: int) -> int:
    """macOS keeps the tables in object files that its own tool finds."""
    done = subprocess.run(
        ["atos", "-o", str(path), "-offset", hex(offset), "-i"], capture_output=True, text=True
    )
    for text in done.stdout.splitlines():
        if f"({SOURCE_NAME}:" in text:
            return int(text.rsplit(":", 1)[1].rstrip(")"))
    return 0
