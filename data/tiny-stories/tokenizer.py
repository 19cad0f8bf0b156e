"""Train the tokenizer of tiny-stories on its corpus: byte-level BPE of 2,048 entries.

The 256 bytes come first, then the merges, then the special tokens, as in Llama 3. `<|eos|>` has the last
id: an argmax that misses the end of a row of logits never ends a story. The pre-tokenizer is GPT-2's
regular expression, written out in `tokenizer.json`.

    python tokenizer.py --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from corpus import BOS, EOS, SPECIAL_TOKENS, TRAIN_SEED, documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role ' + message['role'] + ' is none of system, user, assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(num_documents: int = 40_000) -> Tokenizer:
    """Train byte-level BPE on the first documents of the corpus.

    Parameters
    ----------
    num_documents : int
        How many documents of the training corpus to read.

    Returns
    -------
    tokenizers.Tokenizer
        With `VOCAB_SIZE` entries; `encode` puts `<|bos|>` in front unless told not to.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_text(num_documents), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}")
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer


def _plain_text(num_documents: int) -> Iterator[str]:
    """The corpus without its special tokens."""
    special = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
    for text in documents(TRAIN_SEED, 0, num_documents):
        yield from special.split(text)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which `transformers.AutoTokenizer` reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (BOS, EOS)],
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the tiny-stories tokenizer.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the two files")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_tokenizer(), arguments.out)


if __name__ == "__main__":
    main()
