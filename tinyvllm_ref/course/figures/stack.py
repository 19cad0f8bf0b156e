"""The picture of a whole model: blocks beside the stream, with the shape of what passes between them."""

from __future__ import annotations

from .. import look
from .canvas import AltFigure, Sheet, in_one_look

_TALL, _GAP = 0.27, 0.09


@in_one_look
def model_stack(
    *, tokens: int, hidden: int, ffn: int, q_size: int, kv_size: int, vocab: int, layers: int, rows: int = 1
) -> AltFigure:
    """A Llama from token ids to logits: the stream on the left, what reads it and adds to it on the right.

    Parameters
    ----------
    tokens, rows : int
        Tokens that go in, and rows of logits that come out.
    hidden, ffn, vocab, layers : int
        Of the model.
    q_size, kv_size : int
        Columns of all query heads together, and of all key heads.

    Returns
    -------
    AltFigure

    Raises
    ------
    ValueError
        If a size is not positive.
    """
    for name, value in (("tokens", tokens), ("hidden", hidden), ("ffn", ffn), ("q_size", q_size),
                        ("kv_size", kv_size), ("vocab", vocab), ("layers", layers), ("rows", rows)):  # fmt: skip
        if value < 1:
            raise ValueError(f"model_stack: {name} is {value}; it must be positive")
    sheet = Sheet()
    sheet.title(
        "From token ids to logits",
        f"{tokens} tokens. Each row of an array is one token; every step but attention treats each row by itself.",
    )
    stream_x = sheet.left + 0.75
    left, wide = sheet.left + 1.75, 2.5
    # (name, shape of what comes out, hue, what it has to do with the stream)
    inside = [
        ("add_rms_norm", f"({tokens}, {hidden}) bf16", look.GREY, "reads"),
        ("linear qkv", f"({tokens}, {q_size + 2 * kv_size})", look.BLUE, ""),
        ("rope", "q and k, in place", look.GREEN, ""),
        ("attend", f"({tokens}, {q_size}) bf16", look.GREEN, ""),
        ("linear o_proj", f"({tokens}, {hidden})", look.BLUE, "adds"),
        ("add_rms_norm", f"({tokens}, {hidden}) bf16", look.GREY, "reads"),
        ("linear gate_up", f"({tokens}, {2 * ffn})", look.BLUE, ""),
        ("silu_mul", f"({tokens}, {ffn}) bf16", look.GREEN, ""),
        ("linear down_proj", f"({tokens}, {hidden})", look.BLUE, "adds"),
    ]
    before = [("embedding", f"({tokens}, {hidden})", look.ORANGE, "adds")]
    after = [
        ("add_rms_norm", f"({tokens}, {hidden}) bf16", look.GREY, "reads"),
        ("rows wanted", f"({rows}, {hidden}) bf16", look.ORANGE, ""),
        ("linear lm_head", f"({rows}, {vocab:,}) logits", look.BLUE, ""),
        ("argmax", f"({rows},) token ids", look.ORANGE, ""),
    ]
    start = sheet.y + _TALL / 2
    end = start
    for group, steps in ((0, before), (1, inside), (2, after)):
        if group == 1:
            top = sheet.y + 0.02
            sheet.y += 0.14
        for name, shape, hue, does in steps:
            middle = sheet.y + _TALL / 2
            sheet.box(left, sheet.y, wide, _TALL, fill=hue.fill, edge=hue.line, above=2)
            sheet.text(left + 0.12, middle, name)
            sheet.text(left + wide + 0.15, middle, shape, size=look.SMALL_SIZE, color=look.MUTED)
            if does == "reads":
                sheet.arrow((stream_x, middle), (left, middle))
                end = middle
            elif does == "adds":
                sheet.arrow((left, middle), (stream_x + 0.02, middle))
            sheet.y += _TALL + _GAP
        if group == 1:
            sheet.y += 0.05
            sheet.box(sheet.left + 1.55, top, sheet.right - sheet.left - 1.55, sheet.y - top - 0.04, edge=look.RULE,
                      dashed=True)  # fmt: skip
            sheet.text(sheet.right - 0.12, top + 0.16, f"{layers} times", ha="right", bold=True)
            sheet.y += 0.08
    sheet.line((stream_x, stream_x), (start, end), color=look.INK, width=2.4, above=1)
    sheet.text(stream_x - 0.1, (start + end) / 2, "stream", ha="right")
    sheet.text(stream_x - 0.1, (start + end) / 2 + 0.17, f"({tokens}, {hidden})", ha="right", size=7,
               color=look.MUTED, width=0.85)  # fmt: skip
    sheet.y -= _GAP
    return sheet.finish(
        f"A Llama of {layers} layers from {tokens} token ids to {rows} x {vocab:,} logits: in each layer two "
        f"blocks read a norm of the stream of {hidden} numbers a token and add to it; the feed-forward has {ffn:,}."
    )
