"""The picture of where a model's parameters are: a bar for each model, in shares."""

from __future__ import annotations

from collections.abc import Mapping

from .. import look
from .canvas import AltFigure, Sheet, drawable, in_one_look, need_at_most, need_some, shortened, text_width


def _count(parameters: int) -> str:
    """``1.24 B``, ``135 M``, ``2,512``."""
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if parameters >= size:
            return f"{parameters / size:.3g} {letter}"
    return f"{parameters:,}"


@in_one_look
def parameter_shares(models: Mapping[str, Mapping[str, int]], *, title: str, subtitle: str = "") -> AltFigure:
    """One bar a model, of the shares of its kinds of parameters.

    Parameters
    ----------
    models : mapping of str to mapping of str to int
        Model -> kind -> number of parameters; all with the same kinds, at most 8 models of 6 kinds.
    title, subtitle : str

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If there is no model, the kinds differ, or a model has no parameter.
    """
    need_some("parameter_shares(models)", models, "model")
    need_at_most("parameter_shares(models)", len(models), 8, "models")
    kinds = list(next(iter(models.values())))
    need_some("parameter_shares(models): the first model", kinds, "kind")
    need_at_most("parameter_shares(models): the first model", len(kinds), 6, "kinds")
    for name, counts in models.items():
        if list(counts) != kinds:
            raise ValueError(
                f"parameter_shares: {name!r} has the kinds {list(counts)}; the first model has {kinds}"
            )
        if min(counts.values()) < 0 or sum(counts.values()) < 1:
            raise ValueError(f"parameter_shares: {name!r} has {dict(counts)}; counts must be positive")
    sheet = Sheet()
    sheet.title(title, subtitle)
    names = [shortened(drawable(name), 1.3, look.TEXT_SIZE) for name in models]
    left = sheet.left + max(text_width(name, look.TEXT_SIZE) for name in names) + 0.14
    wide, tall = sheet.right - left - 0.7, 0.27
    for name, counts in zip(names, models.values(), strict=True):
        total, x = sum(counts.values()), left
        sheet.text(left - 0.1, sheet.y + tall / 2, name, ha="right")
        for k, (kind, count) in enumerate(counts.items()):
            share = count / total
            sheet.box(x, sheet.y, share * wide, tall, fill=look.hue(k).fill, edge=look.hue(k).line)
            said = f"{kind} {share:.0%}" if share * wide > 1.6 else f"{share:.0%}"
            sheet.text(
                x + share * wide / 2, sheet.y + tall / 2, said, ha="center",
                size=look.SMALL_SIZE, width=max(0.0, share * wide - 0.06),
            )  # fmt: skip
            x += share * wide
        sheet.text(
            left + wide + 0.1, sheet.y + tall / 2, _count(total), size=look.SMALL_SIZE, color=look.MUTED
        )
        sheet.y += tall + 0.1
    sheet.y -= 0.1
    sheet.key([(kind, {"fill": look.hue(k).fill, "edge": look.hue(k).line}) for k, kind in enumerate(kinds)])
    said_of = "; ".join(
        f"{drawable(name)}, {_count(sum(counts.values()))}: "
        + ", ".join(f"{drawable(kind)} {count / sum(counts.values()):.0%}" for kind, count in counts.items())
        for name, counts in models.items()
    )
    return sheet.finish(f"{title}. {said_of}.")
