"""What a learner made is what runs: one part at a time, the attention parts in every state, and all of them."""

import inspect
import json

import numpy as np
import own_parts
import pytest
from models import load, tiny_folder

from tinyvllm_ref import LLM, SamplingParams, assembly
from tinyvllm_ref.assembly import Parts, complete
from tinyvllm_ref.buffers import Buffers
from tinyvllm_ref.device import is_gpu
from tinyvllm_ref.kernels import source
from tinyvllm_ref.model_runner import all_logits
from tinyvllm_ref.parts import LESSONS

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=10, temperature=1.0, seed=0, ignore_eos=True)
PROMPTS = ["Once upon a time", "x", "There was once a frog named Button who loved to sing."]
# Not in every engine: the first two serve only the merging of partial results, texts have no calls, and the
# server comes later.
NOT_CALLED = {"merge_attention", "bf16_to_float", "build_app", "BF16_CUDA", "BLOCK_SUM_CUDA"}
SINGLE = [name for name in LESSONS if name not in NOT_CALLED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder):
    llm = LLM(folder, num_blocks=64)
    logits = llm.logits(list(range(100, 150)))
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)], logits


class Counted:
    """A part that counts its calls."""

    def __init__(self, part):
        self.part, self.calls = part, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.part(*args, **kwargs)


def relative_error(logits, expected):
    return np.abs(logits - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("name", SINGLE)
def test_one_own_part_is_called_and_gives_the_same(name, folder, expected):
    own = {"attention_tiled": "attention_gqa"}.get(name, name)
    counted = Counted(getattr(own_parts, own))
    if name == "float_to_bf16":  # only other dtypes are rounded
        folder = float32_copy(folder)
    llm = LLM(folder, parts=Parts().replace(**{name: counted}), num_blocks=64)
    assert llm.parts.owners()[name] == "learner"
    assert [who for part, who in llm.parts.owners().items() if part != name] == ["reference"] * (
        len(llm.parts.owners()) - 1
    )
    outputs = llm.generate(PROMPTS, DRAWN if name == "sample" else GREEDY)
    assert counted.calls > 0
    if name != "sample":
        assert [output.outputs[0].token_ids for output in outputs] == expected[0]
    if name not in ("argmax", "Engine"):
        before = counted.calls
        assert relative_error(llm.logits(list(range(100, 150))), expected[1]) < 1e-2
        in_logits = name not in ("sample", "Scheduler", "BlockManager", "paged_attention")
        at_start = inspect.isclass(counted.part) or name in (
            *("read_safetensors", "load_weights", "rope_frequencies", "plan_buffers", "float_to_bf16"),
        )
        assert (counted.calls > before) == (in_logits and not at_start)


def float32_copy(folder):
    """The same model with its weights in float32."""
    from tinyvllm_ref.bf16 import bf16_to_float
    from tinyvllm_ref.checkpoint.safetensors import read_safetensors, write_safetensors

    copy = folder.parent / "tiny-float32"
    copy.mkdir(exist_ok=True)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (copy / file).write_bytes((folder / file).read_bytes())
    views = read_safetensors(folder / "model.safetensors")
    layout = {name: ("F32", view.shape) for name, view in views.items()}
    values = [bf16_to_float(view.numpy()).data for view in views.values()]
    write_safetensors(copy / "model.safetensors", layout, values)
    return copy


# ---------------- texts


def test_an_own_block_sum_is_in_the_reference_s_norms(folder, expected):
    llm = LLM(folder, parts=Parts().replace(BLOCK_SUM_CUDA=own_parts.BLOCK_SUM_CUDA), num_blocks=64)
    assert relative_error(llm.logits(list(range(100, 150))), expected[1]) < 1e-2
    drops = own_parts.BLOCK_SUM_CUDA.replace("t < blockDim.x", "t < blockDim.x - 1")
    llm = LLM(folder, parts=Parts().replace(BLOCK_SUM_CUDA=drops), num_blocks=64)
    assert relative_error(llm.logits(list(range(100, 150))), expected[1]) > 1e-2


def test_an_own_rounding_is_in_every_kernel(folder, expected):
    llm = LLM(folder, parts=Parts().replace(BF16_CUDA=own_parts.BF16_CUDA), num_blocks=64)
    np.testing.assert_array_equal(llm.logits(list(range(100, 150))), expected[1])
    truncates = own_parts.BF16_CUDA.replace("u + 0x7fffu + ((u >> 16) & 1u)", "u")
    llm = LLM(folder, parts=Parts().replace(BF16_CUDA=truncates), num_blocks=64)
    assert 1e-3 < relative_error(llm.logits(list(range(100, 150))), expected[1]) < 0.2


def test_texts_reach_parts_that_were_filled_before(folder, expected):
    """Parts.mine() is complete already when a text is exchanged in it."""
    drops = own_parts.BLOCK_SUM_CUDA.replace("t < blockDim.x", "t < blockDim.x - 1")
    llm = LLM(folder, parts=Parts.reference().replace(BLOCK_SUM_CUDA=drops), num_blocks=64)
    assert relative_error(llm.logits(list(range(100, 150))), expected[1]) > 1e-2


# ---------------- attention in its states


@pytest.mark.parametrize(
    ("made", "prefill", "decode"),
    [
        (["attention"], "attention", "attention"),
        (["attention", "attention_gqa"], "attention_gqa", "attention_gqa"),
        (["attention", "attention_gqa", "attention_tiled"], "attention_tiled", "attention_tiled"),
        (["attention", "paged_attention"], "attention", "paged_attention"),
        (["paged_attention"], None, "paged_attention"),
    ],
)
def test_the_newest_attention_serves(made, prefill, decode, folder, expected):
    versions = {"attention_tiled": own_parts.attention_gqa}
    counted = {name: Counted(versions.get(name) or getattr(own_parts, name)) for name in made}
    model = load(folder, Parts().replace(**counted))
    llm = LLM(folder, parts=Parts().replace(**counted), num_blocks=64)
    layers = model.config.num_hidden_layers
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected[0]
    calls = {name: part.calls for name, part in counted.items()}
    decodes = 9 * layers  # steps after the first token, with all three requests in each
    wanted = dict.fromkeys(made, 0)
    if prefill:
        wanted[prefill] += len(PROMPTS) * layers
    wanted[decode] += decodes * (1 if decode == "paged_attention" else len(PROMPTS))
    assert calls == wanted


def test_kv_heads_are_repeated_for_lesson_10_only(folder):
    model = load(folder, Parts().replace(attention=own_parts.attention))  # it asserts equal heads
    assert model.config.num_attention_heads > model.config.num_key_value_heads
    all_logits(model, model.parts, [1, 2, 3])


def test_mixed_steps_of_prefill_and_decode(folder, expected):
    for parts in (Parts(), Parts().replace(attention_gqa=own_parts.attention_gqa)):
        llm = LLM(folder, parts=parts, num_blocks=64, max_num_batched_tokens=9)
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected[0]


# ---------------- all parts


def all_own():
    values = {name: getattr(own_parts, name, None) for name in LESSONS} | {
        "attention_tiled": own_parts.attention_gqa
    }
    return Parts().replace(**values)


def refuse(name):
    def raises(*args, **kwargs):
        raise AssertionError(f"the reference's {name} was called")

    return raises


def test_with_all_parts_own_no_part_of_the_reference_runs(folder, expected, monkeypatch):
    for table in (assembly._KERNELS, assembly._OTHERS):
        for name in table:
            monkeypatch.setitem(table, name, refuse(name))
    for name in ("Layer", "Forward", "paged_prefill"):
        monkeypatch.setattr(assembly, name, refuse(name))
    assert not all_own().missing()
    llm = LLM(folder, parts=all_own(), num_blocks=64)
    assert set(llm.parts.owners().values()) == {"learner"}
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected[0]
    assert [output.outputs[0].text for output in outputs] == [
        llm.tokenizer.decode(ids) for ids in expected[0]
    ]
    assert "".join(llm.stream(PROMPTS[0], GREEDY)) == outputs[0].outputs[0].text
    assert relative_error(llm.logits(list(range(100, 150))), expected[1]) < 1e-2
    llm.engine.blocks.check()
    assert llm.engine.blocks.num_free == 64


def test_the_refusal_is_a_refusal(folder, monkeypatch):
    monkeypatch.setitem(assembly._KERNELS, "rms_norm", refuse("rms_norm"))
    with pytest.raises(AssertionError, match="the reference's rms_norm was called"):
        LLM(
            folder, parts=all_own().replace(decoder_layer=None, forward=None, rms_norm=None), num_blocks=64
        ).logits([1])


def test_the_reference_is_complete_but_for_the_server():
    assert Parts.reference().missing() == ("build_app",)
    assert set(Parts.reference().owners().values()) == {"reference"}


def test_parts_compose_anew_what_is_made_of_them(folder):
    counted = Counted(own_parts.rms_norm)
    model = load(folder, Parts.reference().replace(rms_norm=counted))
    all_logits(model, model.parts, [1, 2])
    assert counted.calls == 1


def test_mine_reads_the_learner_s_folder(folder, tmp_path, monkeypatch, expected):
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path))
    assert Parts.mine().owners() == Parts.reference().owners()
    (tmp_path / "silu_mul.py").write_text("from own_parts import silu_mul as mine\n")
    (tmp_path / "block_sum.cu").write_text(own_parts.BLOCK_SUM_CUDA)
    listing = {
        "silu_mul": {"file": "silu_mul.py", "name": "mine"},
        "BLOCK_SUM_CUDA": {"file": "block_sum.cu"},
    }
    (tmp_path / "parts.json").write_text(json.dumps({"version": 1, "parts": listing}))
    mine = Parts.mine()
    assert [name for name, who in mine.owners().items() if who == "learner"] == ["BLOCK_SUM_CUDA", "silu_mul"]
    assert mine.silu_mul is own_parts.silu_mul
    outputs = LLM(folder, parts=mine, num_blocks=64).generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected[0]


def test_device_functions_are_files_of_the_kernels():
    for name, file in assembly._DEVICE_FUNCTIONS.items():
        assert getattr(Parts.reference(), name) == source.read(file)
    headers = complete(Parts().replace(BF16_CUDA="x"), Buffers())
    assert headers.rms_norm is not Parts.reference().rms_norm


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="needs a card")
def test_own_parts_on_a_card(folder):
    reference = LLM(folder, num_blocks=64).logits(list(range(100, 150)))
    assert (
        relative_error(LLM(folder, parts=all_own(), num_blocks=64).logits(list(range(100, 150))), reference)
        < 1e-2
    )
