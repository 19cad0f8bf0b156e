"""The record of parts: what is there, whose it is, and loading a learner's folder."""

import dataclasses
import json

import pytest

from tinyvllm_ref.parts import LESSONS, Parts, PartsError


def engine(folder, parts, **files):
    (folder / "parts.json").write_text(json.dumps({"version": 1, "parts": parts}))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_every_field_has_its_lessons():
    names = [field.name for field in dataclasses.fields(Parts) if not field.name.startswith("_")]
    assert names == list(LESSONS) == list(Parts.names())
    assert [lessons[0] for lessons in LESSONS.values()] == sorted(lessons[0] for lessons in LESSONS.values())


def test_owners_are_those_of_what_is_there():
    parts = Parts()
    assert parts.owners() == {}
    assert parts.missing() == Parts.names()
    parts = parts.replace(rms_norm=len, linear=len, owner="reference").replace(linear=max, Scheduler=dict)
    assert parts.owners() == {"rms_norm": "reference", "linear": "learner", "Scheduler": "learner"}
    assert "rms_norm" not in parts.missing()
    assert parts.replace(linear=None).owners() == {"rms_norm": "reference", "Scheduler": "learner"}
    assert Parts(embedding=len).owners() == {"embedding": "learner"}


def test_replace_leaves_the_old_record_alone_and_knows_the_names():
    old = Parts()
    old.replace(rms_norm=len)
    assert old.rms_norm is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        old.rms_norm = len
    with pytest.raises(ValueError, match="there is no part 'rmsnorm'; the parts are read_safetensors, "):
        old.replace(rmsnorm=len)


def test_a_folder_is_loaded(tmp_path):
    entries = {
        "rms_norm": {"file": "norms.py"},
        "add_rms_norm": {"file": "norms.py", "name": "fused"},
        "BLOCK_SUM_CUDA": {"file": "block_sum.cu"},
    }
    code = "count = []\ndef rms_norm(x, weight, eps, out): return count\ndef fused(*args): return count\n"
    folder = engine(
        tmp_path, entries, norms__py=code, block_sum__cu="__device__ float block_sum(float, float*);"
    )
    parts = Parts.load(folder)
    assert list(parts.owners()) == ["BLOCK_SUM_CUDA", "rms_norm", "add_rms_norm"]
    assert parts.BLOCK_SUM_CUDA == "__device__ float block_sum(float, float*);"
    assert parts.rms_norm(1, 2, 3, 4) is parts.add_rms_norm(1, 2, 3, 4), "a file is imported once"
    (tmp_path / "norms.py").write_text(code.replace("return count", "return 'new'"))
    assert Parts.load(folder).rms_norm(1, 2, 3, 4) == "new", "and anew by each load"


def test_a_folder_that_is_not_there_holds_no_parts(tmp_path):
    assert Parts.load(tmp_path / "none") == Parts()
    assert Parts.load(tmp_path) == Parts()


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ("{", "is not JSON with version and parts"),
        ("[]", "is not JSON with version and parts"),
        ('{"version": 2, "parts": {}}', "version is 2; this program reads 1"),
        ('{"version": 1, "parts": []}', "it must be an object"),
        ('{"version": 1, "parts": {"norm": {}}}', "there is no part 'norm'"),
        ('{"version": 1, "parts": {"linear": 5}}', "part 'linear' is 5; it must be an object with a file"),
        ('{"version": 1, "parts": {"linear": {"file": "x.py"}}}', "'x.py', which is no file in this folder"),
        ('{"version": 1, "parts": {"linear": {"file": "../x.py"}}}', "which is no file in this folder"),
        ('{"version": 1, "parts": {"linear": {"file": "/etc/passwd"}}}', "which is no file in this folder"),
        ('{"version": 1, "parts": {"linear": {"file": "bad.py"}}}', "part 'linear' fails: ZeroDivisionError"),
        ('{"version": 1, "parts": {"linear": {"file": "syntax.py"}}}', "part 'linear' fails: SyntaxError"),
        ('{"version": 1, "parts": {"linear": {"file": "good.py"}}}', "has no 'linear'"),
        ('{"version": 1, "parts": {"linear": {"file": "good.py", "name": 3}}}', "has no 3"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(tmp_path, listing, message):
    folder = tmp_path / "my_engine"
    folder.mkdir()
    (tmp_path / "x.py").write_text("linear = 1")
    (folder / "bad.py").write_text("1 / 0")
    (folder / "syntax.py").write_text("def")
    (folder / "good.py").write_text("other = 1")
    (folder / "parts.json").write_text(listing)
    with pytest.raises(PartsError) as caught:
        Parts.load(folder)
    assert message in str(caught.value)
