"""Lesson 02: what the 16 bits of a bfloat16 mean, and how a float32 is rounded to them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from tinyvllm_ref.checkpoint.load import load_weights
from tinyvllm_ref.course import figures, look
from tinyvllm_ref.course.exercise import (
    Case,
    EngineCard,
    Exercise,
    Hints,
    Lesson,
    Mistake,
    Setting,
    Work,
)

_ALL = np.arange(1 << 16, dtype=np.uint16)
_NANS = (0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF)
_FLT_MAX = 0x7F7FFFFF


def _wide(numbers: Any) -> Any:
    """The bits of numbers as float32."""
    return np.asarray(numbers, np.float32).view(np.uint32)


def _rounded_bits(x: Any) -> Any:
    """bfloat16 bits of float32 numbers, by ml_dtypes; every NaN as 0x7FC0."""
    with np.errstate(invalid="ignore", over="ignore"):
        bits = np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(bits & 0x7FFF > 0x7F80, np.uint16(0x7FC0), bits)


# ---------------- 02.1: a pattern as a number

_SIZES = {"bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23)}


def _decode_cases(rng: np.random.Generator) -> list[Case]:
    def case(format: str, what: str, bits: Any, group: str) -> Case:
        exponent_bits, fraction_bits = _SIZES[format]
        inputs = {
            "bits": np.asarray(bits, np.uint32 if fraction_bits == 23 else np.uint16),
            "exponent_bits": exponent_bits,
            "fraction_bits": fraction_bits,
        }
        return Case(f"{format}, {what}", inputs, group)

    some = rng.integers(0, 1 << 32, 2000, dtype=np.uint32)
    edges = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, _FLT_MAX, 0x7F800000, 0xFF800000, 0x80000001, *_NANS]
    return [
        case("bfloat16", "4 ordinary numbers", [0x3F80, 0x4000, 0x4049, 0x3E20], "small"),
        case("bfloat16", "4 negative numbers", [0xBF80, 0xC0D0, 0xBE20, 0xFF7F], "small"),
        case(
            "float16", "the same 4 ordinary numbers as in bfloat16", [0x3C00, 0x4000, 0x4248, 0x3100], "small"
        ),
        case("bfloat16", "2 infinities and 2 NaNs", [0x7F80, 0xFF80, 0x7FC0, 0xFF81], "awkward"),
        case("bfloat16", "4 negative subnormal numbers", [0x8001, 0x8010, 0x8040, 0x807F], "awkward"),
        case("bfloat16", "0 and -0", [0x0000, 0x8000], "awkward"),
        case("bfloat16", "the 128 smallest patterns", _ALL[:128], "awkward"),
        case("bfloat16", "all 65,536 patterns", _ALL, "awkward"),
        case("float16", "all 65,536 patterns", _ALL, "awkward"),
        case("float32", "edges and 2,000 random patterns", [*edges, *some.tolist()], "awkward"),
    ]


def _run_decode(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    sizes = inputs["exponent_bits"], inputs["fraction_bits"]
    values = np.array([answer(bits, *sizes) for bits in inputs["bits"].tolist()], np.float64)
    return {"values": values, "signs": np.where(np.isnan(values), 1.0, np.copysign(1.0, values))}


def _expect_decode(inputs: Mapping[str, Any]) -> dict[str, Any]:
    bits = inputs["bits"]
    if inputs["fraction_bits"] == 23:
        values: Any = bits.view(np.float32)
    elif inputs["fraction_bits"] == 10:
        values = bits.astype(np.uint16).view(np.float16)
    else:
        values = bits.astype(np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):
        values = values.astype(np.float64)
    # 0 and -0 compare as equal, and only their signs differ; a NaN's sign says nothing.
    return {"values": values, "signs": np.where(np.isnan(values), 1.0, np.copysign(1.0, values))}


def _decode_answer(
    bias: str = "2 ** (exponent_bits - 1) - 1",
    fraction: str = "(bits & 2**fraction_bits - 1) / 2**fraction_bits",
    sign: str = "-1.0 if bits >> (exponent_bits + fraction_bits) else 1.0",
    all_ones: str = "2**exponent_bits - 1",
    nan: str = 'sign * float("inf") if fraction == 0 else float("nan")',
    exponent: str = "bits >> fraction_bits & 2**exponent_bits - 1",
    top: bool = True,
    small: str = "fraction * 2.0 ** (1 - bias)",
    normal: str = "(1 + fraction) * 2.0 ** (exponent - bias)",
    subnormal: str = "sign * {small}",
) -> str:
    infinite = f"""    if exponent == {all_ones}:
        return {nan}
"""
    return f"""def decode(bits, exponent_bits, fraction_bits):
    bias = {bias}
    fraction = {fraction}
    exponent = {exponent}
    sign = {sign}
{infinite if top else ""}    if exponent == 0:
        return {subnormal.format(small=small)}
    return sign * {normal}
"""


_DECODE = Exercise(
    id="02.1",
    title="a pattern as a number",
    answer="decode",
    kind="function",
    arguments=("bits", "exponent_bits", "fraction_bits"),
    cases=_decode_cases,
    run=_run_decode,
    expected=_expect_decode,
    points={"small": 1, "awkward": 1},
    hints=Hints(
        question="Take the first number of {case} that differs. Write its bits in three groups: sign, exponent, fraction. "
        "Which row of the table in the text does it belong to?",
        rule="Cut the pattern from the right. The lowest fraction_bits bits, divided by 2^fraction_bits, are f. The "
        "exponent_bits bits above them are e: shift down, then mask, so that the sign does not come along. The top bit "
        "is the sign. The bias is half of the exponents, less one: 2^(exponent_bits - 1) - 1.\n\n"
        "By hand, 0xC0D0 = 1 10000001 1010000 in bfloat16: s = 1, e = 129, f = 80/128 = 0.625. The bias is 127, and so "
        "it is -(1.625) x 2^2 = -6.5.",
        code="""bias = 2 ** (____) - 1
fraction = (bits & ____) / 2**fraction_bits
exponent = bits >> ____ & ____
sign = -1.0 if ____ else 1.0
if exponent == 2**exponent_bits - 1:
    return sign * float("inf") if ____ else float("nan")
if exponent == 0:
    return sign * fraction * 2.0 ** ____
return sign * (1 + fraction) * 2.0 ** ____""",
    ),
    mistakes=(
        Mistake(
            "float16's bias for every format",
            _decode_answer(bias="15"),
            "15 is the bias of float16, which has 5 exponent bits. With 8 of them it is 127: the bias lies in the middle of "
            "what the exponent bits can hold.",
            "Which pattern is the number 1.0 in bfloat16, and what is its exponent field?",
        ),
        Mistake(
            "bfloat16's sizes for every format",
            _decode_answer(bias="127"),
            "127 is the bias for 8 exponent bits, and 255 is where they are all ones. With 5 exponent bits the two are 15 and "
            "31: compute them from exponent_bits.",
            "What is the bias of float16?",
            variants=(
                _decode_answer(all_ones="255"),
                _decode_answer(all_ones="0xFF", bias="127"),
            ),
        ),
        Mistake(
            "no bias taken away",
            _decode_answer(normal="(1 + fraction) * 2.0 ** exponent"),
            "The field holds the power of two *plus* the bias, so that it is never negative. Take the bias away again.",
            "The exponent field of 1.0 is 127 in bfloat16. Which power of two is meant?",
        ),
        Mistake(
            "the exponent's mask with a single bit",
            _decode_answer(exponent="bits >> fraction_bits & 2 ** (exponent_bits - 1)"),
            "2^(E - 1) has a single bit. A mask for E bits is 2^E - 1: E ones.",
            "What are 2**8 - 1 and 2**(8 - 1) in binary?",
        ),
        Mistake(
            "the sign always in bit 15",
            _decode_answer(sign="-1.0 if bits >> 15 else 1.0"),
            "With 16 bits the sign is bit 15, and with 32 it is bit 31: above exponent and fraction, exponent_bits + "
            "fraction_bits from the right.",
            "How many bits has this format, and which of them is the top one?",
            variants=(_decode_answer(sign="-1.0 if bits & 0x8000 else 1.0"),),
        ),
        Mistake(
            "bias one too large",
            _decode_answer(bias="2 ** (exponent_bits - 1)"),
            "Half of 2^8 is 128, and the bias is one less: 127. With 128 every number comes out at half of its size.",
            "Which power of two should the exponent field 127 stand for in bfloat16?",
        ),
        Mistake(
            "the fraction not divided",
            _decode_answer(fraction="bits & 2**fraction_bits - 1"),
            "The fraction bits stand *behind* the point: as an integer they count in steps of 2^-fraction_bits.",
            "What is the largest f that the formula can mean, and what is yours?",
        ),
        Mistake(
            "the fraction's mask one bit too short",
            _decode_answer(fraction="(bits & 2**(fraction_bits - 1)) / 2**fraction_bits"),
            "2^(F - 1) has a single bit. A mask for the lowest F bits is 2^F - 1: F ones. (In Python ** comes before -, and - "
            "before &.)",
            "What are 2**7 - 1 and 2**(7 - 1) in binary?",
            variants=(
                _decode_answer(fraction="(bits & 2**(fraction_bits - 1) - 1) / 2**fraction_bits"),
                _decode_answer(fraction="(bits & 2**fraction_bits) / 2**fraction_bits"),
            ),
        ),
        Mistake(
            "the hidden one forgotten",
            _decode_answer(normal="fraction * 2.0 ** (exponent - bias)"),
            "A normal number begins with a 1 in front of the binary point, and this 1 is not stored. The value is "
            "(1 + f), not f.",
            "All fraction bits of 1.0 are zero. Where does its value come from?",
        ),
        Mistake(
            "subnormal numbers read as normal ones",
            _decode_answer(
                small="(1 + fraction) * 2.0 ** (exponent - bias)",
            ),
            "Where the exponent field is 0 there is no hidden 1: else there would be no way to write 0.",
            "What does your function make of the pattern 0?",
        ),
        Mistake(
            "all subnormal numbers read as 0",
            _decode_answer(subnormal="0.0"),
            "An exponent field of 0 means zero only where the fraction is 0 too. With any other fraction it is a small number: "
            "f times 2^(1 - bias).",
            "What does the second row of the table give for f = 0, and what for f = 1/128?",
            variants=(_decode_answer(subnormal="sign * 0.0"),),
        ),
        Mistake(
            "the sign forgotten",
            _decode_answer(sign="1.0"),
            "The top bit is the sign: 1 is for minus.",
            "Which of the four numbers are negative, and how do you see that in their bits?",
        ),
        Mistake(
            "the sign forgotten for subnormal numbers",
            _decode_answer(subnormal="{small}"),
            "Every row of the table begins with (-1)^s, that of zero and subnormal numbers as well.",
            "What is the top bit of 0x8001?",
        ),
        Mistake(
            "-0 read as 0",
            _decode_answer(subnormal="0.0 if fraction == 0 else sign * {small}"),
            "There are two zeros. They compare as equal, and 1 / x is infinity for the one and minus infinity for the other. "
            "The second row of the table gives both, with no case of its own.",
            "What is the top bit of 0x8000?",
        ),
        Mistake(
            "the sign of infinity forgotten",
            _decode_answer(nan='float("inf") if fraction == 0 else float("nan")'),
            "There are two infinities, and the top bit says which: 0xFF80 is minus infinity.",
            "What is the top bit of 0xFF80?",
        ),
        Mistake(
            "NaN read as infinity",
            _decode_answer(nan='sign * float("inf")'),
            "Exponent bits that are all ones mean infinity only where the fraction is 0. With any other fraction it is NaN.",
            "What is the fraction of 0x7FC0?",
        ),
        Mistake(
            "infinity and NaN exchanged",
            _decode_answer(nan='sign * float("inf") if fraction else float("nan")'),
            "It is the fraction of 0 that means infinity, and any other that means NaN.",
            "What is the fraction of 0x7F80, and what does the table say of it?",
            variants=(_decode_answer(nan='float("nan")'),),
        ),
        Mistake(
            "subnormal numbers at half their size",
            _decode_answer(small="fraction * 2.0 ** (0 - bias)"),
            "Subnormal numbers have the exponent of the smallest normal ones, 1 - bias. So the steps between numbers go on "
            "evenly down to 0.",
            "The largest subnormal number and the smallest normal one are neighbours. How far apart are yours?",
        ),
        Mistake(
            "infinity and NaN read as numbers",
            _decode_answer(top=False),
            "The highest exponent is not for numbers. With a fraction of 0 it means infinity, with any other NaN.",
            "What does your function make of a pattern whose exponent bits are all ones?",
        ),
        Mistake(
            "the sign left in the exponent",
            _decode_answer(exponent="bits >> fraction_bits"),
            "Shifting down removes the fraction and keeps the sign above the exponent: negative numbers get an exponent that "
            "is 2^exponent_bits too large. Mask it off.",
            "For -1.0, which bits are left after the shift?",
        ),
    ),
)


# ---------------- 02.2: widening


def _widen_cases(rng: np.random.Generator) -> list[Case]:
    return [
        Case("4 numbers", {"u": np.array([0x3F80, 0x4049, 0xC0D0, 0x3E20], np.uint16)}, "small"),
        Case("all 65,536 patterns, shape (256, 256)", {"u": _ALL.reshape(256, 256).copy()}, "awkward"),
        Case("no number at all, shape (0, 3)", {"u": np.zeros((0, 3), np.uint16)}, "awkward"),
    ]


def _run_widen(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    got = np.asarray(answer(inputs["u"]))
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        values = got.astype(np.float64)
    return {"dtype": str(got.dtype), "shape": list(got.shape), "values": values}


def _expect_widen(inputs: Mapping[str, Any]) -> dict[str, Any]:
    with np.errstate(invalid="ignore"):
        values = inputs["u"].view(ml_dtypes.bfloat16).astype(np.float64)
    return {"dtype": "float32", "shape": list(values.shape), "values": values}


def _widen_answer(body: str) -> str:
    return f"def bf16_to_float(u):\n    u = np.asarray(u)\n    return {body}\n"


_WIDEN = Exercise(
    id="02.2",
    title="from 16 bits to 32",
    answer="bf16_to_float",
    kind="function",
    arguments=("u",),
    cases=_widen_cases,
    run=_run_widen,
    expected=_expect_widen,
    points={"small": 1, "awkward": 1},
    makes={"bf16_to_float": "bf16_to_float"},
    file="bf16_to_float.py",
    hints=Hints(
        question="Take {case}. 1.0 is 0x3F80 in bfloat16. Which 32 bits are 1.0 in float32, and how many bits does your "
        "array have room for at the moment of the shift?",
        rule="Three steps, each on the whole array: make room (astype to 32 bits without sign), move the bits up by 16, and "
        "read the same bits as float32 (view, not astype: astype would convert the value).\n\n"
        "By hand: 0x3F80 -> 0x00003F80 -> 0x3F800000, which read as a float32 is 1.0.",
        code="(u.astype(____) << ____).____(np.float32)",
    ),
    mistakes=(
        Mistake(
            "shifted while there are only 16 bits",
            _widen_answer("(u << np.uint16(16)).astype(np.uint32).view(np.float32)"),
            "A uint16 has no bit 16 and above: everything is shifted out, and zeros are left. Make room first, then shift. "
            "(C++ would widen by itself; NumPy keeps the dtype.)",
            "What is the dtype of `u << 16` in NumPy?",
            variants=(
                _widen_answer("(u << 16).view(np.float32)"),
                _widen_answer("(u << 16).astype(np.uint32).view(np.float32)"),
                _widen_answer("(u << 16).astype(np.float32)"),
            ),
        ),
        Mistake(
            "two numbers read as one",
            _widen_answer("u.view(np.float32)"),
            "view keeps the bits and reads them in larger pieces: two numbers of 16 bits become one of 32, and the result has "
            "half as many elements. Each number must get 32 bits of its own: astype.",
            "How many elements has u, and how many has your result?",
            variants=(
                _widen_answer("(u.view(np.uint32) << 16).view(np.float32)"),
                _widen_answer("u.view(np.uint32).view(np.float32)"),
                _widen_answer("u.view(np.uint32) << 16"),
            ),
        ),
        Mistake(
            "room for 64 bits",
            _widen_answer("(u.astype(np.uint64) << 16).view(np.float32)"),
            "A float32 has 32 bits. Of 64 bits, view makes two numbers, and the result has twice as many elements.",
            "How many elements has u, and how many has your result?",
        ),
        Mistake(
            "the bits given back as integers",
            _widen_answer("u.astype(np.uint32) << 16"),
            "The bits are right. What is missing is that they are read as float32: view.",
            "What is the dtype of your result?",
        ),
        Mistake(
            "the fraction's bits shifted by another number",
            _widen_answer("(u.astype(np.uint32) << 8).view(np.float32)"),
            "From 16 bits to 32 there are 16 to move, so that the sign comes to the top.",
            "How many bits lie above the sign of your result?",
        ),
        Mistake(
            "the number of the pattern instead of its bits",
            _widen_answer("u.astype(np.float32)"),
            "astype converts a value: the pattern 0x3F80 becomes the number 16,256.0. You want the same bits, read in another "
            "way: view.",
            "Your first result is 16,256. Which pattern is that in hexadecimal?",
        ),
        Mistake(
            "read as float16",
            _widen_answer("u.view(np.float16).astype(np.float32)"),
            "float16 is another format: 5 exponent bits and 10 of fraction. bfloat16 has float32's 8 exponent bits, and that "
            "is why a shift is enough.",
            "How many exponent bits does np.float16 have, and how many has bfloat16?",
        ),
        Mistake(
            "put into the lower half",
            _widen_answer("u.astype(np.uint32).view(np.float32)"),
            "Sign and exponent of a float32 lie at the top. Bits that stay in the lower half are the end of its fraction, "
            "and such a number is tiny.",
            "Where in the 32 bits of a float32 is its sign?",
        ),
        Mistake(
            "converted where the bits should only be read anew",
            _widen_answer("(u.astype(np.uint32) << 16).astype(np.float32)"),
            "The bits are right, and astype then turns the integer 0x3F800000 into the float 1,065,353,216. view reads "
            "the bits as they are.",
            "Which of astype and view changes bits?",
            variants=(_widen_answer("u.astype(np.float32) * 65536"),),
        ),
    ),
)


# ---------------- 02.3: ties by hand

_BY_HAND = {
    "tie_low": 1 + 1 / 256,
    "tie_high": 1 + 3 / 256,
    "just_above": 1 + 1 / 256 + 2**-23,
    "negative_tie": -(1 + 3 / 256),
    "nearly_two": 2 - 2**-23,
    "largest": float(np.uint32(_FLT_MAX).view(np.float32)),
}


def _tie_cases(rng: np.random.Generator) -> list[Case]:
    return [
        Case("two ties", {"names": ["tie_low", "tie_high"]}, "small"),
        Case("just above a tie", {"names": ["just_above"]}, "small"),
        Case("a tie below zero", {"names": ["negative_tie"]}, "awkward"),
        Case("the last float32 below 2", {"names": ["nearly_two"]}, "awkward"),
        Case("FLT_MAX", {"names": ["largest"]}, "awkward"),
    ]


# What to think of where one of them is wrong; no more than the rule, put for this number.
_THINK = {
    "tie_low": "It lies exactly between two patterns: which of them ends in a 0 bit?",
    "tie_high": "It lies exactly between two patterns: which of them ends in a 0 bit?",
    "just_above": "Is it exactly in the middle, or a little nearer to one of its neighbours?",
    "negative_tie": "The sign is a bit of its own, and the rule for ties looks at the last bit: the neighbours are those "
    "of tie_high, with the sign set.",
    "nearly_two": "It is 2^-23 away from 2, and nearly 1/128 from the last bfloat16 below 2.",
    "largest": "Its lower half is 0xFFFF, so the pattern above is nearer. Which number has that pattern is another matter.",
}


def _run_ties(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from tinyvllm_ref.course.lab import WrongAnswerType

    if not isinstance(answer, dict):
        what = type(answer).__name__
        raise WrongAnswerType(
            f'`rounded` is a {what}; a dict of six patterns is wanted: {{"tie_low": 0x____, ...}}'
        )
    return {name: answer[name] for name in inputs["names"] if name in answer}


def _expect_nothing(inputs: Mapping[str, Any]) -> dict[str, Any]:
    # A report shows what was expected, and that would be the answer: `_verify_ties` compares.
    return {}


def _verify_ties(inputs: Mapping[str, Any], outputs: dict[str, Any], observed: Any) -> str | None:
    for name in inputs["names"]:
        if name not in outputs:
            return f"`{name}` is missing: the dict has six entries, with the names of the table"
        got, wanted = outputs[name], int(_rounded_bits(_BY_HAND[name]))
        if isinstance(got, str):
            return f"`{name}` is {got!r}, a string; write the pattern as a number, without quotes: 0x1234"
        if isinstance(got, float):
            return f"`{name}` is {got!r}, the number itself; its pattern of 16 bits is wanted, such as 0x1234"
        if not isinstance(got, int) or isinstance(got, bool) or not 0 <= got < 1 << 16:
            return f"`{name}` is {got!r}; it must be a pattern of 16 bits, such as 0x1234"
        if got != wanted:
            off = got - wanted
            where = "the next pattern below" if off == -1 else "the next pattern above" if off == 1 else "off"
            return (
                f"`{name}` is 0x{got:04X}, and that is {where} the right one"
                + ("" if abs(off) == 1 else f" by {abs(off):,} patterns")
                + f". {_THINK[name]}"
            )
    return None


def _ties_answer(*bits: int) -> str:
    body = ", ".join(f'"{name}": 0x{value:04X}' for name, value in zip(_BY_HAND, bits, strict=True))
    return f"rounded = {{{body}}}\n"


_TIES = Exercise(
    id="02.3",
    title="six numbers by hand",
    answer="rounded",
    kind="value",
    cases=_tie_cases,
    run=_run_ties,
    expected=_expect_nothing,
    verify=_verify_ties,
    points={"small": 1, "awkward": 1},
    hints=Hints(
        question="Take {case}. Between which two bfloat16 numbers does it lie, and what are their patterns? Near 1 they are "
        "1/128 apart.",
        rule="Name the two neighbours. If one is nearer, it is the answer. If the number lies exactly between them, take the "
        "one whose pattern ends in a 0 bit. Patterns go on evenly: after the last one below 2 comes 2 itself, and after the "
        "largest finite one comes infinity, 0x7F80.\n\n"
        "By hand: 1 + 5/256 lies between 1 + 2/128 = 0x3F82 and 1 + 3/128 = 0x3F83, right in the middle. 0x3F82 ends in a "
        "0 bit.",
        code='rounded = {\n    "tie_low": 0x3F8____,\n    "tie_high": 0x3F8____,\n    "just_above": 0x3F8____,\n'
        '    "negative_tie": 0xBF8____,\n    "nearly_two": 0x____,\n    "largest": 0x____,\n}',
    ),
    mistakes=(
        Mistake(
            "cut off instead of rounded",
            _ties_answer(0x3F80, 0x3F81, 0x3F80, 0xBF81, 0x3FFF, 0x7F7F),
            "These are the upper 16 bits as they stand. That always goes toward zero, however near the next number is.",
            "How far is 2 - 2^-23 from 2, and how far from the last bfloat16 below 2?",
        ),
        Mistake(
            "every tie away from zero",
            _ties_answer(0x3F81, 0x3F82, 0x3F81, 0xBF82, 0x4000, 0x7F80),
            "This is school rounding: a half goes up. Nearest-even sends a tie to the neighbour whose last bit is 0, so that "
            "ties go up as often as down.",
            "Which of the two neighbours of 1 + 1/256 has a 0 as its last bit?",
        ),
        Mistake(
            "every tie toward zero",
            _ties_answer(0x3F80, 0x3F81, 0x3F81, 0xBF81, 0x4000, 0x7F80),
            "A tie goes to the neighbour whose last bit is 0, and that can be the larger one.",
            "Which of the two neighbours of 1 + 3/256 has a 0 as its last bit?",
        ),
        Mistake(
            "the carry lost",
            _ties_answer(0x3F80, 0x3F82, 0x3F81, 0xBF82, 0x3F80, 0x7F00),
            "When all fraction bits are ones and one is added, they become zeros and a 1 is carried into the exponent. "
            "Here it was dropped, and 2 - 2^-23 became 1.",
            "What comes after 0x3FFF when you count on?",
        ),
        Mistake(
            "too large becomes the largest finite number",
            _ties_answer(0x3F80, 0x3F82, 0x3F81, 0xBF82, 0x4000, 0x7F7F),
            "FLT_MAX is nearer to where the next step would be than to the largest finite bfloat16, and what is there "
            "is infinity. Rounding does not stop at the end.",
            "The upper 16 bits of FLT_MAX are 0x7F7F and the lower ones 0xFFFF. Is that more or less than half a step?",
        ),
        Mistake(
            "just above a tie, taken for a tie",
            _ties_answer(0x3F80, 0x3F82, 0x3F80, 0xBF82, 0x4000, 0x7F80),
            "Only a number *exactly* in the middle is a tie. This one is 2^-23 above it, so the neighbour above is nearer, "
            "whatever its last bit is.",
            "How far is 1 + 1/256 + 2^-23 from 1, and how far from 1 + 1/128?",
        ),
        Mistake(
            "a tie below zero rounded toward zero",
            _ties_answer(0x3F80, 0x3F82, 0x3F81, 0xBF81, 0x4000, 0x7F80),
            "Ties go to the pattern that ends in a 0 bit, below zero as well as above: the sign is a bit of its own. 0xBF81 "
            "ends in a 1.",
            "Which two patterns are the neighbours of -(1 + 3/256), and what is the last bit of each?",
        ),
        Mistake(
            "the sign left out",
            _ties_answer(0x3F80, 0x3F82, 0x3F81, 0x3F82, 0x4000, 0x7F80),
            "0x3F82 is a positive number. The top bit is the sign: with it, 3F becomes BF.",
            "What is the top bit of your pattern?",
        ),
        Mistake(
            "just below 2, cut off",
            _ties_answer(0x3F80, 0x3F82, 0x3F81, 0xBF82, 0x3FFF, 0x7F80),
            "0x3FFF is the last bfloat16 *below* 2, and nearly 1/128 away. 2 is 2^-23 away, and it has a pattern: the next.",
            "What comes after 0x3FFF when you count on, and which number is it?",
        ),
        Mistake(
            "a NaN in place of infinity",
            _ties_answer(0x3F80, 0x3F82, 0x3F81, 0xBF82, 0x4000, 0x7FFF),
            "After 0x7F7F comes 0x7F80, exponent all ones and fraction 0: infinity. Any other fraction there means NaN.",
            "What comes after 0x7F7F when you count on?",
        ),
    ),
)


# ---------------- 02.4: rounding, in NumPy


def _round_cases(rng: np.random.Generator) -> list[Case]:
    top = rng.integers(0, 0x7F80, 300, dtype=np.uint32) << 16
    signs = rng.integers(0, 2, 300, dtype=np.uint32) << 31
    ties = np.concatenate([signs | top | low for low in (0x7FFF, 0x8000, 0x8001)])
    specials = np.array(
        [0, 1 << 31, 1, 0x80000001, 0x7FFFFF, _FLT_MAX, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F800000, 0xFF800000],
        np.uint32,
    )
    many = rng.integers(0, 1 << 32, (1000, 1000), dtype=np.uint32)
    return [
        Case(
            "5 numbers", {"float_bits": _wide([1.0, np.pi, -2.718281828, 0.1, 1 + 1 / 128 + 2**-9])}, "small"
        ),
        Case("a thousand around 1", {"float_bits": _wide(rng.standard_normal(1000))}, "small"),
        Case("900 ties and their neighbours", {"float_bits": ties}, "awkward"),
        Case("zeros, subnormals, infinities, FLT_MAX", {"float_bits": specials}, "awkward"),
        Case("no number at all, shape (2, 0)", {"float_bits": np.zeros((2, 0), np.uint32)}, "awkward"),
        Case("NaNs", {"float_bits": np.array(_NANS, np.uint32)}, "nan"),
        Case("a million random patterns, shape (1000, 1000)", {"float_bits": many}, "nan"),
    ]


def _run_round(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    got = np.asarray(answer(inputs["float_bits"].view(np.float32)))
    bits = got
    if got.dtype == np.uint16:  # every NaN is a right answer for a NaN
        bits = np.where((got & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), got)
    return {"dtype": str(got.dtype), "shape": list(got.shape), "bits": bits}


def _expect_round(inputs: Mapping[str, Any]) -> dict[str, Any]:
    bits = _rounded_bits(inputs["float_bits"].view(np.float32))
    return {"dtype": "uint16", "shape": list(bits.shape), "bits": bits}


def _round_answer(
    rounded: str = "(bits + 0x7FFF + (bits >> 16 & 1)) >> 16",
    is_nan: str = "(bits & 0x7FFFFFFF) > 0x7F800000",
    result: str = "np.where(is_nan, bits >> 16 | 0x40, rounded)",
    dtype: str = ".astype(np.uint16)",
) -> str:
    return f"""def float_to_bf16(x):
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = {rounded}
    is_nan = {is_nan}
    return {result}{dtype}
"""


_SAYS_TRUNCATED = (
    "The lower 16 bits are thrown away, whatever they say. That always goes toward zero: the error is up to a whole step "
    "instead of half a step, and all errors point the same way."
)
_SAYS_HALF_UP = (
    "Adding 0x8000 sends every tie away from zero. Half of them must go the other way: to the neighbour whose last bit "
    "is 0."
)
_SAYS_NAN = (
    "Some NaNs have so many ones that adding carries into the sign and beyond (0x7FFFFFFF becomes -0), and some so few "
    "that only an infinity is left (0x7F800001). A NaN must be set apart before rounding."
)
_SAYS_SIGN = (
    "The top bit makes every negative number larger than 0x7F800000, if bits are compared without sign, and so each of "
    "them becomes a NaN. Mask the sign off before the comparison."
)
_SAYS_CARRY = (
    "The rounded fraction was put back under the old exponent. Where all fraction bits are ones, rounding up must carry "
    "into the exponent: just under 2 became 1 instead of 2."
)

_SAYS_INFINITY = (
    "0x7F800000 itself is infinity, and it must stay so. NaNs are the patterns *above* it: >, not >=."
)
_SAYS_ORDER = (
    "+ comes before >> and >> before &, in C++ as in Python. So everything in front of >> is added up first and then shifted, "
    "and what is left is cut to a single bit. The last bit that stays needs brackets: (bits >> 16 & 1)."
)
_SAYS_LOW_NAN = (
    "NaNs are set apart and cut off. If all the ones of the fraction were in the lower half, an infinity is left. Set one of "
    "the fraction bits that stay."
)
_SAYS_TO_ZERO = (
    "0x7FFF alone carries for everything above a tie and for no tie. A tie under an odd last bit must go up: add that bit as "
    "well, bit 16 of the float32. (Bit 0 is of no use: it is 0 in every tie.)"
)

_ROUND = Exercise(
    id="02.4",
    title="round to nearest even",
    answer="float_to_bf16",
    kind="function",
    arguments=("x",),
    cases=_round_cases,
    run=_run_round,
    expected=_expect_round,
    points={"small": 1, "awkward": 2, "nan": 1},
    makes={"float_to_bf16": "float_to_bf16"},
    file="float_to_bf16.py",
    hints=Hints(
        question="Take {case}. What are the lower 16 bits of the first number that differs: below 0x8000, above it, or "
        "exactly 0x8000? And is the last bit that stays a 0 or a 1?",
        rule="Read the float32 as uint32. Add 0x7FFF and the last bit that stays (bit 16), then shift down by 16: a carry "
        "comes out of the lower half exactly when the number must go up. NaNs (bits without the sign above 0x7F800000) "
        "get their own line: shift down, and set a fraction bit, so that some bit is left.\n\n"
        "By hand: 1 + 3/256 = 0x3F818000. Bit 16 is 1. 0x3F818000 + 0x7FFF + 1 = 0x3F820000, and the answer is 0x3F82.",
        code="""bits = np.asarray(x, np.float32).view(____)
rounded = (bits + ____ + (bits >> 16 & ____)) >> 16
is_nan = (bits & ____) > 0x7F800000
return np.where(is_nan, bits >> 16 | ____, rounded).astype(np.uint16)""",
    ),
    mistakes=(
        Mistake(
            "truncated",
            _round_answer(rounded="bits >> 16"),
            _SAYS_TRUNCATED,
            "The lower half of a number is 0xFFFF. Which of its two neighbours is nearer?",
        ),
        Mistake(
            "ties away from zero",
            _round_answer(rounded="(bits + 0x8000) >> 16"),
            _SAYS_HALF_UP,
            "Take 0x3F808000. Which neighbour has an even pattern, and which do you give?",
            variants=(
                _round_answer(rounded="(bits + 0x7FFF + 1) >> 16"),
                _round_answer(rounded="(bits + 0x7FFF + (bits >> 15 & 1)) >> 16"),
            ),
        ),
        Mistake(
            "ties toward zero",
            _round_answer(rounded="(bits + 0x7FFF) >> 16"),
            _SAYS_TO_ZERO,
            "Take 0x3F818000. Which neighbour has an even pattern, and which do you give?",
            variants=(_round_answer(rounded="(bits + 0x7FFF + (bits & 1)) >> 16"),),
        ),
        Mistake(
            "NaN rounded like a number",
            _round_answer(result="rounded"),
            _SAYS_NAN,
            "What is 0x7F800001 + 0x7FFF, and what is left of it above bit 16?",
        ),
        Mistake(
            "a NaN with only low bits becomes infinity",
            _round_answer(result="np.where(is_nan, bits >> 16, rounded)"),
            _SAYS_LOW_NAN,
            "The fraction of 0x7F800001 is a single 1. Is it among the bits that stay?",
        ),
        Mistake(
            "sign not masked in the NaN test",
            _round_answer(is_nan="bits > 0x7F800000"),
            _SAYS_SIGN,
            "Is the pattern of -1.0, read as an unsigned number, larger or smaller than 0x7F800000?",
            variants=(
                _round_answer(is_nan="bits > 0x7F800000", result="np.where(is_nan, 0x7FC0, rounded)"),
                _round_answer(is_nan="bits >= 0x7F800000"),
                _round_answer(is_nan="bits >= 0x7F800000", result="np.where(is_nan, 0x7FC0, rounded)"),
            ),
        ),
        Mistake(
            "infinity taken for a NaN",
            _round_answer(is_nan="(bits & 0x7FFFFFFF) >= 0x7F800000"),
            _SAYS_INFINITY,
            "Which number has the pattern 0x7F800000, and what do you make of it?",
        ),
        Mistake(
            "the sum shifted before the last bit is cut out",
            _round_answer(rounded="(bits + 0x7FFF + bits >> 16 & 1) >> 16"),
            _SAYS_ORDER,
            "In which order does Python do +, >> and &, where there are no brackets?",
            variants=(_round_answer(rounded="bits + 0x7FFF + bits >> 16 & 1"),),
        ),
        Mistake(
            "the two branches exchanged",
            _round_answer(result="np.where(is_nan, rounded, bits >> 16 | 0x40)"),
            "np.where(condition, a, b) takes a where the condition is true. Here the numbers got what is for the NaNs.",
            "What does np.where take where its condition is true: the second argument, or the third?",
        ),
        Mistake(
            "not shifted down",
            _round_answer(rounded="bits + 0x7FFF + (bits >> 16 & 1)"),
            "After the addition the result is in the upper half. astype(np.uint16) keeps the *lower* one, so shift down first.",
            "Where in the sum for 0x3F818000 is the result 0x3F82?",
        ),
        Mistake(
            "a value converted where its bits are wanted",
            _round_answer().replace(
                "    bits = np.asarray(x, np.float32).view(np.uint32)",
                "    with np.errstate(invalid='ignore'):\n        bits = np.asarray(x, np.float32).astype(np.uint32)",
            ),
            "astype(np.uint32) makes the integer 3 of 3.14. view gives the bits of the number. The stub's first line has it "
            "right.",
            "What are the bits of 1.0 in float32, and what is np.uint32(1.0)?",
        ),
        Mistake(
            "16 bits in an array of 32",
            _round_answer(dtype=""),
            "The values are right, and each takes 32 bits. The engine wants the patterns as uint16: astype at the end.",
            "What is the dtype of your result?",
            variants=(_round_answer(dtype=".astype(np.int64)"), _round_answer(dtype=".astype(np.int32)")),
        ),
        Mistake(
            "carry lost into the exponent",
            _round_answer(rounded="bits >> 16 & 0xFF80 | (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0x7F"),
            _SAYS_CARRY,
            "What should 0x3FFFFFFF become, and what is it in yours?",
        ),
        Mistake(
            "float16 instead of bfloat16",
            "def float_to_bf16(x):\n    with np.errstate(over='ignore', invalid='ignore'):\n"
            "        return np.asarray(x, np.float32).astype(np.float16).view(np.uint16)\n",
            "float16 has 5 exponent bits: above 65,504 there is only infinity, and the patterns mean something else. bfloat16 "
            "keeps float32's exponent.",
            "What is 1.0 in your format, and what is it in bfloat16?",
        ),
    ),
)


# ---------------- 02.5: the same in CUDA C++


def _device_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, u: Any, float_bits: Any, group: str) -> Case:
        return Case(
            label, {"u": np.asarray(u, np.uint16), "float_bits": np.asarray(float_bits, np.uint32)}, group
        )

    rounding = {one.label: one.inputs["float_bits"] for one in _round_cases(rng)}
    specials = rounding["zeros, subnormals, infinities, FLT_MAX"]
    return [
        case(
            "4 numbers each way",
            [0x3F80, 0x4049, 0xC0D0, 0x3E20],
            _wide([1.0, np.pi, -2.7182817, 0.1]),
            "small",
        ),
        case("a thousand each way", _ALL[0x3F00:0x42E8], rounding["a thousand around 1"], "small"),
        case(
            "zeros, infinities, FLT_MAX", [0, 0x8000, 0x7F80, 0xFF80, 1, 0x807F, 0x7F7F], specials, "awkward"
        ),
        case(
            "ties, and all 65,536 patterns widened",
            _ALL,
            rounding["900 ties and their neighbours"],
            "awkward",
        ),
        case("NaNs", [0x7FC0, 0x7F81, 0xFFFF], _NANS, "nan"),
        case(
            "1,000,000 random patterns",
            _ALL[:1000],
            rounding["a million random patterns, shape (1000, 1000)"].reshape(-1),
            "nan",
        ),
    ]


def _run_device(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import numpy as np

    text = (
        answer
        + """
extern "C" __global__ void widen(const bf16* u, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = bf16_to_float(u[i]);
}

extern "C" __global__ void narrow(const float* x, bf16* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = float_to_bf16(x[i]);
}
"""
    )
    u, x = inputs["u"], inputs["float_bits"].view(np.float32)
    wide, narrow = lab.output(len(u), np.float32), lab.output(len(x), np.uint16)
    grids = [(-(-len(array) // 256),) for array in (u, x)]
    lab.cp.RawKernel(text, "widen")(grids[0], (256,), (lab.input("u", u), wide, np.int32(len(u))))
    lab.cp.RawKernel(text, "narrow")(grids[1], (256,), (lab.input("x", x), narrow, np.int32(len(x))))
    bits = lab.get(narrow)
    bits = np.where((bits & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), bits)  # any NaN is right for a NaN
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        floats = lab.get(wide).astype(np.float64)
    return {"bf16_to_float": floats, "float_to_bf16": bits}


def _expect_device(inputs: Mapping[str, Any]) -> dict[str, Any]:
    with np.errstate(invalid="ignore"):
        wide = inputs["u"].view(ml_dtypes.bfloat16).astype(np.float64)
    return {"bf16_to_float": wide, "float_to_bf16": _rounded_bits(inputs["float_bits"].view(np.float32))}


def _device_answer(
    widen: str = "__uint_as_float((unsigned)bits << 16)",
    nan: str = "if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (bf16)(bits >> 16 | 0x40u);",
    narrow: str = "(bf16)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)",
) -> str:
    return f'''BF16_CUDA = r"""
typedef unsigned short bf16;

__device__ __forceinline__ float bf16_to_float(bf16 bits) {{
    return {widen};
}}

__device__ __forceinline__ bf16 float_to_bf16(float x) {{
    unsigned bits = __float_as_uint(x);
    {nan}
    return {narrow};
}}
"""
'''


_DEVICE = Exercise(
    id="02.5",
    title="bf16 for every kernel to come",
    answer="BF16_CUDA",
    kind="source",
    cases=_device_cases,
    run=_run_device,
    expected=_expect_device,
    points={"small": 1, "awkward": 1, "nan": 1, "clean": 1},
    makes={"BF16_CUDA": "BF16_CUDA"},
    file="bf16.cu",
    hints=Hints(
        question="Take {case}. Which of the two functions is wrong, and does it fail on ordinary numbers, on ties or on "
        "NaNs?",
        rule="The same steps as in 02.2 and 02.4, for one number. __float_as_uint(x) gives a float's bits and "
        "__uint_as_float(u) reads bits as a float; neither converts anything. A plain cast, (float)bits, would. Write "
        "constants with u, so that everything stays unsigned.\n\n"
        "By hand: bf16_to_float(0x3F80) is __uint_as_float(0x3F800000u) = 1.0f.",
        code="""return __uint_as_float((unsigned)bits << ____);
...
unsigned bits = ____(x);
if ((bits & ____) > 0x7F800000u) return (bf16)(bits >> 16 | ____);
return (bf16)((bits + ____ + (bits >> 16 & 1u)) >> 16);""",
    ),
    mistakes=(
        Mistake(
            "truncation",
            _device_answer(narrow="(bf16)(bits >> 16)"),
            _SAYS_TRUNCATED,
            "The lower half of a number is 0xFFFF. Which of its two neighbours is nearer?",
        ),
        Mistake(
            "ties away from zero",
            _device_answer(narrow="(bf16)((bits + 0x8000u) >> 16)"),
            _SAYS_HALF_UP,
            "Take 0x3F808000. Which neighbour has an even pattern, and which do you give?",
        ),
        Mistake(
            "NaN rounded like a number",
            _device_answer(nan=""),
            _SAYS_NAN,
            "What is 0x7F800001 + 0x7FFF, and what is left of it above bit 16?",
        ),
        Mistake(
            "& after >",
            _device_answer(nan="if (bits & 0x7FFFFFFFu > 0x7F800000u) return (bf16)(bits >> 16 | 0x40u);"),
            "In C++, and not in Python, comparisons come before &: this is bits & (0x7FFFFFFF > 0x7F800000), that is bits & 1, "
            "and so every odd pattern is taken for a NaN. Put brackets around bits & 0x7FFFFFFFu.",
            "Which of & and > does C++ do first?",
            variants=(_device_answer(nan="if (bits & 0x7FFFFFFFu > 0x7F800000u) return (bf16)0x7FC0;"),),
        ),
        Mistake(
            "sign not masked in the NaN test",
            _device_answer(nan="if (bits > 0x7F800000u) return (bf16)0x7FC0;"),
            _SAYS_SIGN,
            "Is the pattern of -1.0, read as an unsigned number, larger or smaller than 0x7F800000?",
            variants=(
                _device_answer(nan="if (bits > 0x7F800000u) return (bf16)(bits >> 16 | 0x40u);"),
                _device_answer(nan="if (bits >= 0x7F800000u) return (bf16)(bits >> 16 | 0x40u);"),
                _device_answer(nan="if (bits > 0x7F800000u) return (bf16)(bits >> 16);"),
            ),
        ),
        Mistake(
            "infinity taken for a NaN",
            _device_answer(nan="if ((bits & 0x7FFFFFFFu) >= 0x7F800000u) return (bf16)(bits >> 16 | 0x40u);"),
            _SAYS_INFINITY,
            "Which number has the pattern 0x7F800000, and what do you make of it?",
        ),
        Mistake(
            "a NaN with only low bits becomes infinity",
            _device_answer(nan="if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (bf16)(bits >> 16);"),
            _SAYS_LOW_NAN,
            "The fraction of 0x7F800001 is a single 1. Is it among the bits that stay?",
        ),
        Mistake(
            "ties toward zero",
            _device_answer(narrow="(bf16)((bits + 0x7FFFu) >> 16)"),
            _SAYS_TO_ZERO,
            "Take 0x3F818000. Which neighbour has an even pattern, and which do you give?",
            variants=(_device_answer(narrow="(bf16)((bits + 0x7FFFu + (bits & 1u)) >> 16)"),),
        ),
        Mistake(
            "the sum shifted before the last bit is cut out",
            _device_answer(narrow="(bf16)((bits + 0x7FFFu + bits >> 16 & 1u) >> 16)"),
            _SAYS_ORDER,
            "In which order does C++ do +, >> and &, where there are no brackets?",
            variants=(_device_answer(narrow="(bf16)(bits + 0x7FFFu + bits >> 16 & 1u)"),),
        ),
        Mistake(
            "not shifted down",
            _device_answer(narrow="(bf16)(bits + 0x7FFFu + (bits >> 16 & 1u))"),
            "After the addition the result is in the upper half. The cast to bf16 keeps the *lower* one, so shift down first.",
            "Where in the sum for 0x3F818000 is the result 0x3F82?",
        ),
        Mistake(
            "a value converted where its bits are wanted",
            _device_answer().replace("__float_as_uint(x)", "(unsigned)x"),
            "(unsigned)x makes the integer 3 of 3.14f. __float_as_uint(x) gives the bits of the number. The stub's first line "
            "has it right.",
            "What are the bits of 1.0f, and what is (unsigned)1.0f?",
        ),
        Mistake(
            "the value converted to an integer",
            _device_answer(narrow="(bf16)x"),
            "(bf16)x converts the value: 3.14 becomes the integer 3, which is the pattern of a tiny number. "
            "__float_as_uint(x) gives the bits.",
            "Your result for pi is 3. Where does this number come from?",
        ),
        Mistake(
            "carry lost into the exponent",
            _device_answer(
                narrow="(bf16)((bits >> 16 & 0xFF80u) | ((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16 & 0x7Fu))"
            ),
            _SAYS_CARRY,
            "What should 0x3FFFFFFF become, and what is it in yours?",
        ),
        Mistake(
            "a cast converts the value",
            _device_answer(widen="(float)bits"),
            "(float)bits turns the pattern 0x3F80 into the number 16,256.0f. To read the same bits as a float, use "
            "__uint_as_float.",
            "Your result for 0x3F80 is 16,256. Where does this number come from?",
            variants=(_device_answer(widen="bits"),),
        ),
        Mistake(
            "shifted, then converted",
            _device_answer(widen="(float)((unsigned)bits << 16)"),
            "The 32 bits are right. The cast then converts the integer that they are: 0x3F800000 becomes 1,065,353,216. "
            "__uint_as_float reads the bits as they are.",
            "Your result for 0x3F80 is 1,065,353,216. Which integer is that in hexadecimal?",
            variants=(_device_answer(widen="(unsigned)bits << 16"),),
        ),
        Mistake(
            "put into the lower half",
            _device_answer(widen="__uint_as_float(bits)"),
            "The 16 bits must become the upper half of the float: sign and exponent lie at the top. Shift them up by 16.",
            "Where in the 32 bits of a float is its sign?",
        ),
    ),
)


# ---------------- the dial


def _keep_cuda(kept: int) -> str:
    """The two device functions, with the fraction rounded to `kept` bits."""
    drop = 23 - kept
    narrow = f"(bf16)((bits + {2 ** (drop - 1) - 1}u + (bits >> {drop} & 1u)) >> {drop} << {drop - 16})"
    return str(_namespace(_device_answer(narrow=narrow))["BF16_CUDA"])


def _namespace(source: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    exec(source, made)
    return made


def _keep_bits(bits: Any, kept: int) -> Any:
    """bfloat16 bits on the host, rounded to `kept` fraction bits."""
    drop = 7 - kept
    wide = bits.astype(np.uint32)
    return ((wide + 2 ** (drop - 1) - 1 + (wide >> drop & 1)) >> drop << drop).astype(np.uint16)


def _turned(own: Any, *, kept: int) -> dict[str, Any]:
    """Parts of an engine whose weights, activations and KV cache keep fewer fraction bits; with 7, as it is."""
    if kept == 7:
        return {}
    load = own.load_weights or load_weights

    def load_rounded(views: Any, config: Any) -> Any:
        weights = load(views, config)
        for array in weights.values():
            array.set(_keep_bits(array.get(), kept))
        return weights

    return {"BF16_CUDA": _keep_cuda(kept), "load_weights": load_rounded}


_DIAL = tuple(
    Setting(f"{kept} fraction bits", says, functools.partial(_turned, kept=kept))
    for kept, says in (
        (7, "bfloat16 as it is: a rounding is off by at most 1 part in 256."),
        (5, "At most 1 part in 64. Weights, activations and keys and values are all rounded so."),
        (3, "At most 1 part in 16: as many fraction bits as E4M3 has, a format of 8 bits."),
        (2, "At most 1 part in 8: as many as E5M2. Between 1 and 2 there are 1, 1.25, 1.5 and 1.75."),
    )
)


# ---------------- what is drawn and measured


def _picture(answer: Any, cp: Any) -> Any:
    """The error of the learner's rounding between 1 and 1 + 5/128, beside that of cutting off."""
    x = np.linspace(1, 1 + 5 / 128, 801, dtype=np.float32)

    def error(bits: Any) -> Any:
        wide = np.asarray(bits).astype(np.uint32) << np.uint32(16)
        return (wide.view(np.float32).astype(np.float64) - x) * 128

    figure = figures.error_lines(
        (x.astype(np.float64) - 1) * 128,
        {"your rounding": error(answer(x)), "cut off": error(x.view(np.uint32) >> np.uint32(16))},
        "(x - 1) in steps of 1/128",
        "error, in steps",
        title="What rounding does to a number",
        subtitle="Cutting off is wrong by up to a step, always downwards; rounding by half a step, either way. "
        "Dots: ties.",
    )
    ties = x[80::160]
    (axes,) = figure.axes
    axes.set_xticks(range(6))
    axes.plot(
        (ties.astype(np.float64) - 1) * 128, error(answer(x))[80::160], "o", color=look.INK, markersize=6
    )
    figure.alt_text += f" The {len(ties)} ties, marked with dots, are each off by half a step."
    return figure


def _make_narrow(n: int) -> Any:
    def make(answer: Any, cp: Any) -> Any:
        kernel = cp.RawKernel(
            answer
            + """
extern "C" __global__ void narrow(const float* x, bf16* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = float_to_bf16(x[i]);
}
""",
            "narrow",
        )
        x, out = cp.ones(n, np.float32), cp.empty(n, np.uint16)
        return lambda: kernel((-(-n // 256),), (256,), (x, out, np.int32(n)))

    return make


_LARGE, _SMALL = 1 << 26, 1 << 14
_WORK = Work(
    label=f"{_LARGE:,} numbers narrowed",
    make=_make_narrow(_LARGE),
    read_bytes=4 * _LARGE,
    write_bytes=2 * _LARGE,
    small=_make_narrow(_SMALL),
    small_read_bytes=4 * _SMALL,
    small_write_bytes=2 * _SMALL,
    small_label=f"{_SMALL:,} numbers narrowed",
)

LESSON = Lesson(
    number="02",
    slug="bf16_bits",
    title="The bits of BF16",
    part=1,
    minutes=60,
    exercises=(_DECODE, _WIDEN, _TIES, _ROUND, _DEVICE),
    engine=EngineCard(
        mistakes=(
            ("02.5", "truncation"),
            ("02.5", "sign not masked in the NaN test"),
        ),
        note="Your BF16_CUDA is pasted in front of every kernel. Your two NumPy functions serve checkpoints that are not "
        "BF16; tiny-stories is, so they did not run here.",
        dial=_DIAL,
        dial_title="Fewer fraction bits, everywhere in the engine",
    ),
    pictures={"02.4": _picture},
    works={"02.5": _WORK},
)
