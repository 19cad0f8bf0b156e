# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · Tokenization
#
# **At the end you have** `Tokenizer`: it turns any text into the ids that a model reads, and ids back into text, also one
# at a time while the model writes. It reads the `tokenizer.json` of this course's model, of SmolLM2 and of Llama 3.2.
#
# **About 80 minutes** · builds on 01 (a model is a folder of files) · no CUDA in this lesson: text is the host's business
#
# **In vLLM** the `tokenizers` library (in Rust) does this, and `vllm/v1/engine/detokenizer.py` decodes the stream. Yours
# gives the same ids; it is slower, and a prompt is short.

# %% tags=["nbval-ignore-output"]
import json

from tinyvllm_ref.checkpoint.names import resolve
from tinyvllm_ref.course import check, hint, progress, reset, show, show_engine, solution

settings = json.loads((resolve("tiny-stories") / "tokenizer.json").read_text(encoding="utf-8"))

# %% [markdown]
# > **Fast track.** You have written a BPE before? Read [the rules of this format](#Bytes-that-can-be-printed), do
# > [03.4](#03.4-·-Text-from-a-stream) and then [03.5](#03.5-·-The-tokenizer), which is made of all the others.

# %% [markdown]
# ## The question
#
# A model multiplies matrices. It has a table with one row for each *token*, and reads a text as a list of row numbers.
# What should a token be?
#
# - **A word?** There is always another word: names, typing errors, other languages. Whatever is not in the table can not be
#   read at all.
# - **A character?** Unicode 16.0 has 154,998, and the list grows each year.
# - **A byte?** Any text is bytes, and there are only 256 of them. But a text has many: ` grandmother` alone is twelve steps,
#   and the model pays for each.
#
# **Byte-level byte pair encoding (BPE)** begins with the 256 bytes, so that *everything* can be written, and then makes
# longer tokens of the pairs that occur most often: first `h`+`e`, then ` `+`t`, then ` t`+`he`, and so on, until the
# table is full. It is a compression method from 1994 (Philip Gage), and Sennrich and others brought it to language models
# in 2016. What training leaves behind is a list of **merges**, in order. These are the first of our model, and the last:

# %%
merges = settings["model"]["merges"]
for rank in (0, 1, 2, 7, 18, len(merges) - 1):
    print(f"rank {rank:4}: {merges[rank][0]!r} + {merges[rank][1]!r}")

# %% [markdown]
# ## Bytes that can be printed
#
# Why `Ġ`? A JSON file holds characters, not bytes, and many bytes have no character that can be seen. So GPT-2's makers
# gave every byte a printable one, its **symbol**, and the whole field still uses their map:
#
# - the bytes 33 to 126, 161 to 172 and 174 to 255 are printable in Latin-1, and stand for themselves: `a` is `a`;
# - the 68 others (blanks, control characters, the soft hyphen 173), in rising order, are the characters
#   256, 257, 258, ... The space is byte 32, the 33rd of the others, and so its symbol is character 288: `Ġ`.
#
# The bytes are those of UTF-8. An English letter is one byte there, `é` two, `雪` three, `🐈` four:

# %%
for text in ("a", " ", "é", "雪", "🐈"):
    print(f"{text!r:6} {text.encode('utf-8').hex(' ')}")

# %% [markdown]
# ## 03.1 · Bytes as symbols
#
# Two places to fill in. First the map: a list of 256 characters, the symbol of each byte. Then a text to its symbols.


# %%
# Exercise 03.1 - bytes as symbols
def symbols_of_bytes():
    """A list of 256 characters: the symbol of each byte."""
    # BEGIN SOLUTION (3 lines): the printable bytes, the others, and the list
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
    # STUB return [chr(byte) for byte in range(256)]
    # END SOLUTION


SYMBOLS = symbols_of_bytes()


def to_symbols(text):
    """'the cat' -> 'theĠcat', one symbol a byte of UTF-8."""
    # BEGIN SOLUTION (1 line): each byte's symbol, joined
    return "".join(SYMBOLS[byte] for byte in text.encode("utf-8"))
    # STUB return text
    # END SOLUTION


# %%
check("03.1", to_symbols)

# %% [markdown]
# ## Merging, by hand
#
# To encode a word, replay the training on it. Begin with its symbols. Of all pairs of neighbours that are in the list of
# merges, join the one with the **lowest rank**, everywhere in the word. Then look again, for there are new neighbours.
# Stop when no pair is left that can be merged.
#
# Here is ` there`, with the ranks of tiny-stories:
#
# | symbols | pairs with a rank | merged |
# |---|---|---|
# | `Ġ` `t` `h` `e` `r` `e` | `Ġ t` 1, `t h` 977, `h e` 0, `e r` 11, `r e` 18 | `h e` |
# | `Ġ` `t` `he` `r` `e` | `Ġ t` 1, `he r` 104, `r e` 18 | `Ġ t` |
# | `Ġt` `he` `r` `e` | `Ġt he` 7, `he r` 104, `r e` 18 | `Ġt he` |
# | `Ġthe` `r` `e` | `r e` 18 | `r e` |
# | `Ġthe` `re` | `Ġthe re` 226 | `Ġthe re` |
# | `Ġthere` | none | |
#
# Somebody who merges from left to right begins with `Ġ t`, goes on to `Ġt h` (rank 107), and never
# comes to `Ġthere`. Both lists of tokens spell the same text. But the model was trained on one of them and has never seen
# the other.
#
# ## 03.2 · Merge by rank
#
# `symbols` is a list of strings, `ranks` a dict from a pair of strings to its rank. Give back the list of tokens.
# `pairwise(symbols)` gives the pairs of neighbours.

# %%
# Exercise 03.2 - merge by rank
from itertools import pairwise


def merge(symbols, ranks):
    # BEGIN SOLUTION (14 lines): again and again, join the pair of the lowest rank wherever it stands
    while True:
        pairs = [pair for pair in pairwise(symbols) if pair in ranks]
        if not pairs:
            return symbols
        best = min(pairs, key=ranks.get)
        merged, index = [], 0
        while index < len(symbols):
            if tuple(symbols[index : index + 2]) == best:
                merged.append(symbols[index] + symbols[index + 1])
                index += 2
            else:
                merged.append(symbols[index])
                index += 1
        symbols = merged
    # STUB return symbols
    # END SOLUTION


# %%
check("03.2", merge)

# %% [markdown]
# A word that the model does not know as a whole, merged by *your* function. The numbers say in which order.

# %% tags=["nbval-ignore-output"]
show("03.2")

# %% [markdown]
# ## Pieces that never merge
#
# If a whole text were merged in one go, `dog.`, `dog!` and `dog,` could each become tokens of their own, and so could
# half of ` of the`. So the text is first cut into **pieces**, and merges happen within a piece only. A regular expression
# cuts. This is GPT-2's, which tiny-stories uses too:
#
# | part of the pattern | what it takes |
# |---|---|
# | `'s`, `'t`, `'re`, `'ve`, `'m`, `'ll` or `'d` | English endings after an apostrophe |
# | ` ?\p{L}+` | letters of any script, with *one* space in front, if there is one |
# | ` ?\p{N}+` | digits, likewise |
# | ` ?[^\s\p{L}\p{N}]+` | anything else that can be seen |
# | `\s+(?!\S)` | blanks, but not the last one in front of a word: that one belongs to the word |
# | `\s+` | all other blanks |
#
# Python's `re` does not know `\p{L}` ("any letter"), and so we take the expression engine of the `tokenizers` library for
# this one step.

# %%
import tokenizers

gpt2 = tokenizers.Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def gpt2_split(text):
    return [piece for piece, _ in tokenizers.pre_tokenizers.Split(gpt2, "isolated").pre_tokenize_str(text)]


print(gpt2_split("It's 7 o'clock,   said the cat."))
print("nothing is lost:", "".join(gpt2_split("  a \n b")) == "  a \n b")

# %% [markdown]
# ## 03.3 · A text to ids
#
# Put it together: pieces, symbols, tokens, ids. `split` is a function such as `gpt2_split`; `vocab` maps a token (a string
# of symbols) to its id. Two rules remain.
#
# - Some vocabularies lack a few bytes that hardly ever occur. A symbol that is not in `vocab` is dropped *before* merging,
#   so that those beside it become neighbours: without an `x` in `vocab`, `txhe` merges like `the`.
# - `whole_first` is for files that ask for it (`"ignore_merges": true`, as in Llama 3): a piece whose symbols are in `vocab`
#   as they stand, with none dropped, is one token, and the merges are not consulted.
#
# Your `to_symbols` and `merge` are at hand.


# %%
# Exercise 03.3 - a text to ids
def encode_text(text, split, ranks, vocab, whole_first):
    # BEGIN SOLUTION (9 lines): for each piece: its symbols, whole or merged, as ids
    ids = []
    for piece in split(text):
        symbols = to_symbols(piece)
        if whole_first and symbols in vocab:
            ids.append(vocab[symbols])
            continue
        known = [symbol for symbol in symbols if symbol in vocab]
        ids += [vocab[token] for token in merge(known, ranks)]
    return ids
    # STUB return []
    # END SOLUTION


# %%
check("03.3", encode_text)

# %% [markdown]
# ## Back to text, while it is being written
#
# Decoding looks easy: each id has its bytes; join them; decode UTF-8 once. For a whole text that is so. But a reader
# wants to see the words as they come, token by token, and a token may end **in the middle of a character**: tiny-stories
# has no token for 🐈, so its four bytes come as four tokens (and as three in SmolLM2). In UTF-8 the first byte says how
# many follow:
#
# | first byte, binary | bytes of the character |
# |---|---|
# | `0xxxxxxx` | 1 |
# | `110xxxxx` | 2 |
# | `1110xxxx` | 3 |
# | `11110xxx` | 4 |
# | `10xxxxxx` | none: it continues a character |
#
# So a stream keeps bytes that are only the *beginning* of a character, and gives the rest away at once. And since a model
# may write any tokens at all, some bytes will never be a character. They become `U+FFFD`, the replacement character, and
# the stream goes on. Look at the difference between *incomplete* and *impossible*. The last one is both: the first two bytes
# promise a character of four, but the third byte, `e9`, continues nothing (it is `1110xxxx`, not `10xxxxxx`). So those two become
# one U+FFFD, and `e9` begins a character of its own:

# %%
for raw in (b"\xf0\x9f\x90", b"\xff", b"\xf0\x9fcd", b"\xf0\x9f\xe9\x9b\xaa"):
    print(raw, "->", ascii(raw.decode("utf-8", errors="replace")))

# %% [markdown]
# ## 03.4 · Text from a stream
#
# `Stream(token_bytes)` gets a dict from id to `bytes`. `push(id)` gives the text that is certain with this token and was
# not before, often `""`; an id that is not in the dict has no bytes. `end()` gives what was held back: an unfinished
# character as `U+FFFD`.
#
# You can write it with a buffer and the table above; then look at *every* byte of a character, not only at the first. Or look
# up `codecs.getincrementaldecoder` in Python's documentation, which is made for this. In a report, tokens are written as bytes
# in hexadecimal: `61 20` is `a` and a space.

# %%
# Exercise 03.4 - text from a stream
import codecs


class Stream:
    def __init__(self, token_bytes):
        self.token_bytes = token_bytes
        # BEGIN SOLUTION (1 line): what the stream must remember between two tokens
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # STUB pass
        # END SOLUTION

    def push(self, id):
        # BEGIN SOLUTION (1 line): the characters that are complete now
        return self.utf8.decode(self.token_bytes.get(id, b""))
        # STUB return ""
        # END SOLUTION

    def end(self):
        # BEGIN SOLUTION (1 line): what is left
        return self.utf8.decode(b"", final=True)
        # STUB return ""
        # END SOLUTION


# %%
check("03.4", Stream)

# %% [markdown]
# ## Tokens that are no text
#
# A model also needs signs that no text contains: here a text begins, here the user speaks, here the answer ends. These are
# **special tokens**, and `tokenizer.json` lists them under `added_tokens`. They are cut out of the text *first*, whole, and
# their names are never merged:

# %%
for token in settings["added_tokens"]:
    print(token["id"], token["content"], "special" if token["special"] else "")
print(settings["post_processor"]["single"])

# %% [markdown]
# The last line is the file's **template** for a single text: `<|bos|>` (beginning of sequence), then the text. In
# training every text began so. When ids are decoded for a reader, special tokens are left out.
#
# ## 03.5 · The tokenizer
#
# Reading the file is done for you: `__init__` takes out what is needed, and two functions below the class, which you need not read,
# understand two descriptions in the file. Four places in the class are yours: the table of bytes, `encode`, `decode` and
# `stream`. Everything you made so far is at hand: `SYMBOLS`, `encode_text`, `Stream`.
#
# - The **table**: `self.token_bytes[id]` is the bytes of a token. Each symbol of a token stands for a byte, `byte_of[symbol]`
#   (a character that is no symbol, which some files have, is its own UTF-8). An added token's bytes are its name in UTF-8.
# - `encode(text)`: the ids of the template (`self.first`), then those of the text. Added tokens (`self.added`) are cut
#   out first. `re.split("(a|b)", text)` cuts at `a` and at `b` *and keeps them*; `re.escape` protects characters such as
#   `|`; where one name begins like another, the longer one must be tried first. A file may have no added tokens at all: then
#   the expression would be `()`, which cuts a text into single letters.
# - `decode(ids)`: the text, special tokens left out. An id that no token has gives nothing.
# - `stream()`: a new `Stream` that does the same, token by token.

# %%
# Exercise 03.5 - the tokenizer
import json
import re
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Tokenizer:
    """Called with a model's folder, or with its tokenizer.json."""

    def __init__(self, path):
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        settings = json.loads(file.read_text(encoding="utf-8"))
        model = settings["model"]
        if model["type"] != "BPE" or settings.get("normalizer"):
            raise ValueError(f"{file}: this class knows byte-level BPE without a normalizer")
        self.vocab = model["vocab"]  # token (a string of symbols) -> id
        self.whole_first = model.get("ignore_merges", False)
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(pairs)}
        self.split = splitter(settings["pre_tokenizer"])
        self.added = {token["content"]: token["id"] for token in settings["added_tokens"]}  # name -> id
        self.special = {token["id"] for token in settings["added_tokens"] if token["special"]}  # ids
        self.first = template_ids(settings["post_processor"])  # what a text begins with
        self.token_bytes = {}  # id -> bytes
        byte_of = {symbol: bytes([byte]) for byte, symbol in enumerate(SYMBOLS)}
        # BEGIN SOLUTION (4 lines): bytes of each token of the vocabulary (by byte_of), and of the added ones
        for token, id in self.vocab.items():
            self.token_bytes[id] = b"".join(byte_of.get(symbol, symbol.encode("utf-8")) for symbol in token)
        for name, id in self.added.items():
            self.token_bytes[id] = name.encode("utf-8")
        # END SOLUTION

    def encode(self, text):
        """str -> list of ids."""
        # BEGIN SOLUTION (9 lines): what a text begins with; then piece by piece, added tokens as their id
        longest = sorted(self.added, key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, longest)) + ")", text) if longest else [text]
        ids = list(self.first)
        for piece in pieces:
            if piece in self.added:
                ids.append(self.added[piece])
            else:
                ids += encode_text(piece, self.split, self.ranks, self.vocab, self.whole_first)
        return ids
        # STUB return []
        # END SOLUTION

    def decode(self, ids):
        """Ids -> str, without special tokens."""
        # BEGIN SOLUTION (2 lines): join the bytes, and decode once
        raw = b"".join(self.token_bytes.get(id, b"") for id in ids if id not in self.special)
        return raw.decode("utf-8", errors="replace")
        # STUB return ""
        # END SOLUTION

    def stream(self):
        """Decodes ids one at a time: push(id) and end()."""
        # BEGIN SOLUTION (1 line): a Stream over all tokens but the special ones
        return Stream({id: raw for id, raw in self.token_bytes.items() if id not in self.special})
        # STUB return Stream({})
        # END SOLUTION


# ---- reading two descriptions of the file: nothing to fill in


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


def template_ids(settings):
    """The "post_processor" of a tokenizer.json -> the ids that stand in front of a text."""
    ids = []
    for one in (settings or {}).get("processors", [settings or {}]):
        template = one.get("single", [])
        if template and "Sequence" not in template[-1]:
            raise ValueError(f"tokenizer.json: the template {template} does not end with the text")
        for part in template[:-1]:
            ids += one["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    return ids


# %%
check("03.5", Tokenizer)

# %% [markdown]
# A prompt as *your* tokenizer sees it. Words that are common in children's stories are one token, space included; the
# others fall apart. Dashed boxes hold a part of a character.

# %% tags=["nbval-ignore-output"]
show("03.5")

# %% [markdown]
# ## Your part in the engine
#
# The prompt goes through your `encode`, and each new token through your stream. Then three mistakes. With the second, every
# id is a valid one and the text is spelt the same, and yet the model reads something it has never seen: compare how the
# stories go on.

# %% tags=["nbval-ignore-output"]
show_engine("03")

# %% tags=["nbval-ignore-output"]
progress()

# %% [markdown]
# ## What to remember
#
# - Tokens are strings of *bytes*: 256 to begin with, longer ones by merging. Nothing is ever outside the vocabulary.
# - Merge by rank, not by position; within a piece, never across.
# - Many lists of tokens spell the same text. The model knows one of them.
# - Decode bytes together; in a stream keep what is incomplete, replace what is impossible.
# - Special tokens are cut out first and never shown.
#
# ## To think about
#
# <details><summary>Is decode(encode(text)) always the text? And encode(decode(ids)) always the ids?</summary>
#
# The first, yes, if every byte is in the vocabulary and the text holds no special token's name. The second, no: a model can
# write `Ġ` and `the` where `Ġthe` exists. The text is the same, the ids are not. An engine that keeps a conversation keeps
# its ids, and does not encode its own answer again.
# </details>
#
# <details><summary>A user writes "&lt;|end|&gt;" in a chat. What happens, and is it a danger?</summary>
#
# encode turns it into the special token, and the model believes that the user's turn has ended: whoever writes the text
# can forge the structure of the conversation. A server should encode what users write without special tokens.
# </details>
#
# <details><summary>Why do models count the letters of a word so badly?</summary>
#
# They never see letters. ` strawberry` is a handful of row numbers, and nothing in a row says how many r it has; the model
# has to have learnt it.
# </details>
#
# ## Further reading
#
# - Philip Gage, *A New Algorithm for Data Compression* (The C Users Journal, 1994): byte pair encoding.
# - Rico Sennrich, Barry Haddow and Alexandra Birch, *Neural Machine Translation of Rare Words with Subword Units* (ACL
#   2016).
# - Alec Radford and others, *Language Models are Unsupervised Multitask Learners* (2019): BPE on bytes, in GPT-2.
# - The Unicode Standard, chapter 3, section 9: UTF-8, and how many U+FFFD a broken sequence becomes.
#
# **Next:** [lesson 04, CUDA memory](04_cuda_memory.ipynb).
