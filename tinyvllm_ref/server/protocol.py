"""What clients may ask: the requests of OpenAI's API, validated.

Types are strict: a number as a string is refused. A field that no request has is refused by its name, and so is
a field of OpenAI's that this server cannot do, unless its value asks for nothing. Beside OpenAI's fields there
are those that vLLM has: `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`, `stop_token_ids`.
"""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator

from ..sampling_params import SamplingParams
from .errors import ApiError

# Beyond these a request is refused before it can cost anything.
MAX_COMPLETIONS = 128
MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024
MAX_FIELDS = 1024  # of any JSON object

_SAMPLING_FIELDS = (
    *("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "stop"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos"),
)
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(min_length=1)]


def _one_message(message: str) -> WrapValidator:
    """One message for a field of several types, in place of one for each of them."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(message) from None

    return WrapValidator(validate)


def _prompt(value: Any, handler: Any) -> Any:
    """In place of trying one type after the other, which takes seconds for a body of a million numbers."""
    several = isinstance(value, list) and bool(value)
    if isinstance(value, str) or _are_tokens(value) or (several and all(isinstance(v, str) for v in value)):
        return value
    if several and all(_are_tokens(prompt) for prompt in value):
        return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    )


def _are_tokens(value: Any) -> bool:
    """Whether it is a non-empty list of numbers that can be token ids."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token < 2**31 for token in value)
    )


_UNSUPPORTED = _one_message("asks for what this server cannot do; leave it out")
Prompt = Annotated[
    str
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[Token], Field(min_length=1)]
    | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1)],
    WrapValidator(_prompt),
]
Stop = Annotated[
    Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None,
    _one_message(f"must be a non-empty string or a list of at most {MAX_STOPS} of them"),
]


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted; nothing here needs it


class _Request(BaseModel):
    """What both endpoints have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    # vLLM's.
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    # Of no consequence here.
    user: str | None = None
    # Nothing but what asks for nothing.
    logit_bias: Annotated[Annotated[dict[str, Number], Field(max_length=0)] | None, _UNSUPPORTED] = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: goes with stream=true only")
        return self

    @property
    def count(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_params(self, **options: Any) -> SamplingParams:
        """The engine's options; what the request leaves open is the API's default."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{"n": self.count} | given | options)


class CompletionRequest(_Request):
    """``POST /v1/completions``."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Annotated[Literal[""] | None, _UNSUPPORTED] = None

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.count:
            raise ValueError(f"best_of: must equal n ({self.count}): completions are not ranked here")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, each a text or token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class ContentPart(BaseModel):
    """A piece of a message; text is the one kind that a language model reads."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)],
        _one_message("must be a string or a non-empty list of parts of type text"),
    ]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """For a chat template: one text, and the role's older name."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ResponseFormat(BaseModel):
    """Plain text is the one format there is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class ChatRequest(_Request):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    # Of no consequence here.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    # Nothing but what asks for nothing.
    response_format: Annotated[ResponseFormat | None, _UNSUPPORTED] = None
    tools: Annotated[Annotated[list[Any], Field(max_length=0)] | None, _UNSUPPORTED] = None
    tool_choice: Annotated[Literal["none", "auto"] | None, _UNSUPPORTED] = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: goes with logprobs=true only")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens: is the older name of max_completion_tokens; give one of them")
        return self


class _NoRequest(ValueError):
    """JSON's grammar may allow it; no request has it."""


def parse_json(body: bytes) -> Any:
    """A body as JSON.

    Raises
    ------
    ApiError
        It is no UTF-8 or no JSON; a number is NaN, Infinity or endless; a string holds half of a surrogate pair;
        an object names a field twice, or has thousands of them.
    """
    try:
        # json.loads would guess at UTF-16, and let surrogates through.
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
        if r"\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        problem = "the body is not valid JSON: a string holds half of a surrogate pair"
    except RecursionError:
        problem = "the body is nested too deeply"
    except UnicodeDecodeError:
        problem = "the body is not valid UTF-8"
    except json.JSONDecodeError as error:
        problem = f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
    except _NoRequest as error:
        problem = f"the body is not valid JSON: {error}"
    except ValueError:  # an integer of thousands of digits
        problem = "the body is not valid JSON: a number is too long"
    raise ApiError(400, problem, code="invalid_json")


def _no_number(name: str) -> Any:
    raise _NoRequest(f"{name} is no JSON number")


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Of two fields with one name, nobody can know which was meant."""
    found = dict(fields)
    if len(found) != len(fields):
        raise _NoRequest("an object names a field twice")
    if len(found) > MAX_FIELDS:
        raise _NoRequest(f"an object has more than {MAX_FIELDS} fields")
    return found


Kind = TypeVar("Kind", bound=BaseModel)


def validate(kind: type[Kind], value: Any) -> Kind:
    """A request of a kind.

    Raises
    ------
    ApiError
        It is none; the message names the first field that is wrong, and never repeats what the field holds.
    """
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    raise _invalid(kind, first)


def _invalid(kind: type[BaseModel], first: Any) -> ApiError:
    """pydantic's first complaint, in OpenAI's shape."""
    path = _dotted(first["loc"])
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:64]
        near = difflib.get_close_matches(name, kind.model_fields, 1) if len(first["loc"]) == 1 else []
        hint = f"; is {near[0]} meant?" if near else ""
        return ApiError(
            400, f"{path}: this server knows no such field{hint}", param=path, code="unknown_field"
        )
    if first["type"] == "missing":
        return ApiError(400, f"{path}: is missing", param=path, code="missing_field")
    if not path:  # of fields that do not go together; the message begins with one of them
        path, _, problem = problem.partition(": ")
    return ApiError(400, f"{path}: {problem[:1].lower()}{problem[1:]}", param=path, code="invalid_value")


def _dotted(places: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") -> "messages[0].role"."""
    text = ""
    for place in places:
        text += f"[{place}]" if isinstance(place, int) else f".{str(place)[:64]}"
    return text.removeprefix(".")
