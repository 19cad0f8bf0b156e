"""``LLM``: prompts in, text out. Tokenizes, drives the engine, detokenizes.

>>> llm = LLM("tiny-stories")  # doctest: +SKIP
>>> llm.generate("Once upon a time", SamplingParams(max_tokens=64, temperature=0))[0].outputs[0].text  # doctest: +SKIP
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import parts as _parts
from .assembly import build_model, for_engine
from .checkpoint.names import resolve
from .checkpoint.weights import open_checkpoint
from .config import EngineConfig, ModelConfig
from .lost_device import losses_named
from .model import Model
from .model_runner import all_logits
from .outputs import CompletionOutput, RequestOutput
from .request import Request
from .sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, ready to generate.

    Parameters
    ----------
    model : str or PathLike
        ``tiny-stories``, a name that ``tinyvllm fetch`` knows, or a folder (``./NAME``).
    parts : Parts, optional
        Such as ``Parts.mine()``; what is missing comes from the reference.
    config : EngineConfig, optional
        How the engine runs.
    **options
        Fields of :class:`~tinyvllm_ref.config.EngineConfig`, in place of `config`.

    Attributes
    ----------
    config : ModelConfig
    engine_config : EngineConfig
    engine : Engine
    tokenizer : Tokenizer
        None where :meth:`from_model` was given none.
    model : Model
    parts : Parts
        What the engine is made of: those given, completed by the reference's.
    folder : Path or None
        Of the checkpoint.

    Raises
    ------
    FileNotFoundError
        There is no such model.
    ValueError
        The checkpoint or an option cannot be used; the message names it.
    MemoryError
        The device has no room for weights, activations or cache; the message says what to lower.
    DeviceLost
        This process can not use the device any more. All methods that compute raise it, too.

    Examples
    --------
    >>> llm = LLM("tiny-stories", max_num_seqs=8)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        parts: _parts.Parts | None = None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        engine_config = _engine_config(config, options)
        folder = resolve(model)
        given = parts or _parts.Parts()
        model_config, views = open_checkpoint(folder, given.read_safetensors)
        with losses_named():
            built = build_model(model_config, views, given)
        del views  # and with them the map of the files
        tokenizer: Any = built.parts.Tokenizer(folder)  # type: ignore[misc]
        self._start(built, tokenizer, folder, engine_config)

    @classmethod
    def from_model(
        cls,
        model: Model,
        tokenizer: Any = None,
        *,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> LLM:
        """The same around a model that is in memory.

        Parameters
        ----------
        model : Model
            As :func:`~tinyvllm_ref.assembly.build_model` makes it.
        tokenizer : Tokenizer, optional
            Without one, prompts are token ids and outputs have no text.
        config, **options
            As for :class:`LLM`.

        Raises
        ------
        ValueError
            An option cannot be used; the message names it.
        """
        made = cls.__new__(cls)
        made._start(model, tokenizer, None, _engine_config(config, options))
        return made

    def _start(self, model: Model, tokenizer: Any, folder: Path | None, engine_config: EngineConfig) -> None:
        self.engine_config = engine_config
        self.folder: Any = folder
        self.config: ModelConfig = model.config
        self.model = model
        self.parts: Any = model.parts
        self.tokenizer = tokenizer
        make: Any = self.parts.Engine
        self._engine_makes_text = self.parts.owners()["Engine"] == "reference"
        with losses_named():  # the reference's engine names them itself, a learner's does not
            if self._engine_makes_text:
                self.engine: Any = make(model, self.parts, engine_config, tokenizer)
            else:
                self.engine = make(model, for_engine(self.parts), engine_config)
        self._ids = itertools.count()
        # Of every request that someone waits for, its latest output: several streams may be open at once, and a
        # step that one of them makes gets the others on, too.
        self._latest: dict[str, RequestOutput | None] = {}
        self._dropped: list[str] = []  # requests of streams that are gone

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them at once.

        Parameters
        ----------
        prompts : str, sequence of int, or a sequence of these
            Texts, or token ids.
        sampling_params : SamplingParams or a sequence of them, optional
            One for all, or one for each.
        use_tqdm : bool, optional
            Show progress on stderr; by default for more than one prompt, and on a terminal only.

        Returns
        -------
        list of RequestOutput
            In the order of the prompts.

        Raises
        ------
        ValueError
            A prompt is empty or too long, or there are more or fewer options than prompts.
        """
        many = _as_list(prompts)
        params = _one_each(sampling_params, len(many))
        return self._run([(self._encode(prompt), prompt) for prompt in many], params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, by the model's chat template.

        Parameters
        ----------
        messages : sequence of mapping, or a sequence of these
            Each message has ``"role"`` and ``"content"``, both strings.
        sampling_params, use_tqdm
            As for :meth:`generate`.

        Raises
        ------
        ValueError
            A message is malformed (it is named by its number), the model has no chat template, or that refuses a
            conversation; or as for :meth:`generate`.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise TypeError(f"chat: messages is {messages!r}; it must be a sequence of messages")
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        params = _one_each(sampling_params, len(conversations))
        texts = [self._template().apply_chat_template(conversation) for conversation in conversations]
        prompts: list[tuple[list[int], Prompt]] = [
            (self._template().encode(text, add_special_tokens=False), text) for text in texts
        ]
        return self._run(prompts, params, use_tqdm)

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Complete one prompt (or answer one conversation) and give the text piece by piece, as it comes.

        Leaving the loop early aborts the request, and so does dropping the iterator before its first piece.

        Raises
        ------
        ValueError
            As for :meth:`generate`; more than one completion cannot be streamed as one text.
        """
        self._require_tokenizer("stream gives text")
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"stream: n is {params.n}; it must be 1")
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            ids = self._template().encode_chat(prompt)
        else:
            ids = self._encode(prompt)  # type: ignore[arg-type]
        # Added here and not at the first piece, so that a wrong prompt is refused where it was given.
        request_id = self._add(ids, prompt if isinstance(prompt, str) else None, params)
        pieces = self._pieces(request_id)
        # A generator that was never started ends without a word. It may end at any moment, in the midst of a step,
        # too: so its request is put down here, and aborted before the next step.
        weakref.finalize(pieces, self._dropped.append, request_id).atexit = False
        return pieces

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """The model's answer at every position of a sequence.

        Parameters
        ----------
        token_ids : sequence of int

        Returns
        -------
        (len(token_ids), V) float32, NumPy
            Row i says what comes after token i.

        Raises
        ------
        ValueError
            The sequence is empty, longer than the model's context, or has an id outside the vocabulary.
        """
        ids = [int(token) for token in token_ids]
        limit = self.config.max_position_embeddings
        if not 1 <= len(ids) <= limit:
            raise ValueError(f"logits: {len(ids)} tokens were given; there must be 1 to {limit}")
        for token in (min(ids), max(ids)):
            if not 0 <= token < self.config.vocab_size:
                raise ValueError(
                    f"logits: token id {token}; ids must be from 0 to {self.config.vocab_size - 1}"
                )
        return all_logits(self.model, self.parts, ids)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            self._require_tokenizer(f"a prompt is {prompt!r}")
            return list(self.tokenizer.encode(prompt))
        if not isinstance(prompt, Sequence) or not all(
            issubclass(kind, int | np.integer) for kind in set(map(type, prompt))
        ):
            raise TypeError(f"a prompt is {prompt!r}; it must be a str or a sequence of token ids")
        return list(map(int, prompt))

    def _template(self) -> Any:
        """The tokenizer that has the chat template: a learner's need not."""
        self._require_tokenizer("chat takes and gives text")
        if hasattr(self.tokenizer, "apply_chat_template"):
            return self.tokenizer
        from .tokenizer import Tokenizer

        if self.folder is None:
            raise ValueError("chat: the tokenizer of this LLM has no chat template, and no folder has one")
        return Tokenizer(self.folder)

    def _require_tokenizer(self, what: str) -> None:
        if self.tokenizer is None:
            raise ValueError(f"{what}, and this LLM has no tokenizer; give token ids to generate")

    def _add(self, ids: list[int], prompt: str | None, params: SamplingParams) -> str:
        request_id = str(next(self._ids))
        request = Request(request_id, ids, params, self.config.eos_token_ids)
        if self._engine_makes_text:
            self.engine.add_request(request, prompt)
        else:
            self.engine.add_request(request)
        self._latest[request_id] = None
        return request_id

    def _step(self) -> None:
        while self._dropped:
            request_id = self._dropped.pop()
            if request_id in self._latest:  # else it was read to its end, or left and aborted
                self._forget(request_id)
        with losses_named():
            outputs = self.engine.step()
        for output in outputs:
            if output.request_id in self._latest:
                self._latest[output.request_id] = self._with_text(output)

    def _forget(self, request_id: str) -> None:
        """Nobody waits for it any more: an error, Ctrl-C or a stream that is left leaves nothing behind."""
        output = self._latest.pop(request_id)
        if output is None or not output.finished:
            self.engine.abort(request_id)

    def _run(
        self,
        prompts: Sequence[tuple[list[int], Prompt]],
        params: Sequence[SamplingParams],
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        added: list[str] = []
        try:
            for (ids, prompt), one in zip(prompts, params, strict=True):
                added.append(self._add(ids, prompt if isinstance(prompt, str) else None, one))
            outputs = self._wait_for(added, use_tqdm)
        finally:
            for request_id in added:
                self._forget(request_id)
        return outputs

    def _wait_for(self, added: Sequence[str], use_tqdm: bool | None) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with _Progress(len(added), use_tqdm) as progress:
            while len(done) < len(added):
                self._step()
                for request_id in added:
                    output = self._latest[request_id]
                    if request_id not in done and output is not None and output.finished:
                        done[request_id] = output
                        progress.advance(output)
        return [done[request_id] for request_id in added]

    def _pieces(self, request_id: str) -> Iterator[str]:
        shown = 0
        try:
            while True:
                output = self._latest[request_id]
                text = "" if output is None else self._stable_text(output)
                if len(text) > shown:
                    yield text[shown:]
                    shown = len(text)
                elif output is not None and output.finished:
                    return
                else:
                    self._step()
        finally:
            self._forget(request_id)

    def _stable_text(self, output: RequestOutput) -> str:
        """The text so far that later tokens do not change."""
        text = output.outputs[0].text
        if self._engine_makes_text or output.finished:
            return text
        # Decoded from all tokens: a character whose bytes have not all come stands at the end as U+FFFD.
        return text.rstrip("\ufffd")

    def _with_text(self, output: RequestOutput) -> RequestOutput:
        """The output of an engine that knows tokens only, with the text of them."""
        if not self._engine_makes_text and self.tokenizer is not None:
            for completion in output.outputs:
                completion.text = self.tokenizer.decode(completion.token_ids)
        return output


class _Progress:
    """A tqdm bar over prompts, with the rate of tokens."""

    def __init__(self, total: int, wanted: bool | None) -> None:
        self._bar: Any = None
        self._tokens = 0
        if total > 1 if wanted is None else wanted:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, unit="prompt", desc="generate", disable=None if wanted is None else False
            )

    def __enter__(self) -> _Progress:
        return self

    def advance(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._tokens += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = self._bar.format_dict["elapsed"] or 1e-9
        self._bar.set_postfix_str(f"{self._tokens / seconds:.1f} tokens/s", refresh=False)
        self._bar.update()

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _engine_config(config: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    """How the engine runs, given in one of two ways."""
    if config is not None and options:
        raise ValueError(f"LLM: config and {', '.join(options)} were given; put them all into config")
    return config or EngineConfig(**options)


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several -> several."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts is {prompts!r}; it must be a str, token ids, or a sequence of these")
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]
    return list(prompts)


def _one_each(params: Any, count: int) -> list[SamplingParams]:
    """Options for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    given = list(params)
    if len(given) != count:
        raise ValueError(
            f"{len(given)} sampling_params were given for {count} prompts; give one, or one for each"
        )
    return given
