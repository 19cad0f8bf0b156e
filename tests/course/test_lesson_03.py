"""Lesson 03's part, as its solution makes it, against the `tokenizers` library on thousands of awkward strings."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers

from tinyvllm_ref import emulation
from tinyvllm_ref.checkpoint.fetch import fetch
from tinyvllm_ref.checkpoint.hub import FetchError
from tinyvllm_ref.checkpoint.names import REPOSITORY, resolve
from tinyvllm_ref.course.answers import make_namespace
from tinyvllm_ref.course.exercises import exercise_of
from tinyvllm_ref.course.lessons import solution_cell
from tinyvllm_ref.tokenizer import Tokenizer as ReferenceTokenizer

COUNT = 2400
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EMOJI = ["🙂", "🐈", "👩‍👩‍👧", "🇫🇷", "👍🏽", "☃", "🏴\U000e0067\U000e0062\U000e007f", "❤️"]
MARKS = ["\u0301", "\u0308", "\u0323", "\u20dd", "\u093f", "\u0e49", "\u064b"]
CJK = ["雪", "我们", "森の中", "カタカナ", "숲속으로", "𠮷", "。", "\u3000"]
BLANKS = [
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\u00a0",
    "\u2003",
    "\u200b",
    "\u2028",
    "\x1c",
    "\x85",
    "\v",
]
SCRIPTS = ["مرحبا", "שלום", "नमस्ते", "สวัสดี", "Ωμέγα", "Жук", "ſ", "ß", "ﬁ", "İ", "ⅷ", "½", "²", "１２"]
CODE = [
    "don't",
    "it's",
    "I'LL",
    "they’ve",
    "12345",
    "3.14",
    "[i**2]",
    "--",
    "...",
    "_a_b",
    "<|",
    "|>",
    "<|eos",
    "\x00",
    "\x7f",
]
WORDS = [
    "Once",
    " upon",
    " a",
    " time",
    " the",
    " there",
    "forest",
    " reheated",
    "aaaaaaa",
    "QX",
    " zyx",
    "<|tok|>",
]


@pytest.fixture(scope="module")
def part():
    """The class that the lesson's solution makes."""
    exercise = exercise_of("03.5")
    before = {id: solution_cell(id) for id in exercise.builds_on}
    return make_namespace(exercise, solution_cell("03.5"), emulation, before=before)["Tokenizer"]


def strings(special: list[str], count: int = COUNT) -> list[str]:
    """Awkward texts: pieces of many kinds side by side, and characters from all of Unicode."""
    rng = np.random.default_rng(3)
    kinds = [EMOJI, MARKS, CJK, BLANKS, SCRIPTS, CODE, WORDS, special]
    texts = ["", " ", "\n", *special, *(text for kind in kinds for text in kind)]
    texts += (REPOSITORY / "data" / "prompts.txt").read_text(encoding="utf-8").split("\n")
    while len(texts) < count:
        pieces = []
        for _ in range(int(rng.integers(1, 14))):
            kind = kinds[int(rng.integers(len(kinds)))]
            pieces.append(kind[int(rng.integers(len(kind)))])
            if rng.random() < 0.15:
                pieces.append(chr(int(rng.choice([rng.integers(1, 0xD800), rng.integers(0xE000, 0x110000)]))))
        texts.append("".join(pieces))
    return texts


def agree(mine, library: tokenizers.Tokenizer, texts: list[str]) -> None:
    """The same ids, and the same text from these, at once and as a stream."""
    assert len(set(texts)) > 2000
    for text in texts:
        ids = library.encode(text).ids
        assert mine.encode(text) == ids, repr(text)
        decoded = library.decode(ids)
        assert mine.decode(ids) == decoded, repr(text)
        stream = mine.stream()
        assert "".join([*map(stream.push, ids), stream.end()]) == decoded, repr(text)


def made(tmp_path, library: tokenizers.Tokenizer, **model):
    """A folder with this tokenizer, some fields of its model changed."""
    settings = json.loads(library.to_str())
    settings["model"] |= model
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    return tmp_path


def trained(pre_tokenizer, **options) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE(**options))
    library.pre_tokenizer = pre_tokenizer
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|begin|>", "<|end|>", "<|end|>x"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if options else [],
    )  # fmt: skip
    library.train_from_iterator([(REPOSITORY / "data" / "prompts.txt").read_text(encoding="utf-8")], trainer)
    library.add_tokens(["<name>"])
    return library


def test_tiny_stories(part):
    folder = resolve("tiny-stories")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [token.content for token in library.get_added_tokens_decoder().values()]
    agree(part(folder), library, strings(special))


def test_like_smollm2(part, tmp_path):
    """Digits one by one, merges as strings, no template, and bytes that the vocabulary lacks."""
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    library = trained(pre_tokenizers.Sequence(steps))
    assert any(library.token_to_id(symbol) is None for symbol in pre_tokenizers.ByteLevel.alphabet())
    merges = [" ".join(pair) for pair in json.loads(library.to_str())["model"]["merges"]]
    folder = made(tmp_path, library, merges=merges)
    agree(part(folder), library, strings(["<|begin|>", "<|end|>", "<|end|>x", "<name>"]))


def test_like_llama_3(part, tmp_path):
    """Llama 3's pattern, whole pieces first, and a text that begins with a special token."""
    steps = [
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    library = trained(pre_tokenizers.Sequence(steps), ignore_merges=True)
    begin = library.token_to_id("<|begin|>")
    library.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]),
        ]
    )
    agree(part(made(tmp_path, library)), library, strings(["<|begin|>", "<|end|>", "<|end|>x", "<name>"]))


def test_any_ids(part):
    """Random ids are seldom whole characters; one that no token has gives nothing."""
    folder = resolve("tiny-stories")
    mine, reference = part(folder), ReferenceTokenizer(folder)
    rng = np.random.default_rng(5)
    for _ in range(1000):
        # Mostly single bytes, so that all kinds of broken UTF-8 come up.
        ids = rng.choice([*range(256), *range(94, 256), *rng.integers(0, 2060, 60)], 12).tolist()
        decoded = reference.decode(ids)
        assert mine.decode(ids) == decoded, ids
        stream = mine.stream()
        assert "".join([*map(stream.push, ids), stream.end()]) == decoded, ids


def test_an_unknown_kind_is_refused(part, tmp_path):
    library = trained(pre_tokenizers.Whitespace())
    with pytest.raises(ValueError, match="Whitespace"):
        part(made(tmp_path, library))


@pytest.mark.slow
def test_smollm2(part):
    try:
        folder = resolve("smollm2-135m-instruct")
    except FileNotFoundError:
        try:
            folder = fetch("smollm2-135m-instruct", progress=False)
        except FetchError as error:
            pytest.skip(f"SmolLM2 is not here and cannot be fetched: {error}")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    agree(part(folder), library, strings(["<|im_start|>", "<|im_end|>", "<repo_name>"]))
