"""My own engine: ``python my_engine/generate.py "Once upon a time"``.

Everything that is computed, scheduled, kept and written here is done by the files of this folder; of tinyvllm_ref
there is the device alone, CuPy or its emulation.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import platformdirs

FOLDER = Path(__file__).resolve().parent
if (
    not __package__
):  # run as a program: the folder is a package all the same, and its files import one another
    sys.path[0] = str(FOLDER.parent)
    __package__ = FOLDER.name
    importlib.import_module(__package__)

from tinyvllm_ref import device  # noqa: E402

from .config import EngineConfig, ModelConfig  # noqa: E402
from .inputs import Weights  # noqa: E402
from .sampling_params import SamplingParams  # noqa: E402

# merge_attention, plan_buffers and the conversions on the host are parts, too, that no step of this engine calls.
PARTS = (
    *("read_safetensors", "Tokenizer", "load_weights", "embedding", "rms_norm", "add_rms_norm", "linear"),
    *(
        "rope_frequencies",
        "rope",
        "silu_mul",
        "decoder_layer",
        "forward",
        "argmax",
        "sample",
        "pack",
        "kv_write",
    ),
    *("attention_tiled", "paged_attention", "BlockManager", "Scheduler", "Engine"),
)


def load_parts() -> SimpleNamespace:
    """The parts of this folder, as parts.json lists them."""
    earlier = importlib.import_module(".earlier", __package__)
    return SimpleNamespace(**{name: getattr(earlier, name) for name in PARTS})


def find_model(name: str) -> Path:
    """A model's folder: a path, or the name of one that comes with tinyvllm or was fetched."""
    package = Path(device.__file__).resolve().parent
    home = Path(os.environ.get("TINYVLLM_HOME") or platformdirs.user_data_dir("tinyvllm")).expanduser()
    places = [
        Path(name).expanduser(),
        *(place / name for place in (package / "data", package.parent / "data", home / "models")),
    ]
    for place in places:
        if (place / "config.json").is_file():
            return place
    listed = "".join(f"\n  {place}" for place in places)
    raise SystemExit(f"no model {name!r}: none of these folders has a config.json{listed}")


def open_tensors(folder: Path, read_safetensors: Any) -> dict[str, Any]:
    """All tensors of a model: of its one file, or of the files that its index names."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    return {name: view for file in files for name, view in read_safetensors(folder / file).items()}


def build(folder: Path, options: EngineConfig) -> tuple[Any, Any, Any]:
    """A model's folder -> its engine, its tokenizer, and the parts."""
    parts = load_parts()
    config = ModelConfig.from_json(folder)
    arrays = parts.load_weights(open_tensors(folder, parts.read_safetensors), config)
    model = SimpleNamespace(config=config, weights=Weights(config, arrays, parts.rope_frequencies(config)))
    return parts.Engine(model, parts, options), parts.Tokenizer(folder), parts


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, and write the texts that were asked for."""
    parser = argparse.ArgumentParser(prog="generate.py", description="Write on with an engine of your own.")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="one or more; they are served together")
    parser.add_argument("--model", default="tiny-stories", help="a folder, or a name (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="of each completion (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the most probable token (the default)"
    )
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stop", action="append", default=[], help="a text to stop in front of; may be repeated"
    )
    parser.add_argument("--num-blocks", type=int, default=None, help="of the KV cache (default: what fits)")
    asked = parser.parse_args(arguments)
    try:
        params = SamplingParams(
            max_tokens=asked.max_tokens, temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k,
            seed=asked.seed, stop=asked.stop,
        )  # fmt: skip
        options = EngineConfig(num_blocks=asked.num_blocks)
        with running_fast():
            write(asked.prompts, params, *build(find_model(asked.model), options)[:2])
    except (ValueError, MemoryError) as error:
        raise SystemExit(f"generate.py: {error}") from None


def write(prompts: list[str], params: SamplingParams, engine: Any, tokenizer: Any) -> None:
    """One text as it comes, or several one under the other when all are done."""
    generate = importlib.import_module(".text", __package__).generate
    streamed, begun = len(prompts) == 1, False

    def show(number: int, piece: str) -> None:
        nonlocal begun
        if streamed:
            print(piece if begun else prompts[0] + piece, end="", flush=True)
            begun = True

    outputs = generate(engine, tokenizer, prompts, [params] * len(prompts), show)
    if begun:
        print()
    else:
        print("\n\n".join(prompt + text for prompt, (text, _) in zip(prompts, outputs, strict=True)))


def running_fast() -> AbstractContextManager[Any]:
    """In the emulation, run kernels without checking each access, unless TINYVLLM_CHECKS=full is set."""
    if device.is_gpu or os.environ.get("TINYVLLM_CHECKS") == "full":
        return nullcontext()
    return device.cp.checks("fast")  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
