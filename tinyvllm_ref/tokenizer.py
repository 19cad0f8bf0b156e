"""Text to token ids and back, on the `tokenizers` library: chat template, and decoding of a stream.

>>> tokenizer = Tokenizer("data/tiny-stories")  # doctest: +SKIP
>>> stream = tokenizer.stream()  # doctest: +SKIP
>>> for token in generated:  # doctest: +SKIP
...     print(stream.push(token), end="")
>>> print(stream.end())  # doctest: +SKIP
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as _Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class TextStream(Protocol):
    """Decodes tokens as they come. Joined, the pieces are what decoding all tokens at once gives."""

    def push(self, token: int) -> str:
        """The text that is certain with this token and was not before: often "", never half a character."""

    def end(self) -> str:
        """What was held back: a character that was never completed, as U+FFFD."""


class Tokenizer:
    """A model's tokenizer.

    Parameters
    ----------
    path : str or PathLike
        The model's folder (``tokenizer.json``, and where they exist ``tokenizer_config.json`` and
        ``chat_template.jinja``), or its ``tokenizer.json``.

    Attributes
    ----------
    bos_token, eos_token : str or None
        As ``tokenizer_config.json`` names them.
    bos_token_id, eos_token_id : int or None
        Their ids.
    chat_template : str or None
        Source of the Jinja template that makes one prompt of a conversation.

    Raises
    ------
    FileNotFoundError
        There is no ``tokenizer.json``.
    ValueError
        A file is malformed; the message names it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(
                f"no tokenizer.json at {file}; a model's folder has one beside its weights"
            )
        try:
            self._tokenizer = _Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{file}: is not a tokenizer: {error}") from None
        # Padding and truncation are for training batches; a prompt is neither lengthened nor silently cut.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        settings = _read_settings(file.with_name("tokenizer_config.json"))
        self.bos_token = _token_text(settings.get("bos_token"))
        self.eos_token = _token_text(settings.get("eos_token"))
        self.bos_token_id = self._id(self.bos_token)
        self.eos_token_id = self._id(self.eos_token)
        self._add_bos = settings.get("add_bos_token") is True
        self.chat_template = _read_template(file.with_name("chat_template.jinja"), settings)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._make_stream = _stream_kind(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included; a model's table may have more rows."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Parameters
        ----------
        text : str
        add_special_tokens : bool
            Begin as the model was trained to begin, usually with BOS. A text that begins with BOS already, as
            one made by a chat template does, gets no second one.

        Raises
        ------
        TypeError
            `text` is not a str.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode: text is a {type(text).__name__}; it must be a str")
        ids = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        bos = self.bos_token_id
        if add_special_tokens and bos is not None:
            if self._add_bos and ids[:1] != [bos]:
                ids.insert(0, bos)
            elif ids[:2] == [bos, bos]:
                del ids[0]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are no UTF-8 become U+FFFD; an id that no token has gives nothing.

        Raises
        ------
        ValueError
            An id is negative.
        """
        ids = [int(token) for token in ids]
        if ids and min(ids) < 0:
            raise ValueError(f"decode: token id {min(ids)} is negative")
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for the tokens of one completion as they come."""
        return self._make_stream(self._tokenizer, self._special_ids if skip_special_tokens else frozenset())

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, as the API's log probabilities list them."""
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._make_stream is _ByteLevelStream:
            return _byte_level_bytes(text)
        if _BYTE_TOKEN.fullmatch(text):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """One prompt of a conversation, by the model's own template.

        Parameters
        ----------
        messages : sequence of mapping
            Each with ``"role"`` and ``"content"``, both strings; one with ``"tool_calls"`` needs no content.
        add_generation_prompt : bool
            End where the assistant's answer begins.
        **variables
            Further variables for the template, such as ``tools``.

        Raises
        ------
        ValueError
            The model has no template, the template refuses the conversation, or a message is malformed.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template (tokenizer_config.json or chat_template.jinja)")
        if not messages:
            raise ValueError("messages is empty; a conversation has at least one message")
        for index, message in enumerate(messages):
            _check_message(f"messages[{index}]", message)
        names = {"bos_token": self.bos_token or "", "eos_token": self.eos_token or "", "tools": None}
        return _render(
            self.chat_template,
            {**names, **variables, "messages": messages, "add_generation_prompt": add_generation_prompt},
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation. The template wrote the special tokens; none is added."""
        return self.encode(self.apply_chat_template(messages, **variables), add_special_tokens=False)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)


def _check_message(place: str, message: Any) -> None:
    """A template would write ``None`` into the prompt, or a list as Python prints it. No text of it is told."""
    if not isinstance(message, Mapping):
        raise ValueError(
            f"{place} is of type {type(message).__name__}; it must be a mapping with role and content"
        )
    for name in ("role", "content"):
        value = message.get(name)
        if isinstance(value, str) or (name == "content" and value is None and message.get("tool_calls")):
            continue
        has = f"{name} is of type {type(value).__name__}" if name in message else f"{name} is missing"
        fields = ", ".join(str(key)[:64] for key in message) or "nothing"
        raise ValueError(f"{place}: {has} (it has {fields}); role and content must be there, both strings")


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: holds a JSON {type(settings).__name__}; it must hold an object")
    return settings


def _token_text(token: Any) -> str | None:
    """A token of tokenizer_config.json: a string, or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_template(path: Path, settings: dict[str, Any]) -> str | None:
    """The chat template: a file of its own, else the settings' one, or that of several named default."""
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _render(source: str, variables: dict[str, Any]) -> str:
    """Run a template in Jinja's sandbox (it came with the weights), with what transformers gives it."""
    import datetime

    import jinja2
    import jinja2.sandbox

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    try:
        return environment.from_string(source).render(**variables)
    except (jinja2.TemplateError, TypeError, OverflowError) as error:
        raise ValueError(f"the chat template refuses this conversation: {error}") from error


class _ByteLevelStream:
    """For tokenizers whose tokens are bytes (GPT-2's kind): they go through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: _Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        text = None if token in self._skipped else self._tokenizer.id_to_token(token)
        return "" if text is None else self._utf8.decode(_byte_level_bytes(text))

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """For all others: decodes the last tokens together, and holds back what the next token could still
    change.

    What a token gives can depend on those before it (a space is dropped at the start of a text, and a run of
    byte tokens is text only as a whole), so the tokens of the last piece are decoded again in front of the
    new ones.
    """

    def __init__(self, tokenizer: _Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        text = None if token in self._skipped else self._tokenizer.id_to_token(token)
        if text is None:
            return ""
        self._pending.append(token)
        # The next byte could make the whole run invalid, and then every byte of it becomes a U+FFFD.
        if _BYTE_TOKEN.fullmatch(text):
            return ""
        piece = self._piece()
        return "" if piece.endswith(_REPLACEMENT) else self._emit(piece)

    def end(self) -> str:
        return self._emit(self._piece())

    def _piece(self) -> str:
        """The text of the pending tokens, after that of the context."""
        context = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(context) :]

    def _emit(self, piece: str) -> str:
        if piece:
            self._context = self._pending
        else:
            self._context = self._context + self._pending
        self._pending = []
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _stream_kind(tokenizer: _Tokenizer) -> type[_ByteLevelStream] | type[_WindowStream]:
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    parts = decoder.get("decoders", [decoder])
    return _ByteLevelStream if [part.get("type") for part in parts] == ["ByteLevel"] else _WindowStream


def _byte_level_characters() -> dict[str, int]:
    """GPT-2's map of printable characters to bytes: most stand for themselves, the others for 256 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_level_characters()


def _byte_level_bytes(text: str) -> bytes:
    """The bytes of a token; a token with a character outside the map (an added one) stands for itself."""
    try:
        return bytes([_BYTE_OF[character] for character in text])
    except KeyError:
        return text.encode()
