"""Lesson 24: a conversation as a prompt, text as events, one loop for many clients, clients that go, the server."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tinyvllm_ref.checkpoint.names import REPOSITORY, resolve
from tinyvllm_ref.course import serving
from tinyvllm_ref.course.exercise import Case, EngineCard, Exercise, Hints, Lesson, Mistake, with_changes
from tinyvllm_ref.tokenizer import _render


def _changed(text: str, *changes: tuple[str, str]) -> str:
    return with_changes(text, changes)


# ---------------- 24.1: a conversation as one prompt

_CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou tell stories.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_HEADERS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('there are no tools here') }}{% endif %}"
    "{{ '<|head|>' + message['role'] + '<|/head|>\n\n' + message['content'] | trim + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)


@functools.cache
def _tiny() -> tuple[str, dict[str, Any]]:
    """tokenizer.json and settings of the course's model: its tokenizer begins every text with BOS."""
    folder = resolve("tiny-stories")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = ("chat_template", "bos_token", "eos_token")
    return (folder / "tokenizer.json").read_text(encoding="utf-8"), {name: settings[name] for name in names}


@functools.cache
def _other(special: tuple[str, ...], bos: str) -> str:
    """Another tokenizer.json: these special tokens, and no BOS in front by itself."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[bos, *special] if bos else [*special], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([(REPOSITORY / "data" / "prompts.txt").read_text(encoding="utf-8")], trainer)
    return made.to_str()


def _chat_cases(rng: np.random.Generator) -> list[Case]:
    tiny, tiny_settings = _tiny()
    chatml = {"chat_template": _CHATML, "bos_token": None, "eos_token": "<|im_end|>"}
    headers = {"chat_template": _HEADERS, "bos_token": "<|begin|>", "eos_token": "<|eot|>"}
    name = str(rng.choice(["Pip", "Mia", "Leo", "Ella"]))

    def case(label: str, messages: list[tuple[str, str]], group: str, kind: str = "tiny") -> Case:
        tokenizer, settings = {
            "tiny": (tiny, tiny_settings),
            "chatml": (_other(("<|im_start|>", "<|im_end|>"), ""), chatml),
            "headers": (_other(("<|head|>", "<|/head|>", "<|eot|>"), "<|begin|>"), headers),
        }[kind]
        said = [{"role": role, "content": content} for role, content in messages]
        return Case(label, {"messages": said, "settings": settings, "tokenizer": tokenizer}, group)

    talk = [
        ("system", "You tell short stories."),
        ("user", f"Who is {name}?"),
        ("assistant", f"{name} is a fox."),
        ("user", "What does the fox like?"),
    ]
    return [
        case("one word", [("user", "Hi")], "small"),
        case("a question", [("user", f"Tell me a story about {name}.")], "small"),
        case("a conversation of four messages", talk, "conversation"),
        case(
            "a template without BOS, and with a system message of its own",
            [("user", "Hi")],
            "others",
            "chatml",
        ),
        case("a tokenizer that adds no BOS", [("user", "Hi")], "others", "headers"),
        case("the same, four messages", talk, "others", "headers"),
        case("café and 🐈, blanks around", [("user", "  a café, a 🐈\n")], "others"),
        case("a role that the template refuses", [("tool", "42")], "others", "headers"),
    ]


def _run_chat(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(inputs["tokenizer"])
    try:
        ids = [int(id) for id in answer(inputs["messages"], inputs["settings"], tokenizer)]
    except ValueError:  # the template refuses
        return {"prompt": "a ValueError", "ids": []}
    return {"prompt": tokenizer.decode(ids, skip_special_tokens=False), "ids": ids}


def _expect_chat(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The reference's rendering, which is tested against transformers', encoded by the library with nothing added."""
    settings = inputs["settings"]
    names = {"bos_token": settings["bos_token"] or "", "eos_token": settings["eos_token"], "tools": None}
    try:
        text = _render(
            settings["chat_template"],
            {**names, "messages": inputs["messages"], "add_generation_prompt": True},
        )
    except ValueError:
        return {"prompt": "a ValueError", "ids": []}
    tokenizer = tokenizers.Tokenizer.from_str(inputs["tokenizer"])
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return {"prompt": tokenizer.decode(ids, skip_special_tokens=False), "ids": ids}


_CHAT_TEXT = """import jinja2
import jinja2.sandbox


def refuse(message):
    raise ValueError(message)


def encode_chat(messages, settings, tokenizer):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(settings["chat_template"])
    text = template.render(
        messages=messages,
        bos_token=settings["bos_token"] or "",
        eos_token=settings["eos_token"],
        add_generation_prompt=True,
    )
    return tokenizer.encode(text, add_special_tokens=False).ids
"""


def _chat(*changes: tuple[str, str]) -> str:
    return _changed(_CHAT_TEXT, *changes)


_NO_SPECIAL = "tokenizer.encode(text, add_special_tokens=False).ids"
_RENDER = _CHAT_TEXT.partition("    text = ")[2].partition("    return")[0]

_CHAT = Exercise(
    id="24.1",
    title="a conversation as one prompt",
    answer="encode_chat",
    kind="function",
    arguments=("messages", "settings", "tokenizer"),
    cases=_chat_cases,
    run=_run_chat,
    expected=_expect_chat,
    points={"small": 1, "conversation": 1, "others": 2},
    hints=Hints(
        question="Take {case}. Print the text that the template made, and below it the tokens of your ids. What stands in the one and not in the other?",
        rule="The template writes the whole prompt: BOS where the model wants one, roles, contents, and at the end the beginning of the answer. Give it "
        "messages, bos_token, eos_token and add_generation_prompt=True. Then the text becomes ids, and nothing may be added to it.\n\n"
        "By hand, tiny-stories: [{'role': 'user', 'content': 'Hi'}] gives <|bos|><|user|>Hi<|end|><|assistant|>, and that is one token for each of "
        "the names in <| |>, and one or more for Hi. tokenizer.encode(text) would put a second <|bos|> in front.",
        code="""text = template.render(
    messages=____,
    bos_token=settings["bos_token"] or "",
    eos_token=____,
    add_generation_prompt=____,
)
return tokenizer.encode(text, add_special_tokens=____).ids""",
    ),
    mistakes=(
        Mistake(
            "a second BOS",
            _chat((_NO_SPECIAL, "tokenizer.encode(text).ids")),
            "The template has written BOS already, and tokenizer.encode puts another one in front, as it does with any text. The model has never seen two. Nothing "
            "complains, and the answers get a little worse: that is why this fault lives so long.",
            "Decode your first two ids. Who made the first, and who the second?",
            variants=(_chat((_NO_SPECIAL, "tokenizer.encode(text, add_special_tokens=True).ids")),),
        ),
        Mistake(
            "the template without BOS, the tokenizer with",
            _chat(('settings["bos_token"] or ""', '""'), (_NO_SPECIAL, "tokenizer.encode(text).ids")),
            "You take BOS out of the template and let the tokenizer add it. With this model's tokenizer the two are the same; a tokenizer that adds nothing then leaves "
            "the prompt without. The template knows what its model wants: let it write everything.",
            "Which of the tokenizers in this exercise adds a BOS, and which does not?",
        ),
        Mistake(
            "the first id cut off by hand",
            _chat((_NO_SPECIAL, "tokenizer.encode(text).ids[1:]")),
            "Cutting off the first id mends the double BOS of this model's tokenizer. Another tokenizer adds none, and then the template's own BOS is gone, or the first "
            "token of the text. Do not add it in the first place.",
            "What is the first id of a tokenizer that adds nothing?",
        ),
        Mistake(
            "no bos_token for the template",
            _chat(('        bos_token=settings["bos_token"] or "",\n', "")),
            "In Jinja a name that nobody gave is the empty text, without an error. The template says {{ bos_token }}, so the prompt now begins without BOS.",
            "What does the template print for a variable that it was not given?",
            variants=(_chat(('settings["bos_token"] or ""', '""')),),
        ),
        Mistake(
            "no eos_token for the template",
            _chat(('        eos_token=settings["eos_token"],\n', "")),
            "Another model's template writes eos_token behind each message. A name that nobody gave prints as nothing, and joined to a text with + it is an error. Give the template both tokens.",
            "Which names does this template use, and which of them did you give it?",
        ),
        Mistake(
            "no place for the answer",
            _chat(("        add_generation_prompt=True,\n", "")),
            "The prompt ends with the end of the user's message. Who speaks next is left to the model, which may well go on as the user. With add_generation_prompt=True the "
            "template ends where the assistant's words begin.",
            "With what does the prompt end? Whose words come after that?",
            variants=(_chat(("add_generation_prompt=True", "add_generation_prompt=False")),),
        ),
        Mistake(
            "only the last message",
            _chat(("messages=messages,", "messages=messages[-1:],")),
            "A model remembers nothing between two requests. The client sends the whole conversation each time, and all of it belongs to the prompt.",
            "\"What does the fox like?\" Which fox?",
        ),
        Mistake(
            "a template of one's own",
            _chat(
                ("    text = " + _RENDER, '    text = "".join(f"{one[\'role\']}: {one[\'content\']}\\n" for one in messages) + "assistant:"\n'),
                (_NO_SPECIAL, "tokenizer.encode(text).ids"),
            ),
            "That looks like a conversation, to you. The model was trained on its own form of one, with special tokens that no text can contain, and the file says what it "
            "looks like.",
            "Which tokens of your prompt has the model seen in front of a user's words?",
            variants=(
                _chat(("    text = " + _RENDER, '    text = "".join(f"{one[\'role\']}: {one[\'content\']}\\n" for one in messages) + "assistant:"\n')),
                _chat(("    text = " + _RENDER, '    text = messages[-1]["content"]\n'), (_NO_SPECIAL, "tokenizer.encode(text).ids")),
            ),
        ),
    ),
)  # fmt: skip


# ---------------- 24.2: text as events


def _event_cases(rng: np.random.Generator) -> list[Case]:
    def case(label: str, pieces: list[bytes], group: str) -> Case:
        return Case(
            label, {"tokens": [list(piece) for piece in pieces], "ids": list(range(len(pieces)))}, group
        )

    def cut(data: bytes, longest: int) -> list[bytes]:
        pieces = []
        while data:
            count = int(rng.integers(1, longest + 1))
            pieces.append(data[:count])
            data = data[count:]
        return pieces

    cat = "🐈".encode()
    family = "A 👩‍👩‍👧, a café in 東京 and ½ of e\u0301.".encode()
    return [
        case("2 tokens, a cat", [b"a ", b"cat"], "small"),
        case("3 tokens, é in two of them", [b"caf", b"\xc3", b"\xa9"], "small"),
        case("a line break, and an empty line", [b"one\n", b"two", b"\n\n", b"three"], "lines"),
        case("\\r\\n, quotation marks and a backslash", [b'say "', b"\r\n", b'a\\b"'], "lines"),
        case('a text that says "data: [DONE]"', [b"data: ", b"[DONE]\n\n", b"go on"], "lines"),
        case("an emoji in four tokens", [b"A ", *(cat[i : i + 1] for i in range(4)), b"!"], "characters"),
        case("many scripts, cut anywhere", cut(family, 3), "characters"),
        case("ends within a character", [b"ok ", b"\xf0\x9f"], "characters"),
        case("bytes that are no character", [b"a\xff", b"\xc3", b"z"], "characters"),
        case("no token at all", [], "characters"),
    ]


def _run_events(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    from tinyvllm_ref.course.clients import ByteStream, parsed, read_events

    taken = 0

    def tokens() -> Any:
        nonlocal taken
        for id in inputs["ids"]:
            taken += 1
            yield id

    stream = ByteStream([bytes(token) for token in inputs["tokens"]])
    sent, count = [], len(inputs["ids"])
    readable = [""] * (count + 1)  # what the client can read once it has so many tokens
    for event in answer(tokens(), stream):
        if not isinstance(event, bytes):
            raise TypeError(f"an event is {type(event).__name__}; it must be bytes")
        sent.append(event)
        texts = [parsed(one) for one in read_events(b"".join(sent)) if one != "[DONE]"]
        text = "".join(
            one["text"] if isinstance(one, dict) and "text" in one else f"({one})" for one in texts
        )
        readable[taken:] = [text] * (count + 1 - taken)
    events = read_events(b"".join(sent))
    return {
        "the text": readable[-1],
        "the text after each token": readable[1:],
        "the last event": events[-1] if events else "",
        "events of [DONE]": events.count("[DONE]"),
    }


def _expect_events(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What is certain of a text that begins with these bytes: decoded as a whole, less a last character that may go on."""
    data, readable = b"", list[str]()
    for id in inputs["ids"]:
        data += bytes(inputs["tokens"][id])
        readable.append(_certain(data))
    whole = data.decode("utf-8", errors="replace")
    if readable:
        readable[-1] = whole
    return {
        "the text": whole,
        "the text after each token": readable,
        "the last event": "[DONE]",
        "events of [DONE]": 1,
    }


def _certain(data: bytes) -> str:
    """The text of bytes, but for the beginning of a character at their end."""
    for missing in range(1, 4):
        start = data[-missing:]
        for more in ("\x80", "\x80\x80", "\x80\x80\x80"):
            whole = start + more.encode("latin-1")
            for last in (
                whole,
                start + b"\x90" + whole[len(start) + 1 :],
                start + b"\xa0" + whole[len(start) + 1 :],
            ):
                if start[:1] >= b"\xc0" and _is_one_character(last):
                    return data[:-missing].decode("utf-8", errors="replace")
    return data.decode("utf-8", errors="replace")


def _is_one_character(data: bytes) -> bool:
    try:
        return len(data.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False


_EVENTS_TEXT = """import json

DONE = b"data: [DONE]\\n\\n"


def event(data):
    return b"data: " + json.dumps(data).encode() + b"\\n\\n"


def events(ids, stream):
    for id in ids:
        piece = stream.push(id)
        if piece:
            yield event({"text": piece})
    piece = stream.end()
    if piece:
        yield event({"text": piece})
    yield DONE
"""


def _events(*changes: tuple[str, str]) -> str:
    return _changed(_EVENTS_TEXT, *changes)


_END = '    piece = stream.end()\n    if piece:\n        yield event({"text": piece})\n'

_EVENTS = Exercise(
    id="24.2",
    title="text as events",
    answer="events",
    kind="function",
    arguments=("ids", "stream"),
    cases=_event_cases,
    run=_run_events,
    expected=_expect_events,
    points={"small": 1, "lines": 1, "characters": 2},
    hints=Hints(
        question="Take {case}. Write down the bytes that you send for each token. Where does the client see the end of an event, and what does it hold by then?",
        rule="An event is the word data, a colon and a space, the JSON of {\"text\": piece}, and an empty line: two line ends. JSON writes a line end within the text as \\n, "
        "two characters, so that nothing in it can end the event. A piece is what stream.push(id) gives, if it gives any; after the last token comes what stream.end() gives; "
        "then DONE.\n\nBy hand: the tokens b\"caf\", b\"\\xc3\", b\"\\xa9\" give data: {\"text\": \"caf\"}, then nothing, then data: {\"text\": \"\\u00e9\"}.",
        code="""def event(data):
    return b"data: " + ____ + b"____"

for id in ids:
    piece = ____
    if piece:
        yield event({"text": piece})
piece = ____
if piece:
    yield ____
yield ____""",
    ),
    mistakes=(
        Mistake(
            "half a character sent",
            _events(("stream.push(id)", 'stream.tokens[id].decode(errors="replace")')),
            "Each token is decoded by itself. A token may hold half a character, and half a character is none: both halves become U+FFFD, for good. The stream waits for the other half.",
            "Which bytes has é, and which of them are in the second token?",
            variants=(_events(("piece = stream.push(id)", 'piece = stream.tokens[id].decode("utf-8", "replace")'), (_END, "")),),
        ),
        Mistake(
            "the last bytes forgotten",
            _events((_END, "")),
            "A model can stop within a character: max_tokens cuts where it cuts. The stream still holds the bytes, and end() gives them out as U+FFFD.",
            "What does the stream know when the last token has come?",
        ),
        Mistake(
            "tokens decoded by themselves, broken ones left out",
            _events(("stream.push(id)", 'stream.tokens[id].decode(errors="ignore")'), (_END, "")),
            "errors=\"ignore\" hides the trouble: what is not a whole character within one token is thrown away, and é is never seen.",
            "Where has the é gone?",
            variants=(_events(("stream.push(id)", 'stream.tokens[id].decode(errors="ignore")')),),
        ),
        Mistake(
            "one line end",
            _events(('.encode() + b"\\n\\n"', '.encode() + b"\\n"')),
            "An event ends with an empty line, so there are two line ends: one ends the line, and one is the empty line. With one the client waits for more, and takes two events for one.",
            "How does the client know that no further line of this event comes?",
        ),
        Mistake(
            "the text as it is",
            _events(("json.dumps(data).encode()", 'data["text"].encode()')),
            "A text may have line ends in it, and an empty line would end the event. JSON writes them as \\n and leaves one line, whatever the text is. Besides, the client expects JSON.",
            "What happens if the text is itself an empty line?",
        ),
        Mistake(
            "Python's form instead of JSON",
            _events(("json.dumps(data).encode()", "str(data).encode()")),
            "str of a dict looks like JSON and is none: it has single quotation marks, True and None. Clients are not written in Python only; json.dumps writes what all of them read.",
            "Which quotation marks does JSON have?",
        ),
        Mistake(
            "the whole text each time",
            _events(
                ("    for id in ids:\n", '    text = ""\n    for id in ids:\n'),
                ("        piece = stream.push(id)\n        if piece:\n            yield event({\"text\": piece})\n", "        piece = stream.push(id)\n        if piece:\n            text += piece\n            yield event({\"text\": text})\n"),
            ),
            "Each event has all the text so far. The client adds what it gets to what it has, and so reads the beginning again and again. An event has what is new.",
            "What does a client do with the second event?",
            variants=(
                _events(
                    ("    for id in ids:\n", '    text = ""\n    for id in ids:\n'),
                    ("        piece = stream.push(id)\n        if piece:\n            yield event({\"text\": piece})\n", "        text += stream.push(id)\n        yield event({\"text\": text})\n"),
                    (_END, '    yield event({"text": text + stream.end()})\n'),
                ),
            ),
        ),
        Mistake(
            "everything at the end",
            _events(("    for id in ids:\n        piece = stream.push(id)\n        if piece:\n            yield event({\"text\": piece})\n", "    pieces = [stream.push(id) for id in ids]\n    if any(pieces):\n        yield event({\"text\": \"\".join(pieces)})\n")),
            "The text is right, and comes when there is nothing left to wait for. `ids` gives a token when the model has drawn it: pass it on before you ask for the next.",
            "How many tokens have been drawn when your first event goes out?",
            variants=(_events(("    for id in ids:\n        piece", "    for id in list(ids):\n        piece")),),
        ),
        Mistake(
            "no [DONE]",
            _events(("    yield DONE\n", "")),
            "Clients of this API read until an event that is not JSON but [DONE]. Without it they cannot tell an answer that is complete from a connection that was cut.",
            "How does the client know that this was all?",
        ),
        Mistake(
            "[DONE] as JSON",
            _events(("    yield DONE\n", '    yield event("[DONE]")\n')),
            "As JSON the word gets quotation marks, and a client that looks for [DONE] finds \"[DONE]\". The last event is not JSON: DONE has its bytes.",
            "Which bytes does your last event have, and which has DONE?",
        ),
    ),
)  # fmt: skip


# ---------------- 24.3: one loop, many clients


def _loop_cases(rng: np.random.Generator) -> list[Case]:
    def case(
        label: str,
        clients: list[tuple[str, int, int | str]],
        group: str,
        *,
        seats: int = 2,
        drops: dict[str, int] | None = None,
        reads: dict[str, int] | None = None,
        refused: tuple[str, ...] = (),
    ) -> Case:
        """`clients`: (name, tokens that it gets, the step in which it comes); `drops`: the step in which one goes.

        `reads`: after so many tokens a client is busy with something else, and it goes from there, at a yield.
        """
        script = {
            name: None if name in refused else rng.integers(10, 100, count).tolist()
            for name, count, _ in clients
        }
        comes = {name: at for name, _, at in clients}
        inputs = {
            "script": script, "comes": comes, "drops": drops or {}, "reads": reads or {}, "seats": seats,
        }  # fmt: skip
        return Case(label, inputs, group)

    return [
        case("one client", [("a", 3, 0)], "small"),
        case("two clients", [("a", 3, 0), ("b", 2, 0)], "small"),
        case("a second client comes in step 1", [("a", 4, 0), ("b", 2, 1)], "many"),
        case("five clients and two seats", [(name, 2 + k % 3, 0) for k, name in enumerate("abcde")], "many"),
        case("one comes when all is quiet", [("a", 2, 0), ("b", 2, "idle")], "many"),
        case(
            "one asks for what can never fit", [("a", 3, 0), ("b", 1, 1), ("c", 2, 2)], "many", refused=("b",)
        ),
        case("a client goes in step 2", [("a", 6, 0), ("b", 5, 0)], "gone", drops={"a": 2}),
        case(
            "one goes that waits for a seat", [("a", 5, 0), ("b", 5, 0), ("c", 4, 0)], "gone", drops={"c": 2}
        ),
        case("one comes and goes within step 1", [("a", 4, 0), ("b", 4, 1)], "gone", drops={"b": 1}),
        case("one goes at a yield", [("a", 6, 0), ("b", 5, 0)], "gone", drops={"a": 3}, reads={"a": 2}),
        case(
            "what can never fit goes at once",
            [("a", 4, 0), ("b", 1, 1)],
            "gone",
            drops={"b": 1},
            refused=("b",),
        ),
    ]


def _run_loop(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import asyncio
    import contextlib
    from types import SimpleNamespace

    from tinyvllm_ref.course.clients import StepEngine, in_a_loop, is_busy, settle

    script, comes, drops, reads = (inputs[name] for name in ("script", "comes", "drops", "reads"))
    got: dict[str, Any] = {name: [] for name in script}
    tasks: dict[str, Any] = {}
    leaves: dict[str, Any] = {}
    found: dict[str, Any] = {}

    async def client(service: Any, name: str) -> None:
        try:
            stream = service.stream(SimpleNamespace(request_id=name))
            async with contextlib.aclosing(stream) as tokens:
                async for token in tokens:
                    got[name].append(int(token))
                    if len(got[name]) == reads.get(name):
                        await leaves[name].wait()
                        break
        except ValueError:
            got[name].append("ValueError")

    async def main() -> None:
        async def during(step: int) -> None:
            for name in [name for name, at in comes.items() if at == step]:
                tasks[name] = asyncio.create_task(client(service, name))
                await settle()
            for name in [name for name, at in drops.items() if at == step]:
                if name in reads:
                    leaves[name].set()
                else:
                    tasks[name].cancel()

        leaves.update((name, asyncio.Event()) for name in reads)
        engine = StepEngine(script, inputs["seats"], during)
        service = answer(engine)
        runner = asyncio.create_task(service.run())
        await settle()
        for when in (0, "idle"):
            for name in [name for name, at in comes.items() if at == when]:
                tasks[name] = asyncio.create_task(client(service, name))
            while reading := [task for task in tasks.values() if not task.done()]:
                await asyncio.wait([runner, *reading], return_when=asyncio.FIRST_COMPLETED)
                if runner.done():  # it is to run for ever; what ended it is the answer's fault
                    runner.result()
                    raise RuntimeError("run() has ended; it must wait for the next request")
        await settle()
        await engine.run_out()
        found.update(
            {
                "steps in which the event loop stood still": engine.held_up,
                "called while a step was computed": engine.disturbed,
                **{f"tokens of {name}": tokens for name, tokens in got.items()},
                "who ran in each step": engine.rows,
                "left in the engine": engine.left(),
                "busy while nobody is there": await is_busy(),
            }
        )
        if "seating" in inputs:
            found["seating"] = engine.seating
        runner.cancel()

    in_a_loop(main)
    return found


def _expect_loop(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a plain loop gives, in which clients come and go between two steps."""
    script, comes, drops = inputs["script"], inputs["comes"], inputs["drops"]
    waiting, running = list[str](), list[str]()
    got: dict[str, list[Any]] = {name: [] for name in script}
    rows: list[str] = []

    def arrive(when: Any) -> None:
        for name in [name for name, at in comes.items() if at == when]:
            if script[name] is None:
                got[name] += ["ValueError"] if drops.get(name) != when else []
            else:
                waiting.append(name)

    for start in (0, "idle"):
        arrive(start)
        while waiting or running:
            while waiting and len(running) < inputs["seats"]:
                running.append(waiting.pop(0))
            rows.append(" ".join(sorted(running)))
            step = len(rows)
            arrive(step)
            gone = {name for name, at in drops.items() if at == step}
            for name in running:
                if name not in gone:
                    got[name].append(script[name][len(got[name])])
            running = [name for name in running if name not in gone and len(got[name]) < len(script[name])]
            waiting = [name for name in waiting if name not in gone]
    return {
        "steps in which the event loop stood still": [],
        "called while a step was computed": [],
        **{f"tokens of {name}": tokens for name, tokens in got.items()},
        "who ran in each step": rows,
        "left in the engine": [],
        "busy while nobody is there": False,
    }


_LOOP_TEXT = """import asyncio


class AsyncEngine:
    def __init__(self, engine):
        self.engine = engine
        self.orders = []
        self.queues = {}
        self.wake = asyncio.Event()

    def order(self, what, argument):
        self.orders.append((what, argument))
        self.wake.set()

    async def run(self):
        while True:
            self.carry_out_orders()
            if not self.engine.has_work:
                await self.wake.wait()
                self.wake.clear()
                continue
            outputs = await asyncio.to_thread(self.engine.step)
            for output in outputs:
                if output.request_id in self.queues:
                    self.queues[output.request_id].put_nowait(output)

    def carry_out_orders(self):
        while self.orders:
            what, argument = self.orders.pop(0)
            if what == "abort":
                self.engine.abort(argument)
                continue
            try:
                self.engine.add_request(argument)
            except ValueError as error:
                if argument.request_id in self.queues:
                    self.queues[argument.request_id].put_nowait(error)

    async def stream(self, request):
        queue = self.queues[request.request_id] = asyncio.Queue()
        self.order("add", request)
        read, finished = 0, False
        try:
            while not finished:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                tokens, finished = output.outputs[0].token_ids, output.finished
                for token in tokens[read:]:
                    yield token
                read = len(tokens)
        finally:
            del self.queues[request.request_id]
            if not finished:
                self.order("abort", request.request_id)
"""


def _loop(*changes: tuple[str, str]) -> str:
    return _changed(_LOOP_TEXT, *changes)


_RUN = _LOOP_TEXT.partition("        while True:\n")[2].partition("\n    def carry_out_orders")[0]
_FINALLY = """        finally:
            del self.queues[request.request_id]
            if not finished:
                self.order("abort", request.request_id)
"""
_TRY_ADD = """            try:
                self.engine.add_request(argument)
            except ValueError as error:
                if argument.request_id in self.queues:
                    self.queues[argument.request_id].put_nowait(error)
"""
_HAND_OUT = """                if output.request_id in self.queues:
                    self.queues[output.request_id].put_nowait(output)
"""

_LOOP = Exercise(
    id="24.3",
    title="one loop, many clients",
    answer="AsyncEngine",
    kind="class",
    cases=_loop_cases,
    run=_run_loop,
    expected=_expect_loop,
    points={"small": 1, "many": 2, "gone": 2},
    seconds=3.0,
    hints=Hints(
        question="Take {case}. Which coroutine runs while the engine computes a step? Who puts something into a client's queue, and who must be told when that client goes?",
        rule="run: orders first, then a step in another thread, await asyncio.to_thread(self.engine.step), then each output into the queue of its client, if that is still "
        "there. Without work: wait for self.wake, clear it, and look again.\n\n"
        "Orders come in one line, so that an abort stands behind the add that it belongs to. They are carried out between two steps, by run alone: a coroutine "
        "that calls the engine itself does so while another thread computes.\n\n"
        "stream: a queue, the order \"add\"; then an output after the other, of which the tokens behind those that were read are new. However it ends, finally takes the queue "
        "away, and gives the order \"abort\" if the request has not finished. A client that goes is an exception within await queue.get().",
        code="""async def run(self):
    while True:
        self.carry_out_orders()
        if not self.engine.has_work:
            await ____
            self.wake.clear()
            continue
        outputs = await asyncio.to_thread(____)
        for output in outputs:
            if output.request_id in self.queues:
                ____

def carry_out_orders(self):
    while self.orders:
        what, argument = self.orders.pop(____)
        if what == "abort":
            ____
            continue
        try:
            ____
        except ValueError as error:
            if argument.request_id in self.queues:
                self.queues[argument.request_id].put_nowait(____)

# in stream
try:
    while not finished:
        output = await ____
        if isinstance(output, Exception):
            raise output
        tokens, finished = output.outputs[0].token_ids, ____
        for token in tokens[____:]:
            yield token
        read = ____
finally:
    del self.queues[request.request_id]
    if not finished:
        ____""",
    ),
    mistakes=(
        Mistake(
            "a blocked event loop",
            _loop(("await asyncio.to_thread(self.engine.step)", "self.engine.step()")),
            "step() computes on the event loop's own thread. For as long as it runs nothing else does: no new client is heard, no text is sent, nobody who hangs up is noticed. "
            "Give it to another thread, and await it.",
            "What does the loop do in the milliseconds in which a step is computed?",
            variants=(
                _loop(("await asyncio.to_thread(self.engine.step)", "self.engine.step()\n            await asyncio.sleep(0)")),
                _loop(("            outputs = await asyncio.to_thread(self.engine.step)", "            await asyncio.sleep(0)\n            outputs = self.engine.step()")),
            ),
        ),
        Mistake(
            "orders carried out at once",
            _loop(
                ("        self.orders.append((what, argument))\n", "        self.orders.append((what, argument))\n        self.carry_out_orders()\n"),
            ),
            "A client's coroutine calls the engine itself. But at that moment another thread may be in the midst of a step, with the lists of the scheduler half way from one state to "
            "the next. Leave a note, and let run carry it out between two steps.",
            "Which thread is inside the engine while your coroutine runs?",
        ),
        Mistake(
            "a step before the orders",
            _loop(("                self.wake.clear()\n                continue\n", "                self.wake.clear()\n")),
            "The loop was woken by an order, and makes a step before it carries that order out: a step with nobody. After the wait look again, from the top.",
            "Who is in the engine when the wait ends?",
        ),
        Mistake(
            "aborts before adds",
            _loop(
                ("        while self.orders:\n            what, argument = self.orders.pop(0)\n", "        orders, self.orders = sorted(self.orders, key=lambda order: order[0]), []\n        for what, argument in orders:\n"),
            ),
            "The abort of a waiting request is lost: it is carried out before the request is added, when the engine does not know it, and then the request runs to its end for nobody. "
            "The order in which things were asked for matters.",
            "What does the engine do with an abort of an id that it has not heard of?",
            variants=(
                _loop(
                    (
                        "        self.orders.append((what, argument))\n",
                        "        self.orders.insert(0 if what == \"abort\" else len(self.orders), (what, argument))\n",
                    )
                ),
            ),
        ),
        Mistake(
            "the newest order first",
            _loop(("self.orders.pop(0)", "self.orders.pop()")),
            "pop() takes the last of a list: who came first is served last, and an abort is carried out before the add that it belongs to, when the engine does not know the request. "
            "From the oldest to the newest.",
            "Five orders wait. Which of them does your loop carry out first?",
        ),
        Mistake(
            "a dropped client runs on",
            _loop(("            if not finished:\n                self.order(\"abort\", request.request_id)\n", "")),
            "The client has gone, and the engine was told nothing. It goes on computing for nobody, in blocks that others wait for. If you do give the order, look where: a client that "
            "goes is a CancelledError or a GeneratorExit, and `except Exception` catches neither of them. finally comes in any case.",
            "What is raised in `await queue.get()` when the client's task is cancelled, and which of your lines runs then?",
            variants=(
                _loop((_FINALLY, """        except Exception:
            self.order("abort", request.request_id)
            raise
        del self.queues[request.request_id]
""")),
                _loop((_FINALLY, "        except ValueError:\n            raise\n")),
                _loop((_FINALLY, _FINALLY.replace("finally:", "except asyncio.CancelledError:") + "            raise\n")),
                _loop((_FINALLY, _FINALLY.replace("finally:", "except asyncio.CancelledError:"))),
            ),
        ),
        Mistake(
            "orders only when all is quiet",
            _loop((_RUN, """            await self.wake.wait()
            self.wake.clear()
            self.carry_out_orders()
            while self.engine.has_work:
                outputs = await asyncio.to_thread(self.engine.step)
                for output in outputs:
                    if output.request_id in self.queues:
                        self.queues[output.request_id].put_nowait(output)
""")),
            "You look for orders when the engine has nothing left to do. Until then who comes waits for everybody else to end, and who goes is computed for. Look before each step.",
            "A client comes while another one's text is being made. In which step does it run first?",
        ),
        Mistake(
            "one wrong request ends the loop",
            _loop((_TRY_ADD, "            self.engine.add_request(argument)\n")),
            "add_request refuses what can never fit, by a ValueError. Where nobody catches it, it ends run, and with it the answers of everybody else. It belongs to the client that "
            "asked: put it into that client's queue.",
            "Whose request was wrong, and who gets no tokens any more?",
        ),
        Mistake(
            "a refusal that nobody hears",
            _loop((_TRY_ADD, """            try:
                self.engine.add_request(argument)
            except ValueError:
                pass
""")),
            "The wrong request stops nobody else, and that is good. But its own client waits for ever for a first token. Put the error into its queue, so that it is raised where it was asked.",
            "What does the client of the refused request wait for?",
        ),
        Mistake(
            "outputs for whoever has gone",
            _loop((_HAND_OUT, "                self.queues[output.request_id].put_nowait(output)\n")),
            "A client can go while a step is computed, and its request is in that step. Its output comes all the same, and there is no queue for it: a KeyError ends the loop "
            "for everybody.",
            "Who has left between the beginning of a step and its end?",
        ),
        Mistake(
            "a refusal for whoever has gone",
            _loop(("                if argument.request_id in self.queues:\n                    self.queues[argument.request_id].put_nowait(error)", "                self.queues[argument.request_id].put_nowait(error)")),
            "A client can have gone before its request is refused, and then there is no queue for the error: a KeyError ends the loop for everybody.",
            "Who is still there when the order is carried out?",
        ),
        Mistake(
            "all tokens each time",
            _loop(("for token in tokens[read:]:", "for token in tokens:")),
            "token_ids are all tokens so far. Only those behind the ones that were read are new.",
            "The second output has two tokens. Which of them has the client already?",
        ),
        Mistake(
            "never woken",
            _loop(("        self.wake.set()\n", "")),
            "run sleeps when there is nothing to do, and an order is put down beside it. Somebody has to wake it: self.wake.set().",
            "run waits for an event. Who sets it?",
        ),
        Mistake(
            "it asks again and again",
            _loop(("                await self.wake.wait()\n                self.wake.clear()\n", "                await asyncio.sleep(0)\n")),
            "sleep(0) lets others run and comes back at once. While nobody is there run asks thousands of times a second whether there is work, and keeps a processor busy with nothing. Wait for "
            "the event.",
            "How often does run look for orders in a minute in which none comes?",
            variants=(_loop(("                self.wake.clear()\n", "                await asyncio.sleep(0)\n")),),
        ),
        Mistake(
            "the event is never cleared",
            _loop(("                self.wake.clear()\n", "")),
            "An event that is set stays set until somebody clears it, and to await a set event is not to wait: the await comes back at once, without letting anybody else run. So run goes round and round "
            "on the spot, and no client ever gets the loop. Clear the event, then look for orders again.",
            "The event was set by the first client. What does the second `await self.wake.wait()` do?",
        ),
        Mistake(
            "it ends when all is quiet",
            _loop(("                await self.wake.wait()\n                self.wake.clear()\n                continue\n", "                return\n")),
            "A server with nothing to do is not at its end: the next client comes a minute later. run must wait.",
            "Nobody is there at the start. What does run do?",
        ),
    ),
)  # fmt: skip


# ---------------- 24.4: a client that goes


def _follow_cases(rng: np.random.Generator) -> list[Case]:
    words = rng.permutation(["fox", "owl", "bee", "cat", "dog", "hen"]).tolist()

    def case(
        label: str, pieces: int, group: str, happens: str = "", at: int = 0, *, before: int = 0, body: int = 0
    ) -> Case:
        """`happens` before step `at`; `before`: tokens of another client that holds the only seat."""
        inputs = {"pieces": words[:pieces], "happens": happens, "at": at, "before": before, "body": body}
        return Case(label, inputs, group)

    return [
        case("2 pieces, and nobody goes", 2, "stays"),
        case("6 pieces, and nobody goes", 6, "stays"),
        case("the client goes after 2 of 5 pieces", 5, "goes", "leaves", 2),
        case("it goes while it waits for a seat", 4, "goes", "leaves", 2, before=5),
        case("it goes before the first step", 3, "goes", "leaves", 0),
        case("it goes, and a rest of the body came before", 5, "goes", "leaves", 2, body=2),
        case("the connection breaks after 2 pieces", 5, "breaks", "breaks", 2),
        case("the answer is cancelled while it waits", 4, "breaks", "cancelled", 2, before=5),
        case("the answer is cancelled after 2 pieces", 5, "breaks", "cancelled", 2),
    ]


def _run_follow(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import asyncio

    from tinyvllm_ref.course.clients import Connection, ServedScript, drive, in_a_loop, settle
    from tinyvllm_ref.sampling_params import SamplingParams

    found: dict[str, Any] = {}

    async def main() -> None:
        engine = ServedScript({"other": ["x"] * inputs["before"], "mine": inputs["pieces"]}, seats=1)
        if inputs["before"]:
            await engine.submit(engine.encode("other"), SamplingParams())
        stream = await engine.submit(engine.encode("mine"), SamplingParams())
        connection = Connection([b""] * inputs["body"])
        taken: list[str] = []

        async def take(delta: Any) -> None:
            await asyncio.sleep(0)
            if connection.broken:
                raise OSError("the connection is broken")
            if not connection.gone:
                taken.append(delta.text)

        def meanwhile(step: int) -> None:
            if step != inputs["at"]:
                return
            if inputs["happens"] == "leaves":
                connection.leave()
            elif inputs["happens"] == "breaks":
                connection.broken = True
            elif inputs["happens"] == "cancelled":
                task.cancel()

        task = asyncio.ensure_future(answer(stream, connection.receive, take))
        await drive(task, engine, meanwhile)
        await settle()
        own = [row for row in engine.rows if stream.request_id in row.split()]
        if task.cancelled():
            ended: Any = "CancelledError"
        elif task.exception() is not None:
            ended = type(task.exception()).__name__
        else:
            ended = task.result()
        left = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
        found.update(
            {
                "pieces that were taken": taken,
                "steps that computed for this client": len(own),
                "follow returned or raised": ended,
                "tasks left behind": len(left),
            }
        )

    in_a_loop(main)
    return found


def _expect_follow(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """By counting: one piece a step, the other client first, and what happens comes before step `at`."""
    pieces, happens = list(inputs["pieces"]), inputs["happens"]
    until = inputs["at"] if happens else 10**6
    computed = min(len(pieces), max(0, until - inputs["before"]))
    if happens == "breaks":  # nobody knows of it before the next piece is to be sent
        computed = min(len(pieces), computed + 1)
        return {
            "pieces that were taken": pieces[: computed - 1],
            "steps that computed for this client": computed,
            "follow returned or raised": "OSError",
            "tasks left behind": 0,
        }
    ended: Any = {"": True, "leaves": False, "cancelled": "CancelledError"}[happens]
    return {
        "pieces that were taken": pieces[:computed],
        "steps that computed for this client": computed,
        "follow returned or raised": ended,
        "tasks left behind": 0,
    }


_FOLLOW_TEXT = """import asyncio


async def follow(stream, receive, take):
    gone = False

    async def watch():
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        stream.abort()

    watcher = asyncio.create_task(watch())
    try:
        async for delta in stream:
            await take(delta)
    except Exception:
        if not gone:
            raise
    finally:
        watcher.cancel()
        stream.abort()
    return not gone
"""


def _follow(*changes: tuple[str, str]) -> str:
    return _changed(_FOLLOW_TEXT, *changes)


_WATCH = """        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        stream.abort()
"""
_LOOP_OVER = """        async for delta in stream:
            await take(delta)
"""

_FOLLOW = Exercise(
    id="24.4",
    title="a client that goes",
    answer="follow",
    kind="function",
    arguments=("stream", "receive", "take"),
    cases=_follow_cases,
    run=_run_follow,
    expected=_expect_follow,
    points={"stays": 1, "goes": 2, "breaks": 2},
    hints=Hints(
        question="Take {case}. On which line does each of the two coroutines stand when it happens? Which of them gets to know of it, and what does it do then?",
        rule="There are three ways out, and each must abort: the client goes, which watch alone hears; take or the stream raises; the task is cancelled. The first must "
        "not wait for the next delta, for there may be none for a long time: abort in watch. The others come by in finally.\n\n"
        "receive gives messages one after the other, and only http.disconnect says that the client has gone: read on until that comes. After an abort the stream raises an "
        "error, which is nobody's fault if the client has gone, and everybody's business if not.",
        code="""async def watch():
    nonlocal gone
    while ____:
        pass
    gone = True
    ____

watcher = asyncio.create_task(watch())
try:
    async for delta in stream:
        await take(delta)
except Exception:
    if ____:
        raise
finally:
    watcher.cancel()
    ____
return not gone""",
    ),
    mistakes=(
        Mistake(
            "noticed with the next piece",
            _follow(
                (_WATCH, _WATCH.replace("        stream.abort()\n", "")),
                (_LOOP_OVER, "        async for delta in stream:\n            if gone:\n                break\n            await take(delta)\n"),
            ),
            "Whether the client has gone is looked at when a delta comes. A request that waits for a seat gets none, so its abort is lost until its turn comes: it takes a seat and blocks "
            "and computes a token, for nobody. Whoever hears that the client has gone must abort.",
            "The client waits in the queue and goes. What wakes your loop?",
            variants=(
                _follow(
                    (_WATCH, _WATCH.replace("        stream.abort()\n", "")),
                    (_LOOP_OVER, "        async for delta in stream:\n            if gone:\n                stream.abort()\n                break\n            await take(delta)\n"),
                ),
            ),
        ),
        Mistake(
            "one message read",
            _follow((_WATCH, """        gone = (await receive())["type"] == "http.disconnect"
        if gone:
            stream.abort()
""")),
            "receive gives messages, and the next one need not be the last: a rest of the body comes as http.request. Who reads one message only stops listening before the client goes.",
            "What is the first message that receive gives, and who reads the second?",
            variants=(_follow((_WATCH, """        message = await receive()
        gone = message["type"] == "http.disconnect"
        if gone:
            stream.abort()
""")),),
        ),
        Mistake(
            "any message taken for the end",
            _follow((_WATCH, """        await receive()
        gone = True
        stream.abort()
""")),
            "A message is not a goodbye: http.request is a rest of the body. Only http.disconnect says that the client has gone.",
            "What does the message say that came first?",
        ),
        Mistake(
            "the abort only where something fails",
            _follow(
                ("    except Exception:\n        if not gone:\n            raise\n    finally:\n        watcher.cancel()\n        stream.abort()\n",
                 "    except Exception:\n        watcher.cancel()\n        stream.abort()\n        if not gone:\n            raise\n    watcher.cancel()\n"),
            ),
            "An answer that is cancelled gets a CancelledError, which is no Exception. Your except does not see it; finally does.",
            "What does `except Exception` do with a CancelledError?",
        ),
        Mistake(
            "aborted only where the client says so",
            _follow(("    finally:\n        watcher.cancel()\n        stream.abort()\n", "    finally:\n        watcher.cancel()\n")),
            "A client that leaves in good order is noticed. But the connection may break while something is sent, or the server cancels the answer: then watch hears nothing, and the request "
            "runs on. finally comes by in any case.",
            "take raises an OSError. Who aborts?",
            variants=(_follow(("    finally:\n        watcher.cancel()\n        stream.abort()\n", "    watcher.cancel()\n")),),
        ),
        Mistake(
            "the watcher is left behind",
            _follow(("        watcher.cancel()\n", "")),
            "When the answer is complete, watch still waits for a message. One such task for each request that was ever answered: cancel it.",
            "Who waits in receive when the last piece has been sent?",
        ),
        Mistake(
            "all errors swallowed",
            _follow(("        if not gone:\n            raise\n", "        pass\n")),
            "After an abort the stream raises, and that is no news. But an error while the client is still there is one: the connection broke, or the engine stopped. If it is swallowed, the caller "
            "takes half an answer for a whole one.",
            "The connection broke after two pieces of five. What does your follow return?",
            variants=(
                _follow(("    except Exception:\n        if not gone:\n            raise\n", ""), ("    return not gone\n", "        return not gone\n")),
                _follow(("    except Exception:\n        if not gone:\n            raise\n", "    except BaseException:\n        return False\n")),
            ),
        ),
        Mistake(
            "the abort's own error let out",
            _follow(("    except Exception:\n        if not gone:\n            raise\n", "")),
            "Your abort makes the stream raise where it is being read. The client has gone, so this is the expected end and no fault: nothing to raise, and nothing for the log.",
            "Who made the stream raise?",
        ),
    ),
)  # fmt: skip


# ---------------- 24.5: the server

_STORY = ["Once", "", " upon", " a", " café", "."]


def _app_cases(rng: np.random.Generator) -> list[Case]:
    seed = int(rng.integers(1, 1000))
    script = {
        "Once": _STORY,
        "<user>Who is Pip?<assistant>": ["A", " small", " fox", ".\n\nHe likes", " 🐈."],
        "<system>Be short.<user>Hi<assistant>Hello<user>Who is Pip?<assistant>": ["A", " fox."],
        "long " * 40: ["?"],
        "The end": ["It", " was", " good.", ""],  # as with a token that ends a text
    }

    def case(label: str, path: str, asked: Any, group: str, **more: Any) -> Case:
        body = asked if isinstance(asked, str) else json.dumps(asked)
        inputs = {
            "method": "GET" if asked == "" else "POST", "path": path, "body": body, "script": script, "packets": 1,
            "leaves": None, "others": 0, **more,
        }  # fmt: skip
        return Case(label, inputs, group)

    def text(label: str, group: str, more: Mapping[str, Any] | None = None, **asked: Any) -> Case:
        return case(
            label, "/v1/completions", {"model": "scripted", "prompt": "Once", **asked}, group, **(more or {})
        )

    def chat(label: str, group: str, more: Mapping[str, Any] | None = None, **asked: Any) -> Case:
        messages = [{"role": "user", "content": "Who is Pip?"}]
        asked = {"model": "scripted", "messages": messages, **asked}
        return case(label, "/v1/chat/completions", asked, group, **(more or {}))

    talk = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Who is Pip?"},
    ]
    options: dict[str, Any] = {
        "max_tokens": 3,
        "temperature": 0,
        "top_p": 0.5,
        "seed": seed,
        "stop": ["END", "."],
    }
    return [
        text("a completion, whole", "whole"),
        text("with max_tokens, temperature, top_p, seed and stop", "whole", **options),
        chat("a chat, whole", "whole"),
        chat("a conversation of four messages, max_tokens 1", "whole", messages=talk, max_tokens=1),
        text("a completion, streamed", "stream", stream=True),
        chat("a chat, streamed", "stream", stream=True, max_tokens=4),
        text("a body in three packets", "stream", {"packets": 3}, stream=True),
        text("the last token has no text", "stream", prompt="The end", stream=True),
        case("the models", "/v1/models", "", "errors"),
        case("a path that is not there", "/v1/embeddings", {"model": "scripted"}, "errors"),
        case("a body that is no JSON", "/v1/completions", '{"prompt": ', "errors"),
        text("a model of another name", "errors", model="another"),
        text("a prompt and more tokens than fit", "errors", max_tokens=1000),
        text("a temperature of -1", "errors", temperature=-1),
        case("no prompt", "/v1/completions", {"model": "scripted"}, "errors"),
        chat("a role that the template refuses", "errors", messages=[{"role": "fox", "content": "?"}]),
        text("a streamed client goes after 2 steps", "gone", {"leaves": 2}, stream=True),
        text("a client that waits for the whole text goes", "gone", {"leaves": 2}),
        chat("one goes that waits for a seat", "gone", {"leaves": 2, "others": 5}, stream=True),
    ]


def _run_app(answer: Any, inputs: Any, lab: Any) -> dict[str, Any]:
    import itertools
    import json

    from tinyvllm_ref.course.clients import ServedScript, exchange, in_a_loop, read_events
    from tinyvllm_ref.sampling_params import SamplingParams

    found: dict[str, Any] = {}

    def text_after(connection: Any, step: int) -> str:
        """What can be read of a stream once the engine has made so many steps."""
        there = [
            packet for packet, at in zip(connection.packets, connection.steps, strict=True) if at <= step
        ]
        objects = [json.loads(one) for one in read_events(b"".join(there)) if one != "[DONE]"]
        choices = [choice for one in objects for choice in one["choices"]]
        return "".join(
            (choice.get("delta") or {"content": choice.get("text")}).get("content") or ""
            for choice in choices
        )

    def seen(connection: Any, streamed: bool, engine: Any) -> dict[str, Any]:
        """What a client takes from an answer."""
        body = b"".join(connection.packets)
        kind = connection.headers.get("content-type", "none").partition(";")[0]
        about: dict[str, Any] = {
            "status": connection.status, "content type": kind, "the body has an end": connection.complete,
        }  # fmt: skip
        if not streamed:
            objects = [json.loads(body)]
        else:
            events = read_events(body)
            about["the last event"] = "[DONE]" if events[-1:] == ["[DONE]"] else "another"
            objects = [json.loads(one) for one in events if one != "[DONE]"]
        if not objects:
            return about
        if "error" in objects[0]:
            return about | {"an error with a message": bool(objects[0]["error"].get("message"))}
        if objects[0].get("object") == "list":
            return about | {"models": [model["id"] for model in objects[0]["data"]]}
        choices = [choice for one in objects for choice in one.get("choices", [])]
        parts = [
            choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            for choice in choices
        ]
        pieces = [part.get("content") or "" for part in parts]
        about["the text"] = "".join(pieces)
        if streamed:
            about["the text after each step"] = [
                text_after(connection, step) for step in range(1, len(engine.rows) + 1)
            ]
        about["roles"] = [part["role"] for part in parts if "role" in part]
        about["finish reasons"] = [
            choice.get("finish_reason") for choice in choices if choice.get("finish_reason")
        ]
        about["where the text is"] = sorted(
            {name for c in choices for name in ("text", "message", "delta") if name in c}
        )
        about["object"] = sorted({str(one.get("object")) for one in objects})
        about["model"] = sorted({str(one.get("model")) for one in objects})
        about["different ids"] = len(
            {one["id"] for one in objects if isinstance(one.get("id"), str) and one["id"]}
        )
        about["created is a number"] = all(isinstance(one.get("created"), int) for one in objects)
        about["index"] = sorted({str(choice.get("index")) for choice in choices})
        if not streamed:
            usage = objects[0].get("usage") or {}
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            about["usage"] = [usage.get(name) for name in names]
        return about

    async def main() -> None:
        engine = ServedScript({**inputs["script"], "other": ["x"] * inputs["others"]}, seats=1)
        app = answer(engine)
        if inputs["others"]:
            await engine.submit(engine.encode("other"), SamplingParams())
            engine.has_request.clear()
        data, count = inputs["body"].encode(), inputs["packets"]
        edges = [len(data) * k // count for k in range(count + 1)]
        body = [data[a:b] for a, b in itertools.pairwise(edges)]
        connection = await exchange(app, engine, inputs["method"], inputs["path"], body, inputs["leaves"])
        own = engine.asked[1:] if inputs["others"] else engine.asked
        if inputs["leaves"] is not None:
            found["asked of the engine"] = [one["prompt"] for one in own]
            id = "1" if inputs["others"] else "0"
            found["steps that computed for this client"] = sum(id in row.split() for row in engine.rows)
            found["left in the engine"] = engine.left()
            found["[DONE] for whoever has gone"] = any(b"[DONE]" in body for body in connection.late)
            return
        streamed = '"stream": true' in inputs["body"] and connection.status == 200
        found["asked of the engine"] = own[0] if own else {}
        found.update(seen(connection, streamed, engine))

    in_a_loop(main)
    return found


def _expect_app(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What OpenAI's API says of each request; the reference's server gives the same (tests/course/test_lesson_24.py)."""
    path = inputs["path"]
    chat = path.endswith("chat/completions")
    error = {"content type": "application/json", "the body has an end": True, "an error with a message": True}
    if path == "/v1/models":
        models = {
            "status": 200,
            "content type": "application/json",
            "the body has an end": True,
            "models": ["scripted"],
        }
        return models | {"asked of the engine": {}}
    try:
        asked = json.loads(inputs["body"])
    except ValueError:
        return error | {"status": 400, "asked of the engine": {}}
    if path == "/v1/embeddings" or asked["model"] != "scripted":
        return error | {"status": 404, "asked of the engine": {}}
    most = asked.get("max_tokens", None if chat else 16)
    roles = [message["role"] for message in asked.get("messages", ())]
    if most == 1000 or asked.get("temperature") == -1 or not (chat or "prompt" in asked) or "fox" in roles:
        return error | {"status": 400, "asked of the engine": {}}
    prompt = asked.get("prompt", "")
    if chat:
        prompt = "".join(f"<{one['role']}>{one['content']}" for one in asked["messages"]) + "<assistant>"
    script = inputs["script"][prompt]
    pieces = script[:most]
    if inputs["leaves"] is not None:
        computed = 0 if inputs["others"] > inputs["leaves"] else inputs["leaves"]
        return {
            "asked of the engine": [prompt],
            "steps that computed for this client": computed,
            "left in the engine": [],
            "[DONE] for whoever has gone": False,
        }
    streamed = asked.get("stream", False)
    tokens = len(prompt.encode()) + 1
    return {
        "status": 200,
        "content type": "text/event-stream" if streamed else "application/json",
        "the body has an end": True,
        "asked of the engine": {
            "prompt": prompt,
            "max_tokens": most,
            "temperature": asked.get("temperature", 1.0),
            "top_p": asked.get("top_p", 1.0),
            "seed": asked.get("seed"),
            "stop": list(asked.get("stop", [])),
        },
        **({"the last event": "[DONE]"} if streamed else {}),
        "the text": "".join(pieces),
        **(
            {"the text after each step": ["".join(pieces[: k + 1]) for k in range(len(pieces))]}
            if streamed
            else {}
        ),
        "roles": ["assistant"] if chat else [],
        "finish reasons": ["stop" if len(pieces) == len(script) else "length"],
        "where the text is": ["delta" if streamed else "message"] if chat else ["text"],
        "object": [
            ("chat.completion.chunk" if streamed else "chat.completion") if chat else "text_completion"
        ],
        "model": ["scripted"],
        "different ids": 1,
        "created is a number": True,
        "index": ["0"],
        **({} if streamed else {"usage": [tokens, len(pieces), tokens + len(pieces)]}),
    }


_APP_TEXT = """import json
import time
import uuid

from tinyvllm_ref import SamplingParams


class Refused(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


async def read_json(receive):
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "the client has gone")
        body += message.get("body", b"")
        more = message.get("more_body", False)
    try:
        asked = json.loads(body)
    except ValueError:
        raise Refused(400, "the body is not JSON") from None
    if not isinstance(asked, dict):
        raise Refused(400, "the body is not a JSON object")
    return asked


async def begin(send, status, kind):
    headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_json(send, status, data):
    await begin(send, status, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(data).encode()})


OPTIONS = ("temperature", "top_p", "seed", "stop")


def build_app(engine):
    async def submit(asked, chat):
        if asked.get("model") != engine.model_name:
            raise Refused(404, f"there is no such model; this server has {engine.model_name}")
        try:
            ids = engine.encode_chat(asked["messages"]) if chat else engine.encode(asked["prompt"])
            options = {name: asked[name] for name in OPTIONS if asked.get(name) is not None}
            max_tokens = asked.get("max_tokens", None if chat else 16)
            return await engine.submit(ids, SamplingParams(max_tokens=max_tokens, **options))
        except KeyError as error:
            raise Refused(400, f"{error} is missing") from None
        except (ValueError, TypeError) as error:
            raise Refused(400, str(error)) from None

    def choice(chat, name, text, reason, role=True):
        said = {"role": "assistant", "content": text} if role else {"content": text}
        said = {name: said} if chat else {"text": text}
        return {"index": 0, **said, "finish_reason": reason, "logprobs": None}

    async def stream_out(stream, head, chat, receive, send):
        await begin(send, 200, b"text/event-stream; charset=utf-8")
        is_first = True

        async def take(delta):
            nonlocal is_first
            said = choice(chat, "delta", delta.text, delta.finish_reason, role=is_first)
            is_first = False
            body = event({**head, "choices": [said]})
            await send({"type": "http.response.body", "body": body, "more_body": True})

        if await follow(stream, receive, take):
            await send({"type": "http.response.body", "body": DONE})

    async def send_whole(stream, head, chat, receive, send):
        deltas = []

        async def take(delta):
            deltas.append(delta)

        if not await follow(stream, receive, take):
            return
        text = "".join(delta.text for delta in deltas)
        prompt, new = len(stream.prompt_token_ids), sum(len(delta.token_ids) for delta in deltas)
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        said = choice(chat, "message", text, deltas[-1].finish_reason)
        await send_json(send, 200, {**head, "choices": [said], "usage": usage})

    async def answer(method, path, receive, send):
        if (method, path) == ("GET", "/v1/models"):
            card = {"id": engine.model_name, "object": "model", "created": 0, "owned_by": "me"}
            await send_json(send, 200, {"object": "list", "data": [card]})
        elif method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            chat = path == "/v1/chat/completions"
            asked = await read_json(receive)
            stream = await submit(asked, chat)
            kind = "chat.completion" if chat else "text_completion"
            head = {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": engine.model_name}
            if asked.get("stream"):
                await stream_out(stream, {**head, "object": kind + ".chunk" * chat}, chat, receive, send)
            else:
                await send_whole(stream, head, chat, receive, send)
        else:
            raise Refused(404, f"there is nothing at {path}")

    async def app(scope, receive, send):
        if scope["type"] != "http":
            raise ValueError(f"this application does not speak {scope['type']}")
        try:
            await answer(scope["method"], scope["path"], receive, send)
        except Refused as error:
            await send_json(send, error.status, {"error": {"message": str(error), "type": "invalid_request_error"}})

    return app
"""


def _app(*changes: tuple[str, str]) -> str:
    return _changed(_APP_TEXT, *changes)


_ENCODED = 'engine.encode_chat(asked["messages"]) if chat else engine.encode(asked["prompt"])'
_TAKE_IT = """            body = event({**head, "choices": [said]})
            await send({"type": "http.response.body", "body": body, "more_body": True})
"""
_REFUSALS = """        except KeyError as error:
            raise Refused(400, f"{error} is missing") from None
        except (ValueError, TypeError) as error:
            raise Refused(400, str(error)) from None
"""

_APP = Exercise(
    id="24.5",
    title="the server: a part",
    answer="build_app",
    kind="function",
    arguments=("engine",),
    builds_on=("24.2", "24.4"),
    cases=_app_cases,
    run=_run_app,
    expected=_expect_app,
    points={"whole": 2, "stream": 2, "errors": 1, "gone": 2},
    seconds=3.0,
    makes={"build_app": "build_app"},
    file="server.py",
    hints=Hints(
        question="Take {case}. Follow the request through answer: what comes out of submit, and what does the client get, message by message?",
        rule="submit: another model's name is a 404. Ids come from engine.encode_chat(messages) or engine.encode(prompt), and nothing is added. Of OPTIONS, hand on those that the "
        "client gave. max_tokens has a default: 16 for a text, None (as long as there is room) for a chat. A ValueError or a TypeError, here or in engine.submit, is the client's: 400.\n\n"
        "stream_out: begin with text/event-stream; an event for each delta, with more_body; the role only in the first. If follow says True, DONE, without more_body.\n\n"
        "send_whole: collect the deltas by follow as well, so that a client that goes is noticed; then one choice with the whole text and the last finish_reason, and usage, for which "
        "stream.prompt_token_ids are the prompt's. By hand: 5 ids of a prompt and 3 new tokens are a total of 8.",
        code="""ids = engine.encode_chat(____) if chat else engine.encode(____)
options = {name: asked[name] for name in OPTIONS if ____}
max_tokens = asked.get("max_tokens", ____)
return await engine.submit(ids, SamplingParams(max_tokens=max_tokens, **options))

said = choice(chat, "delta", ____, ____, role=is_first)
is_first = ____
await send({"type": "http.response.body", "body": event(____), "more_body": ____})

if await follow(stream, receive, take):
    await send({"type": "http.response.body", "body": ____})

deltas.append(delta)
...
text = "".join(____)
said = choice(chat, "message", text, ____)
await send_json(send, 200, {**head, "choices": [said], "usage": usage})""",
    ),
    mistakes=(
        Mistake(
            "the messages glued together",
            _app((_ENCODED, 'engine.encode("\\n".join(one["content"] for one in asked["messages"]) if chat else asked["prompt"])')),
            "The contents alone, one after the other, are a text to be continued, and the model continues it. What makes a conversation of it are the roles and the special tokens around "
            "them, and only the template knows these: engine.encode_chat.",
            "How does the model learn who said what, and that it is its turn?",
        ),
        Mistake(
            "BOS put in front by hand",
            _app((_ENCODED, 'engine.encode("") + engine.encode_chat(asked["messages"]) if chat else engine.encode(asked["prompt"])')),
            "engine.encode(\"\") is BOS, and the template has written one already. Two of them are something that the model has never seen.",
            "Who writes BOS into the prompt of a conversation?",
        ),
        Mistake(
            "only the last message",
            _app(('asked["messages"])', 'asked["messages"][-1:])')),
            "The server keeps nothing between two requests. The client sends the whole conversation, and the prompt has all of it.",
            "From where would the model know what was said before?",
        ),
        Mistake(
            "options that nobody hands on",
            _app(("SamplingParams(max_tokens=max_tokens, **options)", "SamplingParams(max_tokens=max_tokens)")),
            "The client asked for a temperature, a seed, a stop string, and gets an answer as if it had not. Hand on what it gave.",
            "Where do the temperature and the seed of the request end up?",
        ),
        Mistake(
            "a chat of 16 tokens",
            _app(('asked.get("max_tokens", None if chat else 16)', 'asked.get("max_tokens", 16)')),
            "16 is the default of /v1/completions. A chat without max_tokens may be as long as there is room: SamplingParams(max_tokens=None).",
            "With how many tokens do the two ways end where the client says nothing?",
        ),
        Mistake(
            "the client's errors as the server's",
            _app((_REFUSALS, '        except KeyError as error:\n            raise Refused(400, f"{error} is missing") from None\n')),
            "A prompt that is too long or a temperature of -1 is the client's error, and it can mend it if it is told. An exception that leaves the application is a 500 without a word.",
            "Whose fault is a temperature of -1, and how does that person hear of it?",
        ),
        Mistake(
            "any model's name will do",
            _app(('        if asked.get("model") != engine.model_name:\n            raise Refused(404, f"there is no such model; this server has {engine.model_name}")\n', "")),
            "Who asks for another model gets an answer, and believes that it is that model's. Refuse with 404.",
            "Which model does the client think it is talking to?",
        ),
        Mistake(
            "the role in each chunk",
            _app(("role=is_first)", "role=True)")),
            "Clients put chunks together by adding their texts, the role's too: assistantassistantassistant. It belongs to the first chunk.",
            "What does a client get that adds up the fields of all chunks?",
        ),
        Mistake(
            "the whole text each time",
            _app(
                ("        is_first = True\n", '        is_first, text = True, ""\n'),
                ("            nonlocal is_first\n            said = choice(chat, \"delta\", delta.text,", "            nonlocal is_first, text\n            text += delta.text\n            said = choice(chat, \"delta\", text,"),
            ),
            "A delta is what is new. The client adds each to what it has, and so reads the beginning again and again.",
            "What does the client do with the second chunk?",
        ),
        Mistake(
            "everything at the end",
            _app(
                ("        is_first = True\n", "        is_first, events = True, []\n"),
                (_TAKE_IT, '            events.append(event({**head, "choices": [said]}))\n'),
                ('            await send({"type": "http.response.body", "body": DONE})\n', '            await send({"type": "http.response.body", "body": b"".join(events) + DONE})\n'),
            ),
            "The client asked for a stream and reads nothing until the answer is complete. Send each event when its delta comes.",
            "What can the client read after the first step?",
        ),
        Mistake(
            "the body never ends",
            _app(('"body": DONE}', '"body": DONE, "more_body": True}')),
            "more_body is true as long as there is more, and after DONE there is none. A connection that is never complete stays open, or the server takes it for broken.",
            "Which message tells the network that the body is complete?",
        ),
        Mistake(
            "events without text left out",
            _app(("            is_first = False\n", "            is_first = False\n            if not delta.text:\n                return\n")),
            "The token that ends a text often has no text of its own, and its delta has the finish_reason. Who leaves out what has no text leaves that out as well.",
            "Which delta says why the text ended, and what is its text?",
        ),
        Mistake(
            "[DONE] whatever follow says",
            _app(('        if await follow(stream, receive, take):\n            await send({"type"', '        await follow(stream, receive, take)\n        await send({"type"')),
            "[DONE] says that the answer is complete, and this one was cut off. follow returns whether the client is still there: send it only then.",
            "What did follow return, and who reads what you send after that?",
        ),
        Mistake(
            "submit is not awaited",
            _app(("return await engine.submit(", "return engine.submit(")),
            "A coroutine that is called and not awaited has not run: nothing was submitted, and what you return is no stream. Besides, its ValueError would come too late for your except.",
            "What does a call of an async function give, and when does its first line run?",
        ),
        Mistake(
            "no [DONE]",
            _app(('"body": DONE}', '"body": b""}')),
            "The client reads until the event [DONE], and takes a stream without it for one that was cut.",
            "How does the client know that this was all?",
        ),
        Mistake(
            "who waits for a whole text is not watched",
            _app(("        if not await follow(stream, receive, take):\n            return\n        text =", "        async for delta in stream:\n            await take(delta)\n        text =")),
            "A client that did not ask for a stream can hang up as well. follow watches it; a plain loop over the stream computes to the end, for nobody.",
            "A client asks for 1,000 tokens in one piece and hangs up after a second. Who notices?",
        ),
        Mistake(
            "the prompt is not counted",
            _app(('"total_tokens": prompt + new}', '"total_tokens": new}')),
            "total_tokens are those of the prompt and the new ones together.",
            "How many tokens went through the model in all?",
        ),
        Mistake(
            "why it ended is lost",
            _app(("deltas[-1].finish_reason)", "None)")),
            "A client that does not see \"length\" takes a text that was cut off for a complete one. The last delta has the reason.",
            "Did the text end, or was it cut off? Who knows?",
            variants=(_app(("deltas[-1].finish_reason)", "deltas[0].finish_reason)")),),
        ),
        Mistake(
            "always in one piece",
            _app((' if asked.get("stream"):\n', ' if asked.get("streamed"):\n')),
            "The client asked for \"stream\": true and gets JSON, where it looks for events.",
            "Which field of the request says that the answer is to be streamed?",
        )
    ),
)  # fmt: skip


# ---------------- what is drawn


def _seats_picture(answer: Any, cp: Any) -> Any:
    """Seven clients and three seats by the learner's loop: who computes in each step; two of them go."""
    from tinyvllm_ref.course import figures

    rng = np.random.default_rng(0)
    counts = {"a": 9, "b": 12, "c": 5, "d": 8, "e": 7, "f": 6, "g": 4}
    inputs = {
        "script": {name: rng.integers(10, 100, count).tolist() for name, count in counts.items()},
        "comes": {"a": 0, "b": 0, "c": 0, "d": 1, "e": 2, "f": 4, "g": "idle"},
        "drops": {"b": 4, "f": 6},
        "reads": {},
        "seats": 3,
        "seating": True,
    }
    found = _run_loop(answer, inputs, None)
    seats = [[step[seat] for step in found["seating"]] for seat in range(3)]
    return figures.timeline(
        seats, title="7 clients and 3 seats: b goes in step 4, f in step 6 while it waits"
    )


LESSON = Lesson(
    number="24",
    slug="serving",
    title="Serving",
    part=4,
    minutes=80,
    exercises=(_CHAT, _EVENTS, _LOOP, _FOLLOW, _APP),
    engine=EngineCard(
        mistakes=(
            ("24.5", "the messages glued together"),
            ("24.5", "BOS put in front by hand"),
            ("24.5", "the whole text each time"),
        ),
        prompt="Tell me a story about a rainy day.",
        write=serving.answer_by_server,
        note="A client sent this question to your server, and read the answer from its events. The engine behind it has all your parts that have passed.",
    ),
    pictures={"24.3": _seats_picture},
)
