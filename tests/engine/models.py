"""Small models for the engine's tests: weights from a seed, and a tokenizer whose tokens are single bytes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tokenizers

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))

from configs import MODELS, SHARP, GoldenModel, build, prompts_of  # noqa: E402, F401

from tinyvllm_ref.assembly import Parts, build_model  # noqa: E402
from tinyvllm_ref.checkpoint.weights import open_checkpoint  # noqa: E402
from tinyvllm_ref.config import EngineConfig  # noqa: E402
from tinyvllm_ref.engine import Engine  # noqa: E402
from tinyvllm_ref.request import Request  # noqa: E402
from tinyvllm_ref.sampling_params import SamplingParams  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Two query heads a KV head, odd sizes, and 259 tokens: the bytes, <s>, </s> and one that no text has.
TINY = GoldenModel(
    "tiny",
    {
        "vocab_size": 259,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "max_position_embeddings": 512,
    },
    seed=100,
)


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and its settings: id b is the byte b, 256 is <s>, 257 </s>."""
    characters = _byte_characters()
    vocab = {characters[byte]: byte for byte in range(256)}
    model = tokenizers.models.BPE(vocab=vocab, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_characters() -> list[str]:
    """GPT-2's printable character of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def tiny_folder(folder: Path, model: GoldenModel = TINY) -> Path:
    """A whole model folder."""
    build(model, folder)
    write_tokenizer(folder)
    return folder


def load(folder: Path, parts: Any = None) -> Any:
    """A model from its folder."""
    config, views = open_checkpoint(folder)
    return build_model(config, views, parts or Parts())


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """All requests through an engine, added at once; their outputs in order."""
    for number, (ids, params) in enumerate(requests):
        engine.add_request(Request(str(number), ids, params))
    done = {}
    while engine.has_work:
        done.update({out.request_id: out for out in engine.step() if out.finished})
    return [done[str(number)] for number in range(len(requests))]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


__all__ = ["MODELS", "TINY", "EngineConfig", "Parts", "greedy", "load", "prompts_of", "run", "tiny_folder"]
