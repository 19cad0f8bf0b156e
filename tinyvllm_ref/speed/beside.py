"""Hugging Face transformers on the same sizes, where torch and transformers are installed: to be compared with."""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ..config import ModelConfig
from ..device import is_gpu
from .timing import Measurement

Mode = Literal["eager", "compiled"]
_WARM_TOKENS = 4
_COMPILED_WARM_RUNS = 2  # the first compiles, the second records the graphs of the card


def missing() -> str:
    """Why transformers can not be measured here; "" where it can."""
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed"
    if is_gpu:
        import torch

        if not torch.cuda.is_available():
            return f"torch {torch.__version__} finds no card"
    return ""


def version() -> str:
    """Such as ``"transformers 5.17.0, torch 2.9.0"``."""
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}"


def from_two_runs(batch: int, prompt: int, tokens: int, seconds: float, first: float) -> Measurement:
    """A whole run and one that was left at its first token -> what both say of a token."""
    between = (seconds - first) / (tokens - 1) if tokens > 1 and seconds > first else None
    context = None if between is None else prompt + tokens / 2  # the first of tokens - 1 steps has prompt + 1
    return Measurement(batch, prompt, tokens, seconds, first, between, context)


def hugging_face_fields(config: ModelConfig) -> dict[str, Any]:
    """A model's sizes as ``LlamaConfig`` of transformers takes them."""
    scaling = config.rope_scaling
    rope: dict[str, Any] | None = {"rope_type": scaling.rope_type, "factor": scaling.factor}
    if scaling.rope_type == "default":
        rope = None
    elif scaling.rope_type == "llama3" and rope is not None:
        rope["low_freq_factor"] = scaling.low_freq_factor
        rope["high_freq_factor"] = scaling.high_freq_factor
        rope["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
        "tie_word_embeddings",
    )
    fields = {name: getattr(config, name) for name in names}
    return fields | {"rope_scaling": rope, "bos_token_id": config.bos_token_id, "eos_token_id": None}


class Beside:
    """A model of transformers in BF16, on the card where there is one.

    Parameters
    ----------
    config : ModelConfig
    folder : PathLike or None
        Of the checkpoint; None for random weights.
    """

    def __init__(self, config: ModelConfig, folder: str | os.PathLike[str] | None) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        device = torch.device("cuda" if is_gpu else "cpu")
        kind: Any = transformers.LlamaForCausalLM
        if folder is not None:
            self._model = kind.from_pretrained(os.fspath(folder)).to(device, torch.bfloat16)
        else:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                with device:  # made where it stays
                    self._model = kind(transformers.LlamaConfig(**hugging_face_fields(config)))
            finally:
                torch.set_default_dtype(before)
        self._model.eval()
        # Nothing ends a text early, and nothing but the largest logit is asked for.
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        self._vocab_size = config.vocab_size

    def measure(self, batch: int, prompt: int, tokens: int, repeats: int, mode: Mode) -> Measurement:
        """One batch, in medians over `repeats` runs.

        The time of a token is what a whole run takes beyond one that is left at its first token, over the tokens that
        this makes: nothing waits for the tokens between.
        """
        options: dict[str, Any] = {}
        if mode == "compiled":
            # Compiled anew for each batch, for its sizes alone. Given a static cache, generate compiles by itself.
            self._torch._dynamo.reset()
            options["cache_implementation"] = "static"
            for _ in range(_COMPILED_WARM_RUNS):
                self._generate(self._prompts(batch, prompt), tokens, options)
        else:
            self._generate(self._prompts(batch, prompt), min(tokens, _WARM_TOKENS), options)
        first: list[float] = []
        whole: list[float] = []
        for _ in range(repeats):
            first.append(self._first_token(self._prompts(batch, prompt), tokens, options))
            whole.append(self._generate(self._prompts(batch, prompt), tokens, options))
        return from_two_runs(batch, prompt, tokens, statistics.median(whole), statistics.median(first))

    def _prompts(self, batch: int, prompt: int) -> Any:
        high = min(1000, self._vocab_size)
        return self._torch.randint(0, high, (batch, prompt), device=self._model.device)

    def _generate(self, ids: Any, tokens: int, options: dict[str, Any], streamer: Any = None) -> float:
        """Seconds that it takes."""
        self._wait()
        began = time.perf_counter()
        with self._torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=tokens,
                streamer=streamer,
                **options,
            )
        self._wait()
        seconds = time.perf_counter() - began
        if out.shape[1] != ids.shape[1] + tokens:
            raise RuntimeError(f"generate gave {out.shape[1] - ids.shape[1]} tokens of {tokens}")
        return seconds

    def _first_token(self, ids: Any, tokens: int, options: dict[str, Any]) -> float:
        """Seconds until the first token is on the host; the run is left there."""
        self._wait()
        began = time.perf_counter()
        try:
            self._generate(ids, tokens, options, _UntilFirstToken())
        except _FirstToken as came:
            return came.at - began
        raise RuntimeError("generate gave no token to its streamer")

    def _wait(self) -> None:
        if is_gpu:
            self._torch.cuda.synchronize()


class _FirstToken(Exception):
    """Leaves `generate`."""

    def __init__(self, at: float) -> None:
        self.at = at


class _UntilFirstToken:
    """A streamer: it is given the prompts, then the tokens of each step, once they are on the host."""

    def __init__(self) -> None:
        self._calls = 0

    def put(self, value: Any) -> None:
        self._calls += 1
        if self._calls == 2:
            raise _FirstToken(time.perf_counter())

    def end(self) -> None:
        """Nothing is kept."""


def measure_beside(
    config: ModelConfig,
    folder: str | os.PathLike[str] | None,
    batches: Sequence[int],
    prompt: int,
    tokens: int,
    repeats: int,
    modes: Sequence[Mode],
    make: Callable[..., Beside] = Beside,
) -> Iterator[tuple[Mode, Measurement | str]]:
    """Every batch in every mode: a measurement, or one line that says what went wrong."""
    made: Beside | None = None
    try:
        try:
            made = make(config, folder)
        except Exception as error:
            yield modes[0], f"the model: {_line(error)}"
            return
        for mode in modes:
            for batch in batches:
                try:
                    yield mode, made.measure(batch, prompt, tokens, repeats, mode)
                except Exception as error:
                    yield mode, f"batch {batch}: {_line(error)}"
    finally:
        del made
        _free()


def _free() -> None:
    gc.collect()
    if is_gpu and importlib.util.find_spec("torch") is not None:
        import torch

        torch.cuda.empty_cache()


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


__all__ = ["Beside", "Measurement", "Mode", "hugging_face_fields", "measure_beside", "missing", "version"]
