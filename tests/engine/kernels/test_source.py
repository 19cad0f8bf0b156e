"""Loading kernel sources: pasted includes, line numbers, other headers, and NVIDIA's own compiler on each."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

from tests import nvrtc
from tinyvllm_ref.device import cp
from tinyvllm_ref.kernels import source
from tinyvllm_ref.kernels.rms_norm import rms_norm

# Numbers that the compiler is told; the kernels that are not here need none.
CONSTANTS: dict[str, list[dict[str, int]]] = {
    "flash_attention": [{"HEAD_DIM": d} for d in (5, 26, 64, 128, 256)],
    "paged_prefill": [{"HEAD_DIM": d} for d in (26, 80)],
    "prefill_attention": [{"HEAD_DIM": d, "ROW_TILES": t} for d, t in ((16, 1), (64, 2), (128, 2))],
    "paged_attention": [{"HEAD_DIM": d, "HEADS": h} for d, h in ((1, 1), (26, 2), (64, 3), (256, 8))],
    "decode_rows": [{"PER_THREAD": vectors} for vectors in (1, 2)],
    "decode_attention": [
        {"HEAD_DIM": d, "GROUP": g, "BLOCK_SIZE": size, "WARPS": warps, "EARLY": early}
        for d, g, size, warps, early in (
            (16, 3, 1, 2, 0),
            (48, 1, 16, 8, 1),
            (64, 4, 16, 8, 1),
            (256, 8, 4, 2, 0),
        )
    ],
    # Llama 3.2 1B; and rows that are cut into 1, 2 and 4 pieces, none of them full.
    "decode_step": [
        {
            "HIDDEN": h,
            "FFN": f,
            "KV_HEADS": k,
            "GROUP": g,
            "HEAD_DIM": d,
            "BLOCK_SIZE": 16,
            "WARPS": 8,
            "STAGES": 6,
        }
        for h, f, k, g, d in ((2048, 8192, 8, 4, 64), (72, 1032, 27, 1, 80))
    ],
    "linear": [{"TOKENS": tokens} for tokens in (4, 16, 64)],
}
# What stands between #if and #else for newer cards alone.
HOPPER = {"decode_step": ("cp.async.bulk", "mbarrier.try_wait", "createpolicy", "cp.async.mbarrier.arrive")}


def _programs() -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in source.names():
        for constants in CONSTANTS.get(name, [{}]):
            yield name, tuple(f"-D{key}={value}" for key, value in constants.items())


@pytest.mark.parametrize("arch", ["compute_75", "compute_90"])
@pytest.mark.parametrize(("name", "options"), list(_programs()))
def test_nvidias_compiler_accepts_every_kernel(name: str, options: tuple[str, ...], arch: str) -> None:
    try:
        done = nvrtc.compile_source(source.text(name), arch, options)
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))
    assert done.ok, done.log
    assert done.log == ""  # no warning either
    assert f".entry {name}(" in done.ptx or name in (
        "argmax",
        "convert",
        "decode_rows",
        "gather_rows",
        "sampling",
    )
    for instruction in HOPPER.get(name, ()):
        assert (instruction in done.ptx) == (arch == "compute_90"), instruction


@pytest.mark.parametrize("name", source.names())
def test_every_kernel_opens_with_its_launch_geometry(name: str) -> None:
    opening = source.read(f"{name}.cu").split("#include")[0].split("extern")[0].lower()
    for word in ("launch", "grid", "block", "thread", "reads", "changes" if name == "rope" else "writes"):
        assert word in opening, f"{name}.cu does not say: {word}"


def test_every_source_has_a_launch_and_no_cuda_header() -> None:
    names = source.names()
    assert len(names) >= 18
    for name in names:
        assert (source.files(source.__package__) / f"{name}.py").is_file()
        assert "<" not in re.findall(r"#\s*include\s*(.)", source.read(f"{name}.cu"))


def test_includes_are_pasted_once_with_their_lines() -> None:
    text = source.text("flash_attention")
    assert not re.search(r"^\s*#\s*include", text, re.MULTILINE)
    for header in ("flash.cuh", "attention.cuh", "merge.cuh", "common.cuh", "bf16.cuh", "block_sum.cuh"):
        assert text.count(f'#line 1 "{header}"\n') == 1
    lines, file, number = text.splitlines(), "", 0
    for line in lines:
        directive = re.fullmatch(r'#line (\d+) "(.+)"', line)
        if directive:
            file, number = directive[2], int(directive[1])
            continue
        original = source.read(file).splitlines()[number - 1]
        assert line == original or (line == "" and "#include" in original), (file, number)
        number += 1


def test_nvidias_compiler_names_the_files_own_line() -> None:
    broken = source.text("rms_norm").replace("to[c] = float_to_bf16(", "to[c] = float_to_bf17(")
    line = 1 + source.read("rms_norm.cu").splitlines().index(
        "        to[c] = float_to_bf16(row[c] * scale * bf16_to_float(weight[c]));"
    )
    try:
        done = nvrtc.compile_source(broken, "compute_90")
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))
    assert not done.ok
    assert f"rms_norm.cu({line}): error" in done.log


def test_a_kernel_is_made_once() -> None:
    assert source.kernel("softmax") is source.kernel("softmax")
    assert source.kernel("softmax") is not source.kernel("softmax", "log_softmax")
    assert source.kernel("linear", TOKENS=4) is not source.kernel("linear", TOKENS=16)


def test_an_unknown_source() -> None:
    with pytest.raises(FileNotFoundError, match=r"no kernel source 'softmx.cu'; there are .*softmax\.cu"):
        source.kernel("softmx")


def test_other_headers_are_used() -> None:
    """A learner's block_sum inside of the reference's rms_norm; here one that forgets a factor."""
    x, weight = cp.asarray(np.full((1, 64), 3, np.float32)), cp.asarray(np.full(64, 0x3F80, np.uint16))
    out = cp.empty((1, 64), np.uint16)
    text = source.read("block_sum.cuh").replace("return total;", "return total / 4;")
    halved = source.with_headers(rms_norm, {"block_sum.cuh": text})
    assert halved.__name__ == "rms_norm"
    assert int(halved(x, weight, 0.0, out)[0, 0]) == 0x4000  # 2: the root is half of what it must be
    assert int(rms_norm(x, weight, 0.0, out)[0, 0]) == 0x3F80
    with pytest.raises(FileNotFoundError, match=r"blocksum\.cuh"):
        source.with_headers(rms_norm, {"blocksum.cuh": text})
