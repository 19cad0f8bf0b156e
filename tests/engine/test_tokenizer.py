"""The tokenizer against the `tokenizers` library: both kinds of decoders, chat templates, streams."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tinyvllm_ref.tokenizer import Tokenizer

CORPUS = [
    "Once upon a time there was a little girl who lived in a small house near the forest.",
    "Müller aß 12 Äpfel für 3,50 € – naïve café, ½ und ²; ça va? Ærø, Ǆ, straße.",
    "日本語のテキスト、漢字かな交じり文。中文字符测试。한국어 문장.",
    "emoji 😀😃👩‍👩‍👧‍👦🇩🇪 and combining e\u0301 a\u0308, tabs\tand\n\nnewlines  with   spaces",
    "def f(x):\n    return x**2  # comment\n" * 3,
] * 3
SPECIAL = ["<s>", "</s>", "<|user|>"]
TEXTS = [
    "",
    " ",
    "hello world",
    "  leading and trailing  ",
    "日本 café 😀!",
    "a\u0301\u0301👩‍👩‍👧",
    "line\r\n\ttab",
    "<|user|>hi</s> there",
    "\ufffd real replacement \ufffd",
]


def save(tokenizer, folder, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def byte_level(bos=False):
    """GPT-2's kind: the tokens are bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["added token ☃"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer


def sentencepiece(*characters):
    """Llama 2's kind: pieces with U+2581 for a space, and byte tokens for what has no piece."""
    pieces = ["<unk>", *SPECIAL, *[f"<0x{byte:02X}>" for byte in range(256)], "\u2581", *characters]
    merges = []
    for left, right in [("h", "e"), ("\u2581", "t"), ("\u2581t", "he"), ("l", "l"), ("\u2581", "\u2581")]:
        pieces.append(left + right)
        merges.append((left, right))
    pieces.append("")  # vocabularies have such entries, and a model may well give one
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {piece: n for n, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    return tokenizer


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def kind(request, tmp_path_factory):
    """(ours, the library's) of one kind."""
    if request.param == "byte_level":
        library = byte_level()
    else:
        library = sentencepiece(*"abcdefghijklmnopqrstuvwxyz.!ABC\u00e9\ufffd")
    folder = save(library, tmp_path_factory.mktemp(request.param))
    return Tokenizer(folder), library


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_the_library_s(kind, text):
    ours, library = kind
    ids = ours.encode(text)
    assert ids == library.encode(text).ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_the_whole_text(kind, text):
    ours, _ = kind
    ids = ours.encode(text)
    for skip in (True, False):
        stream = ours.stream(skip_special_tokens=skip)
        pieces = [stream.push(token) for token in ids]
        assert "".join([*pieces, stream.end()]) == ours.decode(ids, skip_special_tokens=skip)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_to_what_they_decode_to(kind, data):
    """Also those that no text gives: bytes that are no UTF-8, specials anywhere."""
    ours, library = kind
    size = library.get_vocab_size()
    few = st.sampled_from(
        [library.token_to_id("<s>"), *range(size - 45, size), *range(4, 14), *range(190, 260)]
    )
    ids = data.draw(st.lists(st.one_of(st.integers(0, size + 1), few), max_size=25))
    skip = data.draw(st.booleans())
    stream = ours.stream(skip_special_tokens=skip)
    pieces = [stream.push(token) for token in ids]
    whole = library.decode([token for token in ids if token < size], skip_special_tokens=skip)
    assert "".join([*pieces, stream.end()]) == whole == ours.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20))
def test_a_stream_never_gives_half_a_character(kind, text):
    """What came so far always begins the text; a half character would be one that the text has not."""
    ours, _ = kind
    ids = ours.encode(text)
    whole = ours.decode(ids)
    stream = ours.stream()
    so_far = ""
    for token in ids:
        so_far += stream.push(token)
        assert whole.startswith(so_far)


def test_a_token_without_text_does_not_begin_a_new_text(tmp_path):
    """The space that is dropped at the start of a text is kept after it."""
    library = sentencepiece(*"abcdefghijklmnopqrstuvwxyz")
    folder = save(library, tmp_path)
    ours = Tokenizer(folder)
    empty = library.get_vocab_size() - 1
    assert library.id_to_token(empty) == ""
    ids = [*ours.encode("a"), empty, *ours.encode("the")]
    stream = ours.stream()
    assert "".join(map(stream.push, ids)) == library.decode(ids) == "a the"


def test_an_emoji_comes_in_one_piece(kind):
    ours, _ = kind
    stream = ours.stream()
    ids = ours.encode("a 😀!")
    pieces = [piece for piece in map(stream.push, ids) if piece]
    assert len(ids) > len(pieces)
    assert any("😀" in piece for piece in pieces)
    assert stream.end() == ""


def test_an_unfinished_character_is_given_up_at_the_end(kind):
    ours, library = kind
    smile = ours.encode("😀")
    cut = smile[:-1]
    stream = ours.stream()
    assert "".join(map(stream.push, cut)) == ""
    assert stream.end() == library.decode(cut)
    assert "\ufffd" in library.decode(cut)


def test_token_bytes_join_to_the_text(kind):
    ours, _ = kind
    text = "the café 😀"
    joined = b"".join(map(ours.token_bytes, ours.encode(text)))
    assert joined.decode().strip() == text
    assert ours.token_bytes(10**6) == b""


def test_bos_is_added_once(tmp_path):
    ours = Tokenizer(save(byte_level(bos=True), tmp_path, bos_token="<s>", eos_token={"content": "</s>"}))
    bos = ours.bos_token_id
    assert (ours.bos_token, ours.eos_token) == ("<s>", "</s>")
    assert ours.eos_token_id == ours.encode("</s>", add_special_tokens=False)[0]
    assert ours.encode("hi")[0] == bos
    assert ours.encode("hi")[1] != bos
    assert ours.encode("<s>hi") == ours.encode("hi")
    assert ours.encode("hi", add_special_tokens=False) == ours.encode("hi")[1:]
    assert ours.encode("") == [bos]


def test_add_bos_token_of_the_settings_is_honoured(tmp_path):
    ours = Tokenizer(save(byte_level(), tmp_path, bos_token="<s>", add_bos_token=True))
    assert ours.encode("hi")[0] == ours.bos_token_id
    assert ours.encode("<s>hi") == ours.encode("hi")
    without = Tokenizer(save(byte_level(), tmp_path / "without", bos_token="<s>"))
    assert without.encode("hi") == ours.encode("hi")[1:]


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|user|>{{ message['role'] }}: {{ message['content'] | trim }}</s>\n"
    "{% endfor %}\n    {%- if add_generation_prompt %}<|user|>assistant: {% endif %}"
)


def test_chat_template_and_no_second_bos(tmp_path):
    ours = Tokenizer(save(byte_level(bos=True), tmp_path, bos_token="<s>", chat_template=TEMPLATE))
    messages = [{"role": "user", "content": " hi "}]
    text = ours.apply_chat_template(messages)
    assert text == "<s><|user|>user: hi</s>\n<|user|>assistant: "
    ids = ours.encode_chat(messages)
    assert ids.count(ours.bos_token_id) == 1
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.apply_chat_template(messages, add_generation_prompt=False).endswith("</s>\n")


def test_where_the_chat_template_comes_from(tmp_path):
    many = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    folder = save(byte_level(), tmp_path, chat_template=many)
    messages = [{"role": "user", "content": "hi"}]
    assert Tokenizer(folder).apply_chat_template(messages) == "default"
    (folder / "chat_template.jinja").write_text("{% if tools is none %}file{% endif %}")
    assert Tokenizer(folder).apply_chat_template(messages) == "file"
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(save(byte_level(), tmp_path / "none")).apply_chat_template(messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_a_value_error(tmp_path, template, message):
    ours = Tokenizer(save(byte_level(), tmp_path, chat_template=template))
    with pytest.raises(ValueError, match="the chat template refuses this conversation") as caught:
        ours.apply_chat_template([{"role": "user", "content": "hi"}])
    assert message in str(caught.value)


def test_templates_get_what_transformers_gives_them(tmp_path):
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') }}"
    )
    ours = Tokenizer(save(byte_level(), tmp_path, chat_template=template))
    messages = [{"role": "user", "content": "é<"}, {"role": "user", "content": "no"}]
    assert ours.apply_chat_template(messages).startswith('{"role": "user", "content": "é<"}20')


NEEDED = "role and content must be there, both strings"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("hi", "is of type str; it must be a mapping with role and content"),
        ({}, f": role is missing (it has nothing); {NEEDED}"),
        ({"content": "hi"}, f": role is missing (it has content); {NEEDED}"),
        ({"role": 1, "content": "hi"}, f": role is of type int (it has role, content); {NEEDED}"),
        ({"role": "user"}, f": content is missing (it has role); {NEEDED}"),
        (
            {"role": "user", "content": None},
            f": content is of type NoneType (it has role, content); {NEEDED}",
        ),
        ({"role": "user", "content": [{"text": "hi"}]}, ": content is of type list (it has role, content)"),
        ({"role": "user", "tool_calls": []}, ": content is missing (it has role, tool_calls)"),
    ],
)
def test_malformed_messages_are_named_by_their_number(tmp_path, message, said):
    ours = Tokenizer(save(byte_level(), tmp_path, chat_template=TEMPLATE))
    right = {"role": "user", "content": "hi"}
    for conversation in ([right, message], [right, message, right]):
        with pytest.raises(ValueError, match=r"messages\[1\]") as caught:
            ours.apply_chat_template(conversation)
        assert said in str(caught.value)


def test_a_conversation_has_a_message_and_one_that_calls_tools_needs_no_content(tmp_path):
    ours = Tokenizer(save(byte_level(), tmp_path, chat_template="{{ messages[0].tool_calls[0] }}"))
    with pytest.raises(ValueError, match="messages is empty"):
        ours.apply_chat_template([])
    for content in ({}, {"content": None}):
        assert ours.apply_chat_template([{"role": "assistant", "tool_calls": ["call"], **content}]) == "call"


def test_files_that_are_no_tokenizer_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json at"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: is not a tokenizer"):
        Tokenizer(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for text, message in [("{", "is not valid JSON"), ("[]", "holds a JSON list")]:
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            Tokenizer(tmp_path)


def test_wrong_arguments_are_named(kind):
    ours, _ = kind
    with pytest.raises(TypeError, match="text is a bytes; it must be a str"):
        ours.encode(b"hi")
    with pytest.raises(ValueError, match="token id -1 is negative"):
        ours.decode([5, -1])


def test_padding_and_truncation_of_the_file_are_not_used(tmp_path):
    library = byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=8)
    assert len(Tokenizer(save(library, tmp_path)).encode("one two three four")) > 8
