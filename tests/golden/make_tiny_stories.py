"""Golden values of the tiny-stories checkpoint from Hugging Face transformers, float32 on a CPU.

    python tests/golden/make_tiny_stories.py        # needs the `golden` extra

writes beside itself:

- `tiny_stories.json`: for each line of data/prompts.txt its token ids, the greedy continuation, the margin
  between the two largest logits at each step, and the smallest of them; some chats with the ids of the chat
  template; and the digest of the checkpoint that all of this is of.
- `tiny_stories_logits.npz`: `ids_N` (T,) and `logits_N` (T, 2048) for a few short prompts, and `last_logits`
  (prompts, 2048), the logits of every prompt's last position.
- `tiny_stories_layers.npz`: activations of one prompt, (T, 192) each: `embedding`; for each layer the outputs
  of its norms, what attention and the feed-forward add, and the residual stream after it; `final_norm`; and
  `logits` (T, 2048).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
DATA = HERE.parents[1] / "data"
MAX_NEW_TOKENS = 64
WHOLE_LOGITS = (0, 2, 28)  # prompts whose logits are stored at every position
LAYERS_OF = 2  # the prompt whose activations are stored
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Tell me a story about a little fox named Pip."}],
    [
        {"role": "system", "content": "You answer questions about stories."},
        {"role": "user", "content": "Zoe has a green bell. Sam has a silver key. Who has the key?"},
    ],
    [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! Would you like to hear a story?"},
        {"role": "user", "content": "Tell me a story about a lost duckling."},
    ],
]


def greedy(model: Any, ids: list[int]) -> dict[str, Any]:
    """The greedy continuation, step by step without a cache, with the top-2 margin of each step."""
    stops = model.generation_config.eos_token_id
    new_ids: list[int] = []
    margins: list[float] = []
    while len(new_ids) < MAX_NEW_TOKENS:
        logits = model(torch.tensor([ids + new_ids])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        margins.append(first - second)
        new_ids.append(int(logits.argmax()))
        if new_ids[-1] in stops:
            break
    rounded = [round(margin, 5) for margin in margins]
    return {"new_ids": new_ids, "margins": rounded, "smallest_margin": min(rounded)}


def prompt_records(model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """One record per prompt of data/prompts.txt."""
    records = []
    for line in (DATA / "prompts.txt").read_text(encoding="utf-8").splitlines():
        ids = tokenizer(line).input_ids
        record = {"prompt": line, "ids": ids} | greedy(model, ids)
        records.append(record | {"text": tokenizer.decode(record["new_ids"])})
    return records


def chat_records(model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The chat template's ids, and the greedy answer to each chat."""
    records = []
    for messages in CHATS:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        record = {"messages": messages, "prompt": text, "ids": ids} | greedy(model, ids)
        records.append(record | {"text": tokenizer.decode(record["new_ids"])})
    return records


def logits_arrays(model: Any, records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Whole logits of a few prompts, and the last position's of all."""
    arrays: dict[str, np.ndarray] = {}
    for index in WHOLE_LOGITS:
        ids = records[index]["ids"]
        arrays[f"ids_{index}"] = np.array(ids, dtype=np.int32)
        arrays[f"logits_{index}"] = model(torch.tensor([ids])).logits[0].numpy()
    last = [model(torch.tensor([record["ids"]])).logits[0, -1].numpy() for record in records]
    return arrays | {"last_logits": np.stack(last)}


def layer_arrays(model: Any, ids: list[int]) -> dict[str, np.ndarray]:
    """What each part of the model puts out for one prompt."""
    arrays: dict[str, np.ndarray] = {"ids": np.array(ids, dtype=np.int32)}

    def keep(name: str, module: torch.nn.Module) -> None:
        def hook(_: torch.nn.Module, __: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            arrays[name] = output.reshape(len(ids), -1).clone().numpy()

        handles.append(module.register_forward_hook(hook))

    handles: list[Any] = []
    keep("embedding", model.model.embed_tokens)
    for i, layer in enumerate(model.model.layers):
        keep(f"layer_{i}_attention_norm", layer.input_layernorm)
        keep(f"layer_{i}_attention", layer.self_attn)
        keep(f"layer_{i}_feed_forward_norm", layer.post_attention_layernorm)
        keep(f"layer_{i}_feed_forward", layer.mlp)
        keep(f"layer_{i}_output", layer)
    keep("final_norm", model.model.norm)
    arrays["logits"] = model(torch.tensor([ids])).logits[0].numpy()
    for handle in handles:
        handle.remove()
    return arrays


def one_line_each(golden: dict[str, Any]) -> str:
    """JSON with a line for each entry, and for each record of a list."""
    entries = []
    for key, value in golden.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n]"
        entries.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Golden values of the tiny-stories checkpoint.")
    parser.add_argument("--model", type=Path, default=DATA / "tiny-stories", help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the golden files")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="eager"
    )
    model.train(False)
    records = prompt_records(model, tokenizer)
    golden = {
        "model_sha256": hashlib.sha256((arguments.model / "model.safetensors").read_bytes()).hexdigest(),
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__},
        "max_new_tokens": MAX_NEW_TOKENS,
        "prompts": records,
        "chats": chat_records(model, tokenizer),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "tiny_stories.json").write_text(one_line_each(golden), encoding="utf-8")
    logits: dict[str, Any] = logits_arrays(model, records)
    np.savez_compressed(arguments.out / "tiny_stories_logits.npz", **logits)
    layers: dict[str, Any] = layer_arrays(model, records[LAYERS_OF]["ids"])
    np.savez_compressed(arguments.out / "tiny_stories_layers.npz", **layers)


if __name__ == "__main__":
    main()
