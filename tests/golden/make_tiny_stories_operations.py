"""What every operation of tiny-stories puts out, by Hugging Face transformers, for `compare_layers` and lesson 14.

    python tests/golden/make_tiny_stories_operations.py        # needs the `golden` extra

writes `data/tiny-stories/golden_operations.npz` (read from the installed copy as well): the ids of one prompt of
data/prompts.txt, its greedy continuation with the top-2 margin of each step (from `tiny_stories.json` beside this
file), and the activations by the names of `tinyvllm_ref.course.compare_layers`. The model runs in float32 on a CPU;
activations are stored as float16, whose 11 significant bits are more than the 8 of bfloat16, in which the engine
keeps the inputs of its products.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "data" / "tiny-stories"
PROMPT = 2  # the one whose activations are in tiny_stories_layers.npz as well


def flat(tensor: torch.Tensor) -> np.ndarray:
    """(1, T, ...) -> (T, columns)."""
    return tensor.detach().reshape(tensor.shape[1], -1).numpy().copy()


def operations(model: Any, ids: list[int]) -> dict[str, np.ndarray]:
    """The output of each operation, by name, in the order of the engine."""
    found: dict[str, np.ndarray] = {}
    handles: list[Any] = []

    def output(name: str, module: torch.nn.Module) -> None:
        def hook(_: Any, __: Any, out: Any) -> None:
            found[name] = flat(out[0] if isinstance(out, tuple) else out)

        handles.append(module.register_forward_hook(hook))

    def input_of(name: str, module: torch.nn.Module) -> None:
        def hook(_: Any, given: Any) -> None:
            found[name] = flat(given[0])

        handles.append(module.register_forward_pre_hook(hook))

    output("embedding", model.model.embed_tokens)
    for i, layer in enumerate(model.model.layers):
        at, attention, mlp = f"layers.{i}.", layer.self_attn, layer.mlp
        output(at + "input_norm", layer.input_layernorm)
        for name in "qkv":
            output(at + name, getattr(attention, f"{name}_proj"))
        input_of(at + "attention", attention.o_proj)
        output(at + "o_proj", attention.o_proj)
        output(at + "post_norm", layer.post_attention_layernorm)
        output(at + "gate", mlp.gate_proj)
        output(at + "up", mlp.up_proj)
        input_of(at + "silu_mul", mlp.down_proj)
        output(at + "down_proj", mlp.down_proj)
        output(at + "stream", layer)
    output("final_norm", model.model.norm)
    rotated: list[tuple[np.ndarray, np.ndarray]] = []
    rotate = modeling_llama.apply_rotary_pos_emb

    def recording(*args: Any, **kwargs: Any) -> Any:
        q, k = rotate(*args, **kwargs)  # (1, heads, T, D)
        rotated.append((flat(q.transpose(1, 2)), flat(k.transpose(1, 2))))
        return q, k

    modeling_llama.apply_rotary_pos_emb = recording
    try:
        found["logits"] = flat(model(torch.tensor([ids])).logits)
    finally:
        modeling_llama.apply_rotary_pos_emb = rotate
        for handle in handles:
            handle.remove()
    for i, (q, k) in enumerate(rotated):
        found[f"layers.{i}.rope"] = np.concatenate([q, k], axis=1)
        at = f"layers.{i}."
        found[at + "qkv"] = np.concatenate([found.pop(at + name) for name in "qkv"], axis=1)
        found[at + "gate_up"] = np.concatenate([found.pop(at + name) for name in ("gate", "up")], axis=1)
    return found


def main() -> None:
    """Command line."""
    torch.set_grad_enabled(False)
    record = json.loads((HERE / "tiny_stories.json").read_text(encoding="utf-8"))["prompts"][PROMPT]
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager")
    model.train(False)
    arrays = {name: values.astype(np.float16) for name, values in operations(model, record["ids"]).items()}
    np.savez_compressed(
        FOLDER / "golden_operations.npz",
        prompt=np.array(record["prompt"]),
        ids=np.array(record["ids"], np.int32),
        new_ids=np.array(record["new_ids"], np.int32),
        margins=np.array(record["margins"], np.float32),
        **arrays,
    )


if __name__ == "__main__":
    main()
