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
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<|end|>"], show_progress=False)
    made.train_from_iterator([(REPOSITORY / "data" / "prompts.txt").read_text(encoding="utf-8")], trainer)
    made.add_tokens(["<name>"])
    settings = json.loads(made.to_str())
    settings["model"]["merges"] = [" ".join(pair) for pair in settings["model"]["merges"]]
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
        Case("300 characters from everywhere", {"text": "".join(map(chr, code_points.tolist()))}, "awkward"),
    ]


def _run_symbols(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    return {"symbols": answer(inputs["text"])}


def _expect_symbols(inputs: Mapping[str, Any]) -> dict[str, Any]:
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
        ),
        Mistake(
            "only one round",
            _merge_answer(again="        return symbols\n"),
            "One merge makes new neighbours, and these may be merged again. Go on until no pair has a rank.",
            "Does any pair of neighbours in your result have a rank?",
        ),
    ),
)


# ---------------- 03.3: a text


def _encode_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, text: str, group: str, model: Any = None, whole_first: bool = False) -> Case:
        model = model or _tiny()["model"]
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        inputs = {"text": text, "merges": merges, "vocab": model["vocab"], "pattern": GPT2}
        return Case(label, {**inputs, "whole_first": whole_first}, group)

    # No merges lead to Ġtree or see; and the first of them would join two words.
    made = [["e", "Ġ"], ["t", "h"], ["r", "e"], ["th", "e"], ["Ġ", "the"]]
    tokens = [*_alphabet(), *map("".join, made), "Ġtree", "see"]
    by_hand = {"vocab": {token: k for k, token in enumerate(tokens)}, "merges": made}
    another = json.loads(_small_text())["model"]
    words = ["Mia", "saw", "the", "moon", "over", "the", "pond", "and", "did", "not", "sleep"]
    rng.shuffle(words)
    return [
        case("'Once upon a time'", "Once upon a time", "small"),
        case("eleven words", " ".join(words), "small"),
        case("spaces and lines", AWKWARD[3], "awkward"),
        case("emoji, accents and CJK", AWKWARD[0] + AWKWARD[2] + AWKWARD[5], "awkward"),
        case("'see the tree', merges made by hand", "see the tree", "awkward", by_hand),
        case("'see the tree', whole pieces first", "see the tree", "awkward", by_hand, whole_first=True),
        case("bytes that are not in the vocabulary", "the \x04\x06 cat 🐈", "awkward", another),
        case("no text", "", "awkward"),
    ]  # fmt: skip


def _run_encode(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from tokenizers import Regex, pre_tokenizers

    step = pre_tokenizers.Split(Regex(inputs["pattern"]), "isolated")

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
    ),
)


# ---------------- 03.4: a stream


def _stream_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, pieces: list[bytes], group: str, exact: bool = True) -> Case:
        tokens = {str(k): list(piece) for k, piece in enumerate(pieces)}
        ids = list(range(len(pieces)))
        return Case(label, {"tokens": tokens, "ids": ids, "exact": exact}, group)

    def cut(text: str) -> list[bytes]:
        raw, pieces = text.encode(), []
        while raw:
            size = int(rng.integers(1, 4))
            pieces.append(raw[:size])
            raw = raw[size:]
        return pieces

    cat = "🐈".encode()
    return [
        case("' the', ' cat'", [b" the", b" cat"], "small"),
        case("an emoji in two tokens", [b"a ", cat[:2], cat[2:], b"."], "small"),
        case("an emoji in four tokens", [b"cat ", *(bytes([byte]) for byte in cat), b"!"], "awkward"),
        case("a token that ends one character and begins another", [b"x\xc3", b"\xa9\xe9\x9b", b"\xaa y"], "awkward"),
        case("many languages, cut anywhere", cut("".join(AWKWARD[:7])), "awkward"),
        case("a special token, which has no bytes", [b"one", b"", b" two"], "awkward"),
        case("a character that is never completed", [b"ab", cat[:3]], "broken", exact=False),
        case("a byte that can be no character", [b"ab", b"\xff", b"cd", b" and on"], "broken", exact=False),
        case("half a character, then a letter", [cat[:2], b"cd", b" and on"], "broken", exact=False),
    ]  # fmt: skip


def _run_stream(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    stream = answer({int(id): bytes(raw) for id, raw in inputs["tokens"].items()})
    pieces = [stream.push(id) for id in inputs["ids"]]
    pieces.append(stream.end())
    if inputs["exact"]:
        return {"pieces": pieces}
    # Where a broken character becomes U+FFFD is the stream's own affair; but not later than two tokens on.
    return {"text": "".join(pieces), "by the third token": "".join(pieces[:3])}


def _expect_stream(inputs: Mapping[str, Any]) -> dict[str, Any]:
    raw = [bytes(inputs["tokens"][str(id)]) for id in inputs["ids"]]
    if inputs["exact"]:
        utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        return {"pieces": [*(utf8.decode(piece) for piece in raw), utf8.decode(b"", final=True)]}
    symbols = _alphabet()
    text = decoders.ByteLevel().decode(["".join(symbols[byte] for byte in piece) for piece in raw])
    early = b"".join(raw[:3]).decode(errors="replace")
    return {"text": text, "by the third token": early}


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
        question="Take {case}. After which token are all bytes of the first character there, and what did you give until then?",
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
            "waiting for ever behind a byte that can be no character",
            _stream_answer(
                push="""self.waiting += self.token_bytes.get(id, b'')
        try:
            text, self.waiting = self.waiting.decode('utf-8'), b''
        except UnicodeDecodeError:
            text = ''
        return text""",
                end="return self.waiting.decode('utf-8', errors='replace')",
            ),
            "Not all that fails to decode is incomplete: 0xff begins no character, and no byte that follows can mend it. Your "
            "stream falls silent for the rest of the text.",
            "After a byte 0xff, what must come for your buffer to be emptied?",
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
        return Case(label, {"file": file or _tiny_text(), "texts": texts, "more_ids": ids or []}, group)

    chat = "<|user|>Tell me a story.<|end|><|assistant|>"
    drawn = rng.integers(0, 2048, (20, 12)).tolist()
    return [
        case("a line of a story", ["Once upon a time there was a rabbit."], "small"),
        case("a chat, with its special tokens", [chat, "no special <|token|>, <|end|", "<|bos|><|eos|>"], "small"),
        case("awkward texts", list(AWKWARD), "awkward"),
        case("random ids, which are seldom whole characters", [""], "awkward", ids=drawn),
        case("another tokenizer.json", ["the cat 12", *AWKWARD, "<name> is<name>\x04 here<|end|>"], "awkward", _small_text()),
    ]  # fmt: skip


def _run_tokenizer(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as file:
            file.write(inputs["file"])
        tokenizer = answer(folder)
    ids = [tokenizer.encode(text) for text in inputs["texts"]]
    both = [*ids, *inputs["more_ids"]]
    streamed = []
    for some in both:
        stream = tokenizer.stream()
        streamed.append("".join([*(stream.push(id) for id in some), stream.end()]))
    return {"ids": ids, "decoded": [tokenizer.decode(some) for some in both], "streamed": streamed}


def _expect_tokenizer(inputs: Mapping[str, Any]) -> dict[str, Any]:
    library = tokenizers.Tokenizer.from_str(inputs["file"])
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
) -> str:
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
        self.token_bytes |= {{id: name.encode("utf-8") for name, id in self.added.items()}}

    def encode(self, text):
        longest = sorted(self.added, key=len, reverse=True)
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
        return Stream({{id: raw for id, raw in self.token_bytes.items() {skip}}})
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
            "Should a reader see <|bos|>?",
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
    minutes=60,
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
