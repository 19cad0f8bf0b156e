"""Lesson 03: text to token ids by byte-level BPE, and back, also token by token."""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tinyvllm_ref.checkpoint.names import REPOSITORY, resolve
from tinyvllm_ref.course import figures
from tinyvllm_ref.course.exercise import Case, EngineCard, Exercise, Hints, Lesson, Mistake
from tinyvllm_ref.tokenizer import _BYTE_OF, Tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

AWKWARD = (
    "A cat 🐈, a café and 雪.",
    "👩‍👩‍👧 family, 🇫🇷 flag, 👍🏽 thumb",
    "e\u0301 is not é, and a\u0308\u0323 has two marks",
    "   three spaces, then\ttabs\t\tand\n\n\nlines \n",
    "numbers 12345, 3.14 and ½, Ⅷ",
    "我们去森林里。森の中。숲속으로",
    "don't, it's, we'll, I'D, they’ve",
    "no\u00a0break, zero\u200bwidth, \u3000wide",
    "مرحبا שלום नमस्ते สวัสดี",
    "\x00\x07\x1b[0m control",
    "x = [i ** 2 for i in range(10)]  # code",
)


@functools.cache
def _tiny_text() -> str:
    return (resolve("tiny-stories") / "tokenizer.json").read_text(encoding="utf-8")


@functools.cache
def _tiny() -> dict[str, Any]:
    return dict(json.loads(_tiny_text()))


@functools.cache
def _small_text() -> str:
    """A tokenizer.json of another make: SmolLM2's pre-tokenizer, merges as strings, not every byte in the vocabulary."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    # One name begins like another, and the shorter one comes first.
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<|end|>", "<|end|>x"], show_progress=False)
    made.train_from_iterator([(REPOSITORY / "data" / "prompts.txt").read_text(encoding="utf-8")], trainer)
    made.add_tokens(["<name>"])
    settings = json.loads(made.to_str())
    settings["model"]["merges"] = [" ".join(pair) for pair in settings["model"]["merges"]]
    return json.dumps(settings)


@functools.cache
def _plain_text() -> str:
    """The same, without any added token."""
    settings = json.loads(_small_text())
    settings["added_tokens"] = []
    return json.dumps(settings)


@functools.cache
def _alphabet() -> tuple[str, ...]:
    """The 256 characters that stand for the bytes."""
    return tuple(symbol for symbol, _ in sorted(_BYTE_OF.items(), key=lambda pair: pair[1]))


# ---------------- 03.1: bytes as symbols


def _symbol_cases(rng: np.random.Generator) -> list[Case]:
    code_points = rng.integers(1, 0x3000, 300)
    return [
        Case("plain English", {"text": "Once upon a time"}, "small"),
        Case("a line break and a tab", {"text": "one\n\ttwo"}, "small"),
        Case("an accent", {"text": "café"}, "awkward"),
        Case("an emoji", {"text": "cat 🐈"}, "awkward"),
        Case("the soft hyphen, DEL and U+00A0", {"text": "\xad\x7f\xa0ÿ"}, "awkward"),
        Case("the list SYMBOLS itself", {"text": "", "looked_at": "SYMBOLS"}, "awkward"),
        Case("300 characters from everywhere", {"text": "".join(map(chr, code_points.tolist()))}, "awkward"),
    ]


def _run_symbols(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    if inputs.get("looked_at") == "SYMBOLS":  # no text has all bytes in it, and 03.5 needs all of them
        return {"SYMBOLS": list(answer.__globals__["SYMBOLS"])}
    return {"symbols": answer(inputs["text"])}


def _expect_symbols(inputs: Mapping[str, Any]) -> dict[str, Any]:
    if "looked_at" in inputs:
        return {"SYMBOLS": list(_alphabet())}
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {"symbols": "".join(piece for piece, _ in step.pre_tokenize_str(inputs["text"]))}


def _symbols_answer(
    printable: str = "[*range(33, 127), *range(161, 173), *range(174, 256)]",
    other: str = "chr(256 + others.index(byte))",
    text: str = 'text.encode("utf-8")',
    strip: str = "",
) -> str:
    return f"""def symbols_of_bytes():
    printable = {printable}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else {other} for byte in range(256)]

SYMBOLS = symbols_of_bytes()

def to_symbols(text):
    return "".join(SYMBOLS[byte] for byte in {text}){strip}
"""


_SYMBOLS = Exercise(
    id="03.1",
    title="bytes as symbols",
    answer="to_symbols",
    kind="function",
    arguments=("text",),
    cases=_symbol_cases,
    run=_run_symbols,
    expected=_expect_symbols,
    points={"small": 1, "awkward": 1},
    hints=Hints(
        question="Take {case}. How many bytes does the text have in UTF-8, and how many symbols did you give?",
        rule="text.encode('utf-8') gives the bytes. The printable ones (33 to 126, 161 to 172, 174 to 255) are their own "
        "symbol, chr(byte). The 68 others, in rising order, are chr(256), chr(257) and so on.\n\nBy hand: 0 is the first "
        "of the others, and so chr(256); 32, the space, is the 33rd (0 to 31 come before it), and so chr(288) = Ġ.",
        code="""printable = [*range(33, 127), *range(____, 173), *range(174, ____)]
others = [byte for byte in range(256) if byte not in printable]
return [chr(byte) if byte in printable else chr(256 + ____) for byte in range(256)]
...
return "".join(SYMBOLS[byte] for byte in ____)""",
    ),
    mistakes=(
        Mistake(
            "characters instead of bytes",
            _symbols_answer(text='text.encode("latin-1", errors="replace")'),
            "A character is not a byte: é is two of them in UTF-8, an emoji four. The vocabulary starts from 256 bytes, so that "
            "no text of any language can be outside of it.",
            "How many bytes is é in UTF-8, and which?",
        ),
        Mistake(
            "every byte moved up by 256",
            _symbols_answer(printable="[]"),
            "Printable bytes stand for themselves, so that 'the' in the vocabulary reads 'the'. Only the 68 others get a "
            "character from 256 on.",
            "Which symbol does the vocabulary have for the letter a?",
        ),
        Mistake(
            "256 plus the byte's own number",
            _symbols_answer(other="chr(256 + byte)"),
            "The others are numbered among themselves, without gaps: the space is byte 32, but byte 127 is the 34th of the "
            "others, not number 127.",
            "Which bytes come before 127 in the list of the others, and how many are they?",
        ),
        Mistake(
            "the soft hyphen kept as itself",
            _symbols_answer(printable="[*range(33, 127), *range(161, 256)]"),
            "Byte 173 is the soft hyphen, which most programs do not show. It is one of the others, and all that follow in the "
            "numbering depend on it.",
            "What does chr(173) look like?",
        ),
        Mistake(
            "spaces lost",
            _symbols_answer(text='text.replace(" ", "").encode("utf-8")'),
            "A space is a byte like any other, and its symbol is Ġ. Without it no text can be put together again.",
            "How would ' the' and 'the' be told apart?",
        ),
        Mistake(
            "looked up by the character's number",
            _symbols_answer().replace(
                'SYMBOLS[byte] for byte in text.encode("utf-8")', "SYMBOLS[ord(c)] for c in text"
            ),
            "ord gives the number of a character in Unicode, not a byte: for é it is 233, and for an emoji far above 255, "
            "where the list ends. Take the bytes of the text, text.encode('utf-8'): they are numbers from 0 to 255 already.",
            "How many elements has SYMBOLS, and what is ord of the character that fails?",
        ),
        Mistake(
            "the last of each range left out",
            _symbols_answer(printable="[*range(33, 126), *range(161, 172), *range(174, 255)]"),
            "range(33, 126) ends with 125. The bytes 126, 172 and 255 are printable too, so that the ranges are "
            "range(33, 127), range(161, 173) and range(174, 256). Every byte that is missing moves the numbering of the "
            "others.",
            "What is the last number that range(33, 126) gives?",
            variants=(
                _symbols_answer(printable="[*range(33, 126), *range(161, 173), *range(174, 256)]"),
                _symbols_answer(printable="[*range(33, 127), *range(161, 172), *range(174, 256)]"),
                _symbols_answer(printable="[*range(33, 127), *range(161, 173), *range(174, 255)]"),
            ),
        ),
        Mistake(
            "the text given back as it is",
            _symbols_answer().replace(
                'return "".join(SYMBOLS[byte] for byte in text.encode("utf-8"))', "return text"
            ),
            "SYMBOLS may be right, but to_symbols does not use it yet. There are two places to fill in: the list, and the "
            "function that goes through the bytes of a text.",
            "Where does your to_symbols look something up?",
        ),
        Mistake(
            "every byte as its own character",
            _symbols_answer(printable="range(256)"),
            "chr(byte) is right for the printable bytes. The 68 others get the characters from 256 on, and the first of the "
            "two places to fill in is still to be done.",
            "Which character is chr(32), and which symbol has the vocabulary for a space?",
        ),
    ),
)


# ---------------- 03.2: merges


def _merge_cases(rng: np.random.Generator) -> list[Case]:
    merges = _tiny()["model"]["merges"]

    def case(text: str, group: str, some: Any = None, label: str = "") -> Case:
        return Case(label or f"{text!r}", {"text": text, "merges": some or merges}, group)

    letters = "".join(rng.choice(list("etaoinshrdlu"), 60).tolist())
    return [
        case("low", "small", [["l", "o"], ["lo", "w"]], "'low' with the merges l+o, lo+w"),
        case("Ġthere", "small"),
        case("Ġforest", "small"),
        case("aaaaa", "awkward", [["a", "a"], ["aa", "aa"]], "'aaaaa' with the merges a+a, aa+aa"),
        case("abababc", "awkward", [["b", "c"], ["a", "b"], ["ab", "ab"]], "'abababc' with the merges b+c, a+b, ab+ab"),
        case("q", "awkward"),
        case("", "awkward", label="no symbol at all"),
        case(letters, "awkward", label="60 random letters"),
        case("Ġbreakfast", "awkward"),
    ]  # fmt: skip


def _run_merge(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    ranks = {tuple(pair): rank for rank, pair in enumerate(inputs["merges"])}
    return {"tokens": answer(list(inputs["text"]), ranks)}


def _expect_merge(inputs: Mapping[str, Any]) -> dict[str, Any]:
    pairs = [tuple(pair) for pair in inputs["merges"]]
    names = dict.fromkeys([*inputs["text"], *(part for pair in pairs for part in pair), *map("".join, pairs)])
    model = models.BPE(vocab={name: k for k, name in enumerate(names)}, merges=pairs)
    return {"tokens": [token.value for token in model.tokenize(inputs["text"])] if inputs["text"] else []}


def _merge_answer(
    choose: str = "min(pairs, key=ranks.get)",
    found: str = "index + 1 < len(symbols) and (symbols[index], symbols[index + 1]) == best",
    step: str = "2",
    again: str = "",
) -> str:
    return f"""from itertools import pairwise

def merge(symbols, ranks):
    while True:
        pairs = [pair for pair in pairwise(symbols) if pair in ranks]
        if not pairs:
            return symbols
        best = {choose}
        merged = []
        index = 0
        while index < len(symbols):
            if {found}:
                merged.append(symbols[index] + symbols[index + 1])
                index += {step}
            else:
                merged.append(symbols[index])
                index += 1
        symbols = merged
{again}"""


_LONGEST = """def merge(symbols, ranks):
    known = {left + right for left, right in ranks} | set(symbols)
    text, tokens = "".join(symbols), []
    while text:
        end = next(end for end in range(len(text), 0, -1) if text[:end] in known)
        tokens.append(text[:end])
        text = text[end:]
    return tokens
"""
_IN_ONE_PASS = """def merge(symbols, ranks):
    tokens = list(symbols)
    index = 0
    while index + 1 < len(tokens):
        if (tokens[index], tokens[index + 1]) in ranks:
            tokens[index : index + 2] = [tokens[index] + tokens[index + 1]]
        else:
            index += 1
    return tokens
"""

_FIRST_AGAIN = """def merge(symbols, ranks):
    tokens = list(symbols)
    while True:
        for index in range(len(tokens) - 1):
            if (tokens[index], tokens[index + 1]) in ranks:
                tokens[index : index + 2] = [tokens[index] + tokens[index + 1]]
                break
        else:
            return tokens
"""
_GREEDY_ROUND = """def merge(symbols, ranks):
    merged, index = [], 0
    while index < len(symbols):
        if tuple(symbols[index : index + 2]) in ranks:
            merged.append(symbols[index] + symbols[index + 1])
            index += 2
        else:
            merged.append(symbols[index])
            index += 1
    return merged
"""
_GREEDY_ROUNDS = """def merge(symbols, ranks):
    while True:
        merged, index = [], 0
        while index < len(symbols):
            if tuple(symbols[index : index + 2]) in ranks:
                merged.append(symbols[index] + symbols[index + 1])
                index += 2
            else:
                merged.append(symbols[index])
                index += 1
        if merged == symbols:
            return symbols
        symbols = merged
"""
_GROWING = """def merge(symbols, ranks):
    tokens = []
    for symbol in symbols:
        if tokens and (tokens[-1], symbol) in ranks:
            tokens[-1] += symbol
        else:
            tokens.append(symbol)
    return tokens
"""
_JOIN_ONE_PAIR = """        merged, index = [], 0
        while index < len(symbols):
            if tuple(symbols[index : index + 2]) == best:
                merged.append(symbols[index] + symbols[index + 1])
                index += 2
            else:
                merged.append(symbols[index])
                index += 1
        symbols = merged
"""
_OLD_PAIRS = (
    """from itertools import pairwise

def merge(symbols, ranks):
    pairs = [pair for pair in pairwise(symbols) if pair in ranks]
    for best in sorted(set(pairs), key=ranks.get):
"""
    + _JOIN_ONE_PAIR
    + "    return symbols\n"
)
_ONE_WALK_BY_RANK = (
    """def merge(symbols, ranks):
    for best in sorted(ranks, key=ranks.get):
"""
    + _JOIN_ONE_PAIR
    + "    return symbols\n"
)
_FIRST_PLACE = """from itertools import pairwise

def merge(symbols, ranks):
    pairs = [pair for pair in pairwise(symbols) if pair in ranks]
    if not pairs:
        return symbols
    best = min(pairs, key=ranks.get)
    index = list(pairwise(symbols)).index(best)
    return symbols[:index] + [symbols[index] + symbols[index + 1]] + symbols[index + 2 :]
"""
_OVERLAPPING = """from itertools import pairwise

def merge(symbols, ranks):
    while True:
        pairs = [pair for pair in pairwise(symbols) if pair in ranks]
        if not pairs:
            return symbols
        best = min(pairs, key=ranks.get)
        merged = [a + b if (a, b) == best else a for a, b in pairwise(symbols)]
        if tuple(symbols[-2:]) != best:
            merged.append(symbols[-1])
        symbols = merged
"""

_MERGE = Exercise(
    id="03.2",
    title="merge by rank",
    answer="merge",
    kind="function",
    arguments=("symbols", "ranks"),
    cases=_merge_cases,
    run=_run_merge,
    expected=_expect_merge,
    points={"small": 1, "awkward": 1},
    hints=Hints(
        question="Take {case}. List the pairs of neighbours that may be merged, each with its rank. Which one goes first?",
        rule="In each round: of all pairs of neighbours that have a rank, take the one with the lowest. Walk through the "
        "symbols from left to right and join this pair wherever it stands; a symbol that was joined is used up. Repeat until "
        "no pair of neighbours has a rank.\n\nBy hand, ababc with b+c (0) and a+b (1): b+c first: a b a bc. Then a+b: ab a bc. "
        "Nothing is left to merge.",
        code="""while True:
    pairs = [pair for pair in pairwise(symbols) if pair in ____]
    if not pairs: return symbols
    best = ____(pairs, key=____)
    merged, index = [], 0
    while index < len(symbols):
        if tuple(symbols[index : index + 2]) == best:
            merged.append(____); index += ____
        else:
            merged.append(symbols[index]); index += 1
    symbols = merged""",
    ),
    mistakes=(
        Mistake(
            "merged from left to right",
            _IN_ONE_PASS,
            "You take the first pair that can be merged. The order is that of the ranks, for so the merges were learnt: a pair "
            "further right may have to go first, and it changes what is left of it.",
            "Which pair of neighbours has the lowest rank, and did it go first?",
            variants=(_FIRST_AGAIN, _GREEDY_ROUND, _GREEDY_ROUNDS, _GROWING),
        ),
        Mistake(
            "new neighbours left out",
            _OLD_PAIRS,
            "You list the pairs once, and join them in order of rank. But each merge makes new neighbours, which were not "
            "in the list: from h e r comes he r. List the pairs anew in every round.",
            "After your first merge, which pairs of neighbours are there that were not there before?",
        ),
        Mistake(
            "the longest known token first",
            _LONGEST,
            "Taking the longest token that fits from the left is another algorithm (WordPiece does it). BPE merges by rank, and "
            "ends with other tokens here and there.",
            "Which merges would lead to your first token, and were they next in rank?",
        ),
        Mistake(
            "the highest rank first",
            _merge_answer(choose="max(pairs, key=ranks.get)"),
            "Rank 0 is the pair that was found most often, and it goes first. A low rank is a high priority.",
            "Which pair was learnt first: that of rank 0 or that of the last rank?",
        ),
        Mistake(
            "a symbol used twice",
            _merge_answer(step="1"),
            "When two symbols have been joined both are used up: go on behind them. With steps of one, aaa becomes aa aa a, and "
            "the text grows.",
            "Put your tokens together again. Is it the text?",
            variants=(_OVERLAPPING,),
        ),
        Mistake(
            "only one round",
            _merge_answer(again="        return symbols\n"),
            "One merge makes new neighbours, and these may be merged again. Go on until no pair has a rank.",
            "Does any pair of neighbours in your result have a rank?",
            variants=(_FIRST_PLACE,),
        ),
    ),
)


# ---------------- 03.3: a text


def _pieces(text: str) -> list[str]:
    """A text cut by GPT-2's expression."""
    step = pre_tokenizers.Split(tokenizers.Regex(GPT2), "isolated")
    return [piece for piece, _ in step.pre_tokenize_str(text)]


def _encode_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, text: str, group: str, model: Any = None, whole_first: bool = False) -> Case:
        model = model or _tiny()["model"]
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        inputs = {"text": text, "pieces": _pieces(text), "merges": merges, "vocab": model["vocab"]}
        return Case(label, {**inputs, "whole_first": whole_first}, group)

    # No merges lead to Ġtree or see; and the first of them would join two words.
    made = [["e", "Ġ"], ["t", "h"], ["r", "e"], ["th", "e"], ["Ġ", "the"]]
    tokens = [*_alphabet(), *map("".join, made), "Ġtree", "see"]
    by_hand = {"vocab": {token: k for k, token in enumerate(tokens)}, "merges": made}
    another = json.loads(_small_text())["model"]
    few = {"merges": [["h", "e"], ["t", "he"]], "vocab": {"t": 0, "h": 1, "e": 2, "Ġ": 3, "he": 4, "the": 5}}
    fewer = {"merges": [["h", "e"]], "vocab": {"t": 0, "h": 1, "e": 2, "he": 3, "the": 4}}
    words = ["Mia", "saw", "the", "moon", "over", "the", "pond", "and", "did", "not", "sleep"]
    rng.shuffle(words)
    return [
        case("'the he', two merges", "the he", "small", few),
        case("'Once upon a time'", "Once upon a time", "small"),
        case("eleven words", " ".join(words), "small"),
        case("spaces and lines", AWKWARD[3], "awkward"),
        case("emoji, accents and CJK", AWKWARD[0] + AWKWARD[2] + AWKWARD[5], "awkward"),
        case("'see the tree', merges made by hand", "see the tree", "awkward", by_hand),
        case("'see the tree', whole pieces first", "see the tree", "awkward", by_hand, whole_first=True),
        case("'txhe', and no x in the vocabulary", "txhe", "awkward", few),
        case("'txhe', no x in the vocabulary, whole pieces first", "txhe", "awkward", fewer, whole_first=True),
        case("'the', whole pieces first", "the", "awkward", fewer, whole_first=True),
        case("bytes that are not in the vocabulary", "the \x04\x06 cat 🐈", "awkward", another),
        case("no text", "", "awkward"),
    ]  # fmt: skip


def _run_encode(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from tokenizers import Regex, pre_tokenizers

    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    step = pre_tokenizers.Split(Regex(gpt2), "isolated")

    def split(text: str) -> list[str]:
        return [piece for piece, _ in step.pre_tokenize_str(text)]

    ranks = {tuple(pair): rank for rank, pair in enumerate(inputs["merges"])}
    return {"ids": answer(inputs["text"], split, ranks, inputs["vocab"], inputs["whole_first"])}


def _expect_encode(inputs: Mapping[str, Any]) -> dict[str, Any]:
    merges = [tuple(pair) for pair in inputs["merges"]]
    vocab = inputs["vocab"]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=inputs["whole_first"]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return {"ids": made.encode(inputs["text"]).ids}


def _encode_answer(
    pieces: str = "split(text)",
    symbols: str = "to_symbols(piece)",
    known: str = "[symbol for symbol in symbols if symbol in vocab]",
    whole: str = "whole_first and symbols in vocab",
) -> str:
    return f"""def encode_text(text, split, ranks, vocab, whole_first):
    ids = []
    for piece in {pieces}:
        symbols = {symbols}
        if {whole}:
            ids.append(vocab[symbols])
            continue
        known = {known}
        ids += [vocab[token] for token in merge(known, ranks)]
    return ids
"""


_ENCODE = Exercise(
    id="03.3",
    title="a text to ids",
    answer="encode_text",
    kind="function",
    arguments=("text", "split", "ranks", "vocab", "whole_first"),
    cases=_encode_cases,
    run=_run_encode,
    expected=_expect_encode,
    points={"small": 1, "awkward": 2},
    builds_on=("03.1", "03.2"),
    hints=Hints(
        question="Take {case}. Into which pieces does split cut it, and which tokens does each piece become by itself?",
        rule="Four steps, for each piece of split(text): to symbols; drop symbols that the vocabulary does not have; merge; "
        "look up the ids. Pieces never merge with each other. With whole_first, a piece whose symbols are in the vocabulary "
        "as they stand is one token, whatever the merges say.\n\nBy hand: 'a he' is cut into 'a' and ' he'; symbols a and "
        "Ġhe; in tiny-stories these are the ids 64 and 292.",
        code="""ids = []
for piece in ____:
    symbols = to_symbols(____)
    if whole_first and ____:
        ids.append(vocab[symbols])
        continue
    known = [symbol for symbol in symbols if ____]
    ids += [vocab[token] for token in merge(____, ____)]
return ids""",
    ),
    mistakes=(
        Mistake(
            "merged across the borders of pieces",
            _encode_answer(pieces="[text]"),
            "split was not used, and so the end of one word merges with the beginning of the next. The merges were learnt within "
            "pieces, and the model has never seen such tokens.",
            "Which of your tokens holds letters of two words?",
        ),
        Mistake(
            "spaces lost",
            _encode_answer(pieces="text.split()"),
            "str.split throws spaces and line breaks away. The pieces of the pattern keep them: a space belongs to the word after "
            "it.",
            "What does ' upon' become, and what 'upon'?",
        ),
        Mistake(
            "characters instead of bytes",
            _encode_answer(symbols='piece.replace(" ", "Ġ").replace("\\n", "Ċ").replace("\\t", "ĉ")'),
            "Only the blanks were turned into symbols. Every byte of the piece must be: é is two symbols, an emoji four. With "
            "characters, whatever is not in the vocabulary vanishes.",
            "Which symbols stand for the bytes of é?",
        ),
        Mistake(
            "an unknown symbol is an error",
            _encode_answer(known="list(symbols)"),
            "Some vocabularies (SmolLM2's is one) lack rare bytes, and have no token for 'unknown' either. The library drops such "
            "a symbol, and so must you.",
            "Is every byte of the text in this vocabulary?",
        ),
        Mistake(
            "whole pieces first, asked or not",
            _encode_answer(whole="symbols in vocab"),
            "Looking for the whole piece first is only for files that ask for it. Without it, the merges decide, and here and "
            "there they do not lead to a token that is in the vocabulary.",
            "What is whole_first in this case?",
        ),
        Mistake(
            "whole pieces never first",
            _encode_answer(whole="False"),
            "With whole_first, a piece that is in the vocabulary as it stands is one token, even where no merges lead to it.",
            "What is whole_first in this case, and is a piece of the text in the vocabulary?",
        ),
        Mistake(
            "the raw piece looked up, not its symbols",
            _encode_answer(whole="whole_first and piece in vocab").replace("vocab[symbols]", "vocab[piece]"),
            "The vocabulary holds symbols: the piece ' tree' is written Ġtree there, and looked up as it is it will not be "
            "found. Turn the piece into symbols first, and look these up.",
            "How is a space written in the vocabulary?",
            variants=(_encode_answer(whole="whole_first and piece in vocab"),),
        ),
        Mistake(
            "unknown symbols dropped after merging",
            _encode_answer(known="list(symbols)").replace(
                "[vocab[token] for token in merge(known, ranks)]",
                "[vocab[token] for token in merge(known, ranks) if token in vocab]",
            ),
            "A symbol that the vocabulary lacks stands between two others, and keeps them apart while you merge. The library "
            "drops it first, so that these become neighbours and may merge: drop before merging.",
            "In 'txhe' without x, which symbols are neighbours when the merging begins?",
            variants=(
                _encode_answer(known="list(symbols)").replace(
                    "[vocab[token] for token in merge(known, ranks)]",
                    "[vocab.get(token) for token in merge(known, ranks) if vocab.get(token) is not None]",
                ),
            ),
        ),
        Mistake(
            "the whole piece looked up after dropping",
            """def encode_text(text, split, ranks, vocab, whole_first):
    ids = []
    for piece in split(text):
        symbols = [symbol for symbol in to_symbols(piece) if symbol in vocab]
        if whole_first and "".join(symbols) in vocab:
            ids.append(vocab["".join(symbols)])
        else:
            ids += [vocab[token] for token in merge(symbols, ranks)]
    return ids
""",
            "A whole piece is one token if it is in the vocabulary *as it stands*. Without its unknown symbols it is another "
            "piece: look it up first, and drop afterwards.",
            "Is the piece itself in the vocabulary, with all of its symbols?",
        ),
    ),
)


# ---------------- 03.4: a stream


_EACH, _LATE = "the text of every push", "the whole text, and what has come after three pushes"


def _stream_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, pieces: list[bytes], group: str, compared: str = _EACH, ids: Any = None) -> Case:
        tokens = {str(k): piece.hex(" ") for k, piece in enumerate(pieces)}
        inputs = {"tokens": tokens, "ids": ids or list(range(len(pieces))), "compared": compared}
        return Case(label, inputs, group)

    def cut(text: str) -> list[bytes]:
        raw, pieces = text.encode(), []
        while raw:
            size = int(rng.integers(1, 4))
            pieces.append(raw[:size])
            raw = raw[size:]
        return pieces

    cat, snow = "🐈".encode(), "雪".encode()
    return [
        case("' the', ' cat'", [b" the", b" cat"], "small"),
        case("an emoji in two tokens", [b"a ", cat[:2], cat[2:], b"."], "small"),
        case("an emoji in four tokens", [b"cat ", *(bytes([byte]) for byte in cat), b"!"], "awkward"),
        case("a token that ends one character and begins another", [b"x\xc3", b"\xa9\xe9\x9b", b"\xaa y"], "awkward"),
        case("many languages, cut anywhere", cut("".join(AWKWARD[:7])), "awkward"),
        case("a special token, which has no bytes", [b"one", b"", b" two"], "awkward"),
        case("an id that is not in the dict", [b"one", b" two"], "awkward", ids=[0, 7, 1]),
        case("a character that is never completed", [b"ab", cat[:3]], "broken", _LATE),
        case("a byte that can be no character", [b"ab", b"\xff", b"cd", b" and on"], "broken", _LATE),
        case("half a character, then a letter", [cat[:2], b"cd", b" and on"], "broken", _LATE),
        case("half a character, then a whole one", [cat[:2] + snow[:1], snow[1:], b" on"], "broken", _LATE),
        case("a first byte, then letters", [cat[:1], b"a", b"b", b" and on"], "broken", _LATE),
        case("a byte that continues nothing", [b"ab", cat[2:], b"cd", b" and on"], "broken", _LATE),
    ]  # fmt: skip


def _run_stream(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    stream = answer({int(id): bytes.fromhex(raw) for id, raw in inputs["tokens"].items()})
    pieces = [stream.push(id) for id in inputs["ids"]]
    pieces.append(stream.end())
    if inputs["compared"] == "the text of every push":
        return {"pushed": pieces}
    # Where a broken character becomes U+FFFD is the stream's own affair; but not later than two tokens on.
    return {"text": "".join(pieces), "after three pushes": "".join(pieces[:3])}


def _expect_stream(inputs: Mapping[str, Any]) -> dict[str, Any]:
    raw = [bytes.fromhex(inputs["tokens"].get(str(id), "")) for id in inputs["ids"]]
    if inputs["compared"] == _EACH:
        utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        return {"pushed": [*(utf8.decode(piece) for piece in raw), utf8.decode(b"", final=True)]}
    symbols = _alphabet()
    text = decoders.ByteLevel().decode(["".join(symbols[byte] for byte in piece) for piece in raw])
    early = b"".join(raw[:3]).decode(errors="replace")
    return {"text": text, "after three pushes": early}


def _stream_answer(
    push: str = "return self.utf8.decode(self.token_bytes.get(id, b''))",
    end: str = "return self.utf8.decode(b'', final=True)",
    errors: str = "replace",
) -> str:
    return f"""import codecs

class Stream:
    def __init__(self, token_bytes):
        self.token_bytes = token_bytes
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="{errors}")
        self.waiting = b""

    def push(self, id):
        {push}

    def end(self):
        {end}
"""


def _buffer_answer(give: str) -> str:
    """A stream with a buffer `self.waiting`, of which push gives what `give` says."""
    return _stream_answer(
        push=f"self.waiting += self.token_bytes.get(id, b'')\n        {give}",
        end="return self.waiting.decode('utf-8', errors='replace')",
    )


_STREAM = Exercise(
    id="03.4",
    title="text from a stream",
    answer="Stream",
    kind="class",
    cases=_stream_cases,
    run=_run_stream,
    expected=_expect_stream,
    points={"small": 1, "awkward": 1, "broken": 1},
    hints=Hints(
        question="Take {case}. Write the bytes of its tokens one under the other. Which of them end a character, which are only "
        "the beginning of one, and which can not become one any more?",
        rule="Keep the bytes that do not yet make a character, and give the rest as text. Python has a decoder that does this: "
        'codecs.getincrementaldecoder("utf-8")(errors="replace"). Its decode(raw) gives what is complete and keeps the '
        "remainder; decode(b'', final=True) gives what is still kept, as U+FFFD.\n\nBy hand: push of f0 9f gives '', push of "
        "90 88 gives the cat.",
        code="""def __init__(self, token_bytes):
    self.token_bytes = token_bytes
    self.utf8 = codecs.getincrementaldecoder("utf-8")(errors=____)
def push(self, id):
    return self.utf8.decode(self.token_bytes.get(id, ____))
def end(self):
    return self.utf8.decode(b"", final=____)""",
    ),
    mistakes=(
        Mistake(
            "each token decoded by itself",
            _stream_answer(
                push="return self.token_bytes.get(id, b'').decode('utf-8', errors='replace')", end="return ''"
            ),
            "The bytes of one character can come in two tokens. Decoded one by one, each half is broken, and the reader sees two "
            "U+FFFD where a cat should be.",
            "Are the bytes of one token always whole characters?",
        ),
        Mistake(
            "what is left at the end forgotten",
            _stream_answer(end="return ''"),
            "If the text stops within a character, end() must say so: the bytes become U+FFFD, as in decoding everything at once.",
            "The last token was half an emoji. What does end() return?",
        ),
        Mistake(
            "broken bytes dropped",
            _stream_answer(
                push="return self.token_bytes.get(id, b'').decode('utf-8', errors='ignore')", end="return ''"
            ),
            "errors='ignore' makes the halves of a character vanish, and the reader never learns that there was one. Keep them "
            "until the rest comes.",
            "Where did the bytes of the emoji go?",
        ),
        Mistake(
            "everything kept until the end",
            _stream_answer(
                push="self.waiting += self.token_bytes.get(id, b''); return ''",
                end="return self.waiting.decode('utf-8', errors='replace')",
            ),
            "The text is right, and comes all at once: that is no stream. What is certain must be given at once.",
            "What does your push return for a token that is plain English?",
        ),
        Mistake(
            "what can not become complete is waited for",
            _buffer_answer(
                """for keep in range(min(3, len(self.waiting)) + 1):
            head = self.waiting[: len(self.waiting) - keep]
            try:
                text = head.decode('utf-8')
            except UnicodeDecodeError:
                continue
            self.waiting = self.waiting[len(head) :]
            return text
        text, self.waiting = self.waiting.decode('utf-8', errors='replace'), b''
        return text"""
            ),
            "You give the part of the buffer that decodes and keep the rest, however broken it is. Not all that fails to "
            "decode is the beginning of a character: ff begins none, and after f0 9f a letter can not follow. Such bytes "
            "become U+FFFD at once; what is waited for is a beginning that the next byte can still complete.",
            "Of the bytes that you keep back, can any that follow make a character of them?",
        ),
        Mistake(
            "everything held back behind an incomplete character",
            _buffer_answer(
                """try:
            text, self.waiting = self.waiting.decode('utf-8'), b''
        except UnicodeDecodeError:
            text = ''
        return text"""
            ),
            "Your buffer is decoded as a whole or not at all. If it ends with half a character, all that is complete in "
            "front of that waits too, and behind a byte that can be no character (such as ff) it waits for ever. Give what "
            "is complete and keep the rest; and replace what can not become complete.",
            "In your buffer, which bytes make whole characters already?",
        ),
        Mistake(
            "the following bytes not looked at",
            _buffer_answer(
                """text = ""
        while self.waiting:
            first = self.waiting[0]
            size = 1 if first < 0x80 else 2 if 0xc0 <= first < 0xe0 else 3 if 0xe0 <= first < 0xf0 else 4
            if 0x80 <= first < 0xc0 or first >= 0xf8:
                size = 1
            if len(self.waiting) < size:
                break
            text += self.waiting[:size].decode('utf-8', errors='replace')
            self.waiting = self.waiting[size:]
        return text"""
            ),
            "The first byte says how many should follow. Whether they do is another question: every byte that continues a "
            "character is 10xxxxxx in binary. Where another one comes, the character ends unfinished, as U+FFFD, and a new one "
            "begins with that byte.",
            "Which bytes did you take for the rest of the first character, and does each of them begin with the bits 10?",
        ),
        Mistake(
            "an id without bytes is an error",
            _stream_answer(push="return self.utf8.decode(self.token_bytes[id])"),
            "Not every id is in the dict: special tokens are left out of it, and a model may have more rows than the "
            "tokenizer has tokens. Such an id has no bytes: self.token_bytes.get(id, b'').",
            "What does your push do with an id that the dict does not have?",
        ),
        Mistake(
            "a new decoder for every token",
            _stream_answer(
                push="return codecs.getincrementaldecoder('utf-8')(errors='replace').decode(self.token_bytes.get(id, b''))",
                end="return ''",
            ),
            "The decoder keeps the bytes that are incomplete, and this one is thrown away with them. Make it once, in "
            "__init__, and ask the same one each time.",
            "Where are the first bytes of a character while the stream waits for the others?",
        ),
        Mistake(
            "a broken character is an error",
            _stream_answer(errors="strict"),
            "A model can write any tokens, also such as make no text. That must not stop the server: broken bytes become U+FFFD.",
            "Can you be sure that a model only writes valid UTF-8?",
        ),
    ),
)


# ---------------- 03.5: the part


def _tokenizer_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, texts: list[str], group: str, file: str = "", ids: Any = None) -> Case:
        # The file as a dict: a report says how large it is, and not how it begins.
        settings = json.loads(file or _tiny_text())
        return Case(label, {"file": settings, "texts": texts, "more_ids": ids or []}, group)

    chat = "<|user|>Tell me.<|end|><|assistant|>"
    drawn = rng.integers(0, 2048, (20, 12)).tolist()
    small, plain = _small_text(), _plain_text()
    return [
        case("a line of a story", ["Once a rabbit had a friend."], "small"),
        case("two texts, one after the other", ["a cat", "a dog"], "small"),
        case("a chat, with its special tokens", [chat], "small"),
        case("names of special tokens, and nearly so", ["no <|token|>, <|end|", "<|bos|><|eos|>"], "small"),
        case("awkward texts", list(AWKWARD), "awkward"),
        case("an id that no token has", ["a"], "awkward", ids=[[64, 99999, 65]]),
        case("random ids, which are seldom whole characters", [""], "awkward", ids=drawn),
        case("another file, with added tokens that are not special", ["<name> is<name> here<|end|>"], "awkward", small),
        case("another file, where one name begins like another", ["a<|end|>x b<|end|> c"], "awkward", small),
        case("another file, without added tokens", ["the cat"], "awkward", plain),
        case("another file, awkward texts", ["the cat 12", *AWKWARD, "<name>\x04 <|end|>"], "awkward", small),
    ]  # fmt: skip


def _run_tokenizer(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import json
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as file:
            json.dump(inputs["file"], file)
        tokenizer = answer(folder)
    ids = [tokenizer.encode(text) for text in inputs["texts"]]
    both = [*ids, *inputs["more_ids"]]
    streamed = []
    for some in both:
        stream = tokenizer.stream()
        streamed.append("".join([*(stream.push(id) for id in some), stream.end()]))
    return {"ids": ids, "decoded": [tokenizer.decode(some) for some in both], "streamed": streamed}


def _expect_tokenizer(inputs: Mapping[str, Any]) -> dict[str, Any]:
    library = tokenizers.Tokenizer.from_str(json.dumps(inputs["file"]))
    ids = [library.encode(text).ids for text in inputs["texts"]]
    decoded = [library.decode(some) for some in [*ids, *inputs["more_ids"]]]
    return {"ids": ids, "decoded": decoded, "streamed": decoded}


SPLITTER = '''import json
import re
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"


def splitter(settings):
    """The "pre_tokenizer" of a tokenizer.json -> a function that cuts a text into pieces."""
    steps = []
    for one in settings.get("pretokenizers", [settings]):
        if one["type"] == "Split" and one["behavior"] == "Isolated" and not one.get("invert"):
            steps.append(pre_tokenizers.Split(Regex(one["pattern"]["Regex"]), "isolated"))
        elif one["type"] == "Digits":
            steps.append(pre_tokenizers.Digits(one["individual_digits"]))
        elif one["type"] == "ByteLevel" and not one["add_prefix_space"]:
            if one.get("use_regex", True):
                steps.append(pre_tokenizers.Split(Regex(GPT2), "isolated"))
        else:
            raise ValueError(f"tokenizer.json: the pre-tokenizer {one} is not one that this class knows")

    def split(text):
        pieces = [text]
        for step in steps:
            pieces = [found for piece in pieces for found, _ in step.pre_tokenize_str(piece)]
        return pieces

    return split


'''


def _tokenizer_answer(
    before: str = "",
    table: str = "bytes(SYMBOLS.index(symbol) for symbol in token)",
    pieces: str = 're.split("(" + "|".join(map(re.escape, longest)) + ")", text) if longest else [text]',
    first: str = "list(self.first)",
    split: str = "self.split",
    decode: str = 'b"".join(self.token_bytes.get(id, b"") for id in ids).decode("utf-8", errors="replace")',
    skip: str = "if id not in self.special",
    skip_streamed: str | None = None,
    longest: str = "sorted(self.added, key=len, reverse=True)",
    added: str = '{id: name.encode("utf-8") for name, id in self.added.items()}',
    streamed: str = "{id: raw for id, raw in self.token_bytes.items() SKIP}",
) -> str:
    streamed = streamed.replace("SKIP", skip if skip_streamed is None else skip_streamed)
    return f"""{SPLITTER}{before}
class Tokenizer:
    def __init__(self, path):
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        settings = json.loads(file.read_text(encoding="utf-8"))
        model = settings["model"]
        self.vocab = model["vocab"]
        self.whole_first = model.get("ignore_merges", False)
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        self.ranks = {{tuple(pair): rank for rank, pair in enumerate(pairs)}}
        self.split = splitter(settings["pre_tokenizer"])
        self.added = {{token["content"]: token["id"] for token in settings["added_tokens"]}}
        self.special = {{token["id"] for token in settings["added_tokens"] if token["special"]}}
        template = (settings.get("post_processor") or {{}}).get("single", [])
        names = [part["SpecialToken"]["id"] for part in template if "SpecialToken" in part]
        self.first = [self.added[name] for name in names]
        self.token_bytes = {{}}
        for token, id in self.vocab.items():
            self.token_bytes[id] = {table}
        self.token_bytes |= {added}

    def encode(self, text):
        longest = {longest}
        pieces = {pieces}
        ids = {first}
        for piece in pieces:
            if piece in self.added:
                ids.append(self.added[piece])
            elif piece:
                ids += encode_text(piece, {split}, self.ranks, self.vocab, self.whole_first)
        return ids

    def decode(self, ids):
        ids = [id for id in ids {skip}]
        return {decode}

    def stream(self):
        return Stream({streamed})
"""


_TOKENIZER = Exercise(
    id="03.5",
    title="the tokenizer",
    answer="Tokenizer",
    kind="class",
    cases=_tokenizer_cases,
    run=_run_tokenizer,
    expected=_expect_tokenizer,
    points={"small": 1, "awkward": 3},
    builds_on=("03.1", "03.2", "03.3", "03.4"),
    makes={"Tokenizer": "Tokenizer"},
    file="tokenizer.py",
    hints=Hints(
        question="Take {case}. Is it encode that is wrong, or decode? And does the text hold a special token?",
        rule="encode: begin with self.first. Cut the text at the names of added tokens and keep these: re.split with a group "
        "does both, and the longest name must be tried first. A piece that is an added token is its id; any other goes "
        "through encode_text. decode: leave special ids out, join the bytes of all others, and decode once.\n\nBy hand, in "
        "tiny-stories: '<|user|>a' is 2042 (BOS), 2044, 64. Decoded: 'a'.",
        code="""longest = sorted(self.added, key=len, reverse=True)
pieces = re.split("(" + "|".join(map(re.escape, longest)) + ")", text) if longest else [text]
ids = list(____)
for piece in pieces:
    if piece in self.added:
        ids.append(____)
    else:
        ids += encode_text(piece, self.split, self.ranks, self.vocab, self.whole_first)
...
raw = b"".join(self.token_bytes.get(id, b"") for id in ids if ____)
return raw.decode("utf-8", errors=____)""",
    ),
    mistakes=(
        Mistake(
            "special tokens encoded as text",
            _tokenizer_answer(pieces="[text]"),
            "<|end|> is one token, and it was cut into < | end | > and so on. The model was trained on the one, and has never seen "
            "the others.",
            "How many ids should <|end|> become?",
        ),
        Mistake(
            "BOS left out",
            _tokenizer_answer(first="[]"),
            "The file says that a text begins with a special token (post_processor), and every text in training did. Without it "
            "the model sees something it never saw.",
            "What is the first id that is expected?",
        ),
        Mistake(
            "merged across the borders of pieces",
            _tokenizer_answer(split="(lambda text: [text])"),
            "The text was not cut before merging, so that the end of one word merges with the beginning of the next.",
            "Which of your tokens holds letters of two words?",
        ),
        Mistake(
            "symbols shown instead of bytes",
            _tokenizer_answer(table='token.encode("utf-8")'),
            "The vocabulary holds symbols, one for each byte: Ġ is how it writes a space. To decode, turn each symbol back into "
            "its byte.",
            "Which byte does the symbol Ġ stand for?",
        ),
        Mistake(
            "tokens joined by spaces",
            _tokenizer_answer(
                decode='" ".join(self.token_bytes.get(id, b"").decode("utf-8", errors="replace") for id in ids)'
            ),
            "Spaces are in the tokens already (' time' begins with one). Tokens are joined with nothing between them.",
            "Which byte does the token Ġtime begin with?",
        ),
        Mistake(
            "each token decoded by itself",
            _tokenizer_answer(
                decode='"".join(self.token_bytes.get(id, b"").decode("utf-8", errors="replace") for id in ids)'
            ),
            "The bytes of one character can lie in two tokens. Join all bytes first, and decode once.",
            "Is every token of an emoji a whole character?",
        ),
        Mistake(
            "special tokens shown",
            _tokenizer_answer(skip=""),
            "<|bos|> and <|end|> are signs for the machine. Whoever reads the answer must not see them.",
            "Should a reader see <|bos|>, from decode or from the stream?",
            variants=(
                _tokenizer_answer(skip="", skip_streamed="if id not in self.special"),
                _tokenizer_answer(skip_streamed=""),
            ),
        ),
        Mistake(
            "added tokens without bytes",
            _tokenizer_answer(added="{}"),
            "An added token that is not special is text like any other, and its bytes are its name. Without an entry in "
            "token_bytes it vanishes when it is decoded.",
            "Which of the added tokens of this file is not special, and what are its bytes?",
        ),
        Mistake(
            "the template's list changed",
            _tokenizer_answer(first="self.first"),
            "`ids = self.first` makes no copy: both names are of one list, and what you append for one text stands in front of "
            "the next. Begin with list(self.first).",
            "What is in self.first after the first call of encode?",
        ),
        Mistake(
            "an unknown id is an error",
            _tokenizer_answer(
                decode='b"".join(self.token_bytes[id] for id in ids).decode("utf-8", errors="replace")'
            ),
            "A model may have more rows than its tokenizer has tokens, and can then write an id that no token has. It gives "
            "nothing: self.token_bytes.get(id, b'').",
            "What does your decode do with the id 99999?",
        ),
        Mistake(
            "the shorter name tried first",
            _tokenizer_answer(longest="list(self.added)"),
            "An expression a|ab tries a first and never comes to ab. Where one name begins like another, as <|end|> and "
            "<|end|>x do, the longer one must stand first.",
            "In 'a<|end|>x', which of the two names is the token?",
            variants=(_tokenizer_answer(longest="sorted(self.added, key=len)"),),
        ),
        Mistake(
            "no added tokens, and an empty expression",
            _tokenizer_answer(pieces='re.split("(" + "|".join(map(re.escape, longest)) + ")", text)'),
            "Without any added token the expression is (), which matches between all characters and cuts the text into "
            "single letters. Then nothing is to be cut: take [text].",
            "Which expression do you make where self.added is empty, and what does it match?",
        ),
        Mistake(
            "names taken for expressions",
            _tokenizer_answer(pieces='re.split("(" + "|".join(longest) + ")", text) if longest else [text]'),
            "In a regular expression | means 'or', so <|end|> reads as '<' or 'end' or '>'. re.escape makes plain characters "
            "of them.",
            "What does the expression <|end|> match?",
        ),
        Mistake(
            "merged from left to right",
            _tokenizer_answer(before=_IN_ONE_PASS + "\n" + _encode_answer() + "\n"),
            "The first pair that can be merged is merged. The order must be that of the ranks.",
            "Which pair of neighbours has the lowest rank, and did it go first?",
        ),
    ),
)


# ---------------- what is drawn


def _picture_of_merges(answer: Any, cp: Any) -> Any:
    """The merges of one word, in the order in which the learner's function makes them."""
    word = "Ġreheated"
    merges = [tuple(pair) for pair in _tiny()["model"]["merges"] if "".join(pair) in word]
    ranks: dict[tuple[str, str], int] = {}
    done: list[tuple[str, str]] = []
    before = list(word)
    for rank, pair in enumerate(merges):
        ranks[pair] = rank
        now = answer(list(word), dict(ranks))
        if now != before:
            done.append(pair)
        before = now
    return figures.merge_tree(list(word), done, title="' reheated', merged by rank")


def _picture_of_tokens(answer: Any, cp: Any) -> Any:
    """An awkward prompt as tokens, by the learner's tokenizer."""
    folder = resolve("tiny-stories")
    reference = Tokenizer(folder)
    ids = answer(folder).encode("Once a cat 🐈 ran to a café, reheated its tea, and looked at the snow (雪).")
    return figures.token_strip(
        [reference.token_bytes(id) for id in ids], ids, title="A prompt as your tokens"
    )


LESSON = Lesson(
    number="03",
    slug="tokenization",
    title="Tokenization",
    part=1,
    minutes=80,
    exercises=(_SYMBOLS, _MERGE, _ENCODE, _STREAM, _TOKENIZER),
    engine=EngineCard(
        mistakes=(
            ("03.5", "symbols shown instead of bytes"),
            ("03.5", "merged from left to right"),
            ("03.5", "BOS left out"),
        ),
        prompt="Once there lived a little rabbit",
        note="Your Tokenizer turned the prompt into ids, and every token that came out into text.",
    ),
    pictures={"03.2": _picture_of_merges, "03.5": _picture_of_tokens},
)
