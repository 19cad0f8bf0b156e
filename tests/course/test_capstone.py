"""The capstone: an engine of the learner's parts alone, and the program that is left in ``my_engine/``."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from tinyvllm_ref import LLM, SamplingParams, assembly, batch
from tinyvllm_ref.bf16 import bf16_to_float
from tinyvllm_ref.checkpoint.names import REPOSITORY
from tinyvllm_ref.checkpoint.safetensors import read_safetensors
from tinyvllm_ref.config import EngineConfig, ModelConfig
from tinyvllm_ref.course import capstone, given, my_engine
from tinyvllm_ref.course.given.inputs import blocks_that_fit, check_request, make_inputs
from tinyvllm_ref.parts import LESSONS
from tinyvllm_ref.request import Request

from .taken import only_the_device, pass_all

BLOCKS = 48
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taken") / "my_engine"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYVLLM_MY_ENGINE", str(folder))
        pass_all(folder)
    return folder


@pytest.fixture(scope="module")
def wanted():
    """What the reference makes of the forty prompts."""
    llm = LLM("tiny-stories", num_blocks=BLOCKS)
    return llm.generate(list(capstone.prompts()), GREEDY, use_tqdm=False)


def refuse_the_reference(monkeypatch):
    """Every part of the reference's raises, and so does the adapter that calls attention for it."""

    def raising(name):
        def raises(*args, **kwargs):
            raise AssertionError(f"the reference's {name} was called")

        return raises

    for table in (assembly._KERNELS, assembly._OTHERS):
        for name in table:
            monkeypatch.setitem(table, name, raising(name))
    for name in ("Layer", "Forward", "PagedAttend", "paged_prefill", "paged_attention", "gather_kv"):
        monkeypatch.setattr(assembly, name, raising(name))


def test_every_part_is_the_learner_s_and_none_of_the_reference_s_runs(folder, wanted, monkeypatch):
    """Forty ragged prompts, too few blocks for them: the reference's tokens, texts and reasons, and no block lost."""
    refuse_the_reference(monkeypatch)
    llm = LLM("tiny-stories", parts=assembly.Parts.mine(folder), num_blocks=BLOCKS)
    owners = llm.parts.owners()
    assert owners.pop("build_app", "learner") == "learner"
    assert set(owners) == set(LESSONS) - {"build_app"}
    assert set(owners.values()) == {"learner"}
    requests = []
    add = llm.engine.add_request
    monkeypatch.setattr(llm.engine, "add_request", lambda request: (requests.append(request), add(request)))
    outputs = llm.generate(list(capstone.prompts()), GREEDY, use_tqdm=False)
    monkeypatch.undo()
    mine, right = ([o.outputs[0].token_ids for o in some] for some in (outputs, wanted))
    parted = capstone.partings(
        my_engine.PlainParts.load(folder), [o.prompt_token_ids for o in wanted], mine, right
    )
    # Kernels that add in another order than the reference's: at a near tie the text may take another turn.
    assert all(one.is_tie for one in parted), parted
    assert len(parted) <= 2
    same = [k for k in range(40) if k not in {one.prompt for one in parted}]
    assert [outputs[k].outputs[0].text for k in same] == [wanted[k].outputs[0].text for k in same]
    reasons = [[some[k].outputs[0].finish_reason for k in same] for some in (outputs, wanted)]
    assert reasons[0] == reasons[1]
    assert sum(request.num_preemptions for request in requests) > 0
    assert any(o.num_preemptions for o in wanted)
    llm.engine.blocks.check()
    assert llm.engine.blocks.num_free == BLOCKS
    assert not llm.engine.has_work


def test_the_refusal_is_a_refusal(monkeypatch):
    refuse_the_reference(monkeypatch)
    with pytest.raises(AssertionError, match=r"the reference's .* was called"):
        LLM("tiny-stories", num_blocks=8)


PLAIN = (
    "read_safetensors",
    "Tokenizer",
    "load_weights",
    "plan_buffers",
    "pack",
    "BlockManager",
    "Scheduler",
    "Engine",
)


FEWER = {"num_blocks": 20, "max_num_batched_tokens": 24}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_blocks": BLOCKS}, FEWER], ids=str)
def test_with_the_reference_s_kernels_the_tokens_are_equal_to_the_bit(folder, wanted, options):
    """All that is Python is the learner's; preempted or not, every one of the forty completions is the reference's."""
    own = my_engine.PlainParts.load(folder)
    parts = assembly.Parts().replace(**{name: getattr(own, name) for name in PLAIN})
    outputs = LLM("tiny-stories", parts=parts, **options).generate(
        list(capstone.prompts()), GREEDY, use_tqdm=False
    )
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in wanted]
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in wanted]


@pytest.mark.slow
def test_the_reference_with_the_same_kernels_gives_the_same_tokens(folder):
    """All that computes is the learner's in both; the engine around it is the learner's or the reference's."""
    own = my_engine.PlainParts.load(folder)
    kernels = {name: getattr(own, name) for name in LESSONS if name not in (*PLAIN, "build_app")}
    found = []
    for parts in (assembly.Parts.mine(folder), assembly.Parts().replace(**kernels)):
        llm = LLM("tiny-stories", parts=parts, num_blocks=BLOCKS)
        outputs = llm.generate(list(capstone.prompts()), GREEDY, use_tqdm=False)
        found.append([(o.outputs[0].token_ids, o.outputs[0].text) for o in outputs])
    assert {name for name, owner in llm.parts.owners().items() if owner == "reference"} == set(PLAIN)
    assert found[0] == found[1]


@pytest.mark.slow
def test_own_tokens_do_not_depend_on_the_company(folder):
    """With every kernel the learner's: to the bit the same in few blocks, in many, in pieces, and alone."""
    parts, prompts = assembly.Parts.mine(folder), list(capstone.prompts()[:12])
    found = []
    for options in (
        {"num_blocks": 200},
        {"num_blocks": 12},
        {"num_blocks": 12, "max_num_batched_tokens": 9},
        {"num_blocks": 12, "max_num_seqs": 1},
    ):
        outputs = LLM("tiny-stories", parts=parts, **options).generate(prompts, GREEDY, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[1:] == [found[0]] * 3


def test_a_fault_is_no_near_tie(folder):
    """What tells another turn from a wrong engine: rotations the wrong way round move the logits far more."""
    own = my_engine.PlainParts.load(folder)

    def backwards(q, k, positions, inv_freq):
        own.rope(q, k, positions, -inv_freq)

    ids = [[2042, 713, 900, 258, 523]]
    right = capstone.run(assembly.Parts(), ids, num_blocks=8)
    wrong = capstone.run(own.replace(rope=backwards), ids, num_blocks=8)
    (parting,) = capstone.partings(own.replace(rope=backwards), ids, wrong.tokens, right.tokens)
    assert not parting.is_tie


@pytest.mark.slow
def test_draws_depend_on_seeds_alone(folder):
    """With the reference's kernels the draws are the reference's; with own ones they are the same in any company."""
    prompts = list(capstone.prompts()[:8])
    params = [SamplingParams(max_tokens=16, temperature=0.3 * k, top_p=0.9, seed=k) for k in range(8)]

    def drawn(parts, **options):
        outputs = LLM("tiny-stories", parts=parts, **options).generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    own = my_engine.PlainParts.load(folder)
    plain = assembly.Parts().replace(**{name: getattr(own, name) for name in PLAIN})
    wanted = drawn(assembly.Parts(), num_blocks=200)
    assert drawn(plain, num_blocks=200) == wanted
    assert drawn(plain, num_blocks=7) == wanted
    mine = drawn(assembly.Parts.mine(folder), num_blocks=200)
    assert drawn(assembly.Parts.mine(folder), num_blocks=7, max_num_seqs=5) == mine
    assert drawn(assembly.Parts.mine(folder), num_blocks=7, max_num_seqs=1) == mine


def test_an_older_attention_serves_a_learner_s_engine(folder):
    """Whoever begins with the capstone: what is missing comes from the reference, and an older attention is used."""
    own = my_engine.PlainParts.load(folder)
    prompts, params = list(capstone.prompts()[:3]), SamplingParams(max_tokens=6, temperature=0.0)
    reference = LLM("tiny-stories", num_blocks=40).generate(prompts, params, use_tqdm=False)
    wanted = [output.outputs[0].token_ids for output in reference]
    for names in ((), ("attention",), ("attention_gqa",), ("attention_tiled",), ("paged_attention",)):
        parts = assembly.Parts().replace(
            **{name: getattr(own, name) for name in ("Engine", "Scheduler", *names)}
        )
        outputs = LLM("tiny-stories", parts=parts, num_blocks=40).generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == wanted, names


# ---------------- the program


def run(folder, environment, *arguments):
    command = [sys.executable, str(folder / "generate.py"), *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, cwd=folder.anchor
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return only_the_device(tmp_path_factory.mktemp("guard") / "path")


def test_the_program_needs_the_device_alone(folder, environment):
    done = run(folder, environment, "Once upon a time")
    assert done.returncode == 0, done.stderr
    params = SamplingParams(max_tokens=128, temperature=0.0)
    text = LLM("tiny-stories").generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text
    assert done.stdout == f"Once upon a time{text}\n"
    assert done.stderr == ""


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_checkpoints_of_other_types(folder, environment, tmp_path, dtype):
    """The bfloat16 numbers, written wider; float16 holds them all but for those that are too small to count."""
    source, model = REPOSITORY / "data" / "tiny-stories", tmp_path / "model"
    shutil.copytree(source, model, ignore=shutil.ignore_patterns("*.safetensors", "*.py"))
    kind = np.float32 if dtype == "F32" else np.float16
    views = read_safetensors(source / "model.safetensors")
    wide = {name: bf16_to_float(view.numpy()).astype(kind) for name, view in views.items()}
    save_file(wide, model / "model.safetensors")
    written = run(folder, environment, "Once upon a time", "--max-tokens", "32", "--model", str(model))
    original = run(folder, environment, "Once upon a time", "--max-tokens", "32")
    assert (written.stdout, written.stderr) == (original.stdout, "")


@pytest.mark.skipif(sys.platform != "linux", reason="the folder of a user's data is another one elsewhere")
def test_a_fetched_model_is_found_where_it_was_fetched_to(folder, environment, tmp_path):
    source = REPOSITORY / "data" / "tiny-stories"
    ignored = shutil.ignore_patterns("*.py")
    shutil.copytree(source, tmp_path / "tinyvllm" / "models" / "fetched", ignore=ignored)
    own = {name: value for name, value in environment.items() if name != "TINYVLLM_HOME"}
    done = run(
        folder,
        own | {"XDG_DATA_HOME": str(tmp_path)},
        "Once upon a time",
        "--max-tokens",
        "2",
        "--model",
        "fetched",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_guard_refuses(environment):
    code = "import tinyvllm_ref.device, tinyvllm_ref.emulation, tinyvllm_ref.request"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "ImportError: tinyvllm_ref.request was imported" in done.stderr


@pytest.mark.slow
def test_many_prompts_in_few_blocks(folder, environment):
    prompts = [prompt for prompt in capstone.prompts() if not prompt.startswith("-")]
    assert len(prompts) == 40
    done = run(folder, environment, *prompts, "--max-tokens", "24", "--num-blocks", str(BLOCKS))
    assert done.stderr == ""
    llm = LLM("tiny-stories", parts=assembly.Parts.mine(folder), num_blocks=300)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    texts = [prompt + o.outputs[0].text for prompt, o in zip(prompts, outputs, strict=True)]
    assert done.stdout == "\n\n".join(texts) + "\n"


def test_stop_strings_and_chance(folder, environment):
    arguments = [
        "One windy morning, a shy girl named Mia",
        "--stop",
        "apple tree",
        "--temperature",
        "0.7",
        "--seed",
        "3",
    ]
    done = run(folder, environment, *arguments, "--max-tokens", "40")
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=3, stop=["apple tree"])
    text = LLM("tiny-stories").generate(arguments[0], params, use_tqdm=False)[0].outputs[0].text
    assert (done.stdout, done.stderr) == (f"{arguments[0]}{text}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Once", "--max-tokens", "0"], "generate.py: SamplingParams: max_tokens is 0; it must be"),
        (
            ["Once", "--max-tokens", "5000"],
            "a prompt of 2 tokens and max_tokens 5000 make 5002; together they can have 1024",
        ),
        (["Once", "--max-tokens", "40", "--num-blocks", "2"], "request '0' can have 42 tokens; 32 fit"),
        (["Once", "--model", "no-such"], "no model 'no-such': none of these folders has a config.json"),
        (
            ["Once", "--num-blocks", "0"],
            "generate.py: EngineConfig: num_blocks is 0; it must be a positive integer",
        ),
    ],
)
def test_what_can_not_be_is_said(folder, environment, arguments, message):
    done = run(folder, environment, *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_its_files_import_no_more(folder):
    """Statically, in every file: the device, and where a part is missing the reference in its place."""
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("tinyvllm_ref") for alias in node.names), path.name
            elif (
                isinstance(node, ast.ImportFrom) and not node.level and node.module.startswith("tinyvllm_ref")
            ):
                names = {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
                allowed = {"tinyvllm_ref", "tinyvllm_ref.device"} | {
                    f"tinyvllm_ref.device.{n}" for n in ("cp", "cupyx")
                }
                assert names <= allowed or path.name == "earlier.py", (path.name, names)


def test_no_program_before_the_capstone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my_engine"))
    pass_all(tmp_path / "my_engine", "22")
    capstone.save_program()
    assert not (tmp_path / "my_engine" / "generate.py").exists()
    for cell in (
        capstone.show_program,
        capstone.race,
        capstone.draw_throughput,
        lambda: capstone.write_story("Once"),
    ):
        cell()
        said = capsys.readouterr()
        assert said.out.count("\n") == 1
        assert said.err == ""


# ---------------- the given modules


def test_inputs_are_those_of_the_reference():
    rng = np.random.default_rng(5)
    for _ in range(30):
        size, count = int(rng.integers(1, 9)), int(rng.integers(1, 7))
        starts = [int(n) for n in rng.integers(0, 20, count)]
        counts = [int(n) for n in rng.integers(1, 8, count)]
        samples = [bool(n) for n in rng.integers(0, 2, count)]
        requests = [
            SimpleNamespace(token_ids=rng.integers(0, 99, start + n + int(rng.integers(0, 3))).tolist())
            for start, n in zip(starts, counts, strict=True)
        ]
        tables = [
            rng.integers(0, 50, -(-(s + n) // size) + 1).tolist() for s, n in zip(starts, counts, strict=True)
        ]
        step = SimpleNamespace(
            requests=requests,
            starts=starts,
            num_tokens=counts,
            samples=samples,
            block_tables=tables,
            num_decodes=1,
        )
        mine = make_inputs(step, size, batch.pack)
        rows = [end - 1 for (_, end), wanted in zip(mine.spans, samples, strict=True) if wanted]
        sequences = [r.token_ids[s : s + n] for r, s, n in zip(requests, starts, counts, strict=True)]
        right = batch.make_inputs(sequences, starts, tables, rows or [sum(counts) - 1], 1, size)
        for name in (
            "ids",
            "positions",
            "slots",
            "query_starts",
            "context_lens",
            "block_tables",
            "logits_rows",
        ):
            a, b = getattr(mine, name), getattr(right, name)
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a.get(), b.get(), err_msg=name)
        assert mine.contexts == list(right.contexts)


def test_a_request_is_refused_by_name():
    sizes = capstone_config()
    engine = EngineConfig()
    for options, message in (
        ({"n": 2}, "n is 2; this engine supports 1 alone"),
        ({"logprobs": 3}, "logprobs is 3; this engine supports None alone"),
        ({"presence_penalty": 0.5}, "presence_penalty is 0.5; this engine supports 0.0 alone"),
        (
            {"max_tokens": 1024},
            "a prompt of 1 tokens and max_tokens 1024 make 1025; together they can have 1024",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_request(Request("a", [1], SamplingParams(**options)), sizes, engine)
    with pytest.raises(ValueError, match="token id 2048 is in the prompt; ids must be from 0 to 2047"):
        check_request(Request("a", [2048], SamplingParams()), sizes, engine)
    open_ended = Request("a", [1], SamplingParams(max_tokens=None))
    check_request(open_ended, sizes, engine)
    assert open_ended.max_num_tokens == 1024


def capstone_config():
    from tinyvllm_ref.checkpoint.names import resolve

    return ModelConfig.from_json(resolve("tiny-stories"))


def test_blocks_that_fit():
    sizes = capstone_config()
    assert blocks_that_fit(sizes, EngineConfig(num_blocks=7)) == 7
    assert 1 <= blocks_that_fit(sizes, EngineConfig(max_num_seqs=2)) <= 2 * 1024 // 16
    huge = SimpleNamespace(kv_bytes_per_token=1 << 60, max_position_embeddings=1024)
    with pytest.raises(MemoryError, match="a block of 16 tokens takes 18,446,744,073,709,551,616"):
        blocks_that_fit(huge, EngineConfig())


def test_given_modules_are_written_with_what_they_need():
    assert given.needed_by("from .inputs import make_inputs") == ["inputs"]
    assert given.needed_by("from .request import Request") == ["sampling_params", "request"]
    assert given.needed_by("import math") == []
    text = given.localized(
        "from tinyvllm_ref.request import Request\n"
        "from tinyvllm_ref.course.given.inputs import make_inputs\n"
        "from tinyvllm_ref.device import cp\n"
        "def f():\n    from tinyvllm_ref.bf16 import float_to_bf16\n"
    )
    assert text == (
        "from .request import Request\nfrom .inputs import make_inputs\nfrom tinyvllm_ref.device import cp\n"
        "def f():\n    from .earlier import float_to_bf16\n"
    )
