"""The picture of what a paged kernel reads: the blocks of the cache, and each request's walk through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import look
from .canvas import AltFigure, Sheet, drawable, in_one_look, need_at_most, need_some, plural, text_width


@in_one_look
def block_walks(
    walks: Mapping[str, Sequence[int]], num_blocks: int, *, title: str, subtitle: str = ""
) -> AltFigure:
    """The blocks of a cache by reader, and under them the blocks of each request in the order of reading.

    Parameters
    ----------
    walks : mapping of str to sequence of int
        Request -> the physical blocks that it reads, in order; at most 8 requests of 32 blocks.
    num_blocks : int
        Blocks of the cache, at most 64. Those that nobody reads are hatched.
    title, subtitle : str

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        There is no request, or a block is not in the cache.
    """
    need_some("block_walks(walks)", walks, "request")
    need_at_most("block_walks(walks)", len(walks), 8, "requests")
    need_at_most("block_walks(num_blocks)", num_blocks, 64, "blocks")
    for name, walk in walks.items():
        need_some(f"block_walks: {name!r}", walk, "block")
        need_at_most(f"block_walks: {name!r}", len(walk), 32, "blocks")
        outside = [block for block in walk if not 0 <= block < num_blocks]
        if outside:
            raise ValueError(
                f"block_walks: {name!r} reads block {outside[0]}; the cache has blocks 0 to {num_blocks - 1}"
            )
    sheet = Sheet()
    sheet.title(title, subtitle)
    columns = min(32, num_blocks)
    wide, tall = sheet.inner / max(columns, *(len(walk) for walk in walks.values())), 0.26
    readers = {block: k for k, walk in enumerate(walks.values()) for block in walk}
    sheet.text(sheet.left, sheet.y + 0.08, "the cache", bold=True)
    sheet.y += 0.22
    for block in range(num_blocks):
        hue = look.hue(readers[block]) if block in readers else None
        _block(sheet, block % columns, block, hue, (wide, tall))
        if block % columns == columns - 1 or block == num_blocks - 1:
            sheet.y += tall + 0.04
    sheet.y += 0.1
    for k, (name, walk) in enumerate(walks.items()):
        sheet.text(sheet.left, sheet.y + 0.08, f"{drawable(name)} reads", bold=True, width=sheet.inner)
        sheet.y += 0.22
        for place, block in enumerate(walk):
            _block(sheet, place, block, look.hue(k), (wide, tall))
        sheet.y += tall + 0.1
    sheet.key([("read by nobody", {"fill": look.WASTE, "hatch": look.HATCH})])
    says = "; ".join(f"{drawable(name)} reads {', '.join(map(str, walk))}" for name, walk in walks.items())
    unread = num_blocks - len(readers)
    return sheet.finish(f"{title}: {plural(num_blocks, 'block')}, {unread} read by nobody. {says}.")


def _block(sheet: Sheet, column: int, block: int, hue: look.Hue | None, size: tuple[float, float]) -> None:
    wide, tall = size
    x = sheet.left + column * wide
    if hue is None:
        sheet.box(x + 0.01, sheet.y, wide - 0.02, tall, fill=look.WASTE, hatch=look.HATCH)
    else:
        sheet.box(x + 0.01, sheet.y, wide - 0.02, tall, fill=hue.fill, edge=hue.line)
    if hue is not None and text_width(str(block), look.SMALL_SIZE) <= wide - 0.05:
        sheet.text(x + wide / 2, sheet.y + tall / 2, str(block), size=look.SMALL_SIZE, ha="center")
