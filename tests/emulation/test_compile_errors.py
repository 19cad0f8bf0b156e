"""What a person sees when a kernel does not compile: their own line, the line itself, and a caret."""

from __future__ import annotations

import numpy as np
import pytest

from tinyvllm_ref import emulation as cp
from tinyvllm_ref.emulation.translate import translate

from .. import nvrtc

CompileException = cp.cuda.compiler.CompileException


def message(code: str, name: str = "k", mode: str = "full") -> str:
    with cp.checks(mode), pytest.raises(CompileException) as caught:
        cp.RawKernel(code, name).compile()
    return caught.value.get_message()


@pytest.mark.parametrize("mode", ["full", "fast"])
def test_an_unknown_name(mode):
    text = message(
        'extern "C" __global__ void k(float* x) {\n    int i = threadIdx.x;\n    x[i] = y;\n}', mode=mode
    )
    lines = text.splitlines()
    assert lines[0].startswith("kernel.cu(3): error:")
    assert "'y'" in lines[0]
    assert lines[1] == "    3 |     x[i] = y;"
    assert lines[2].index("^") == lines[1].index("y")
    assert lines[-1] == '1 error detected in the compilation of "kernel.cu".'


def test_the_caret_is_right_behind_a_shared_declaration():
    code = 'extern "C" __global__ void k(float* x) {\n    __shared__ float s[32]; s[0] = wrong;\n}'
    lines = message(code).splitlines()
    assert lines[0].startswith("kernel.cu(2): error:")
    assert lines[2].index("^") == lines[1].index("wrong")


@pytest.mark.parametrize("name", ["INFINITY", "NAN", "FLT_MAX", "INT_MAX", "M_PI", "CUDART_INF_F", "NULL"])
@pytest.mark.parametrize("header", ["", "#include <math_constants.h>\n"])
def test_a_constant_is_known_where_nvrtc_knows_it(name, header):
    code = header + f'extern "C" __global__ void k(float* x) {{\n    x[0] = (float)(long long)({name});\n}}'
    folder = nvrtc.header_folder()
    truth = nvrtc.compile_source(code, "compute_90", [f"-I{folder}"])
    if truth.ok:
        cp.RawKernel(code, "k").compile()
    else:
        assert f'"{name}" is undefined' in truth.log
        assert f"'{name}'" in message(code)


def test_every_error_is_there_with_its_own_line():
    code = 'extern "C" __global__ void k(float* x) {\n    x[0] = a;\n\n    /* two\n lines */ x[1] = b;\n}'
    text = message(code)
    assert "kernel.cu(2): error" in text
    assert "kernel.cu(5): error" in text
    assert "2 errors detected" in text


@pytest.mark.parametrize(
    "declared", ["int s[4] = {0}", "float s = 1.0f", "int s{3}", "int a, s[2] = {1, 2}, b"]
)
def test_shared_memory_has_no_start_value(declared):
    """In NVRTC's words, and at the declaration alone."""
    code = f'extern "C" __global__ void k(int* x) {{\n    __shared__ {declared};\n    x[0] = 1;\n}}'
    words = "initializer not allowed for __shared__ variable"
    text = message(code)
    assert text.splitlines()[0] == f"kernel.cu(2): error: {words}"
    assert text.splitlines()[-1].startswith("1 error")
    assert words in nvrtc.compile_source(code, "compute_90").log


def test_none_of_our_own_names_is_in_a_message():
    code = 'extern "C" __global__ void k(float* x) {\n    __shared__ float tile[4];\n    tile = x;\n}'
    text = message(code)
    assert "tile" in text or "float [4]" in text
    assert "emu_" not in text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('asm("mov.u32 %0, %laneid;" : "=r"(lane));', "inline PTX is not emulated"),
        ("cudaDeviceSynchronize();", "cudaDeviceSynchronize"),
        ("x[0] = 1", "expected"),
        ("unsigned int n = undefined_function(3);", "undefined_function"),
    ],
)
def test_common_mistakes(body, words):
    text = message(f'extern "C" __global__ void k(float* x) {{\n    unsigned lane;\n    {body}\n}}')
    assert words in text
    assert "kernel.cu(3)" in text or "kernel.cu(4)" in text


def test_ptx_behind_cuda_arch_is_left_out():
    code = """extern "C" __global__ void k(int* x) {
#ifdef __CUDA_ARCH__
    asm volatile("nop;");
#else
    x[0] = 5;
#endif
}"""
    x = cp.empty(1, np.int32)
    cp.RawKernel(code, "k")((1,), (1,), (x,))
    assert int(x[0]) == 5


def test_a_function_that_forgets_to_return():
    code = (
        "__device__ float f(float x) {\n}\n" + 'extern "C" __global__ void k(float* x) {\n    x[0] = f(1);\n}'
    )
    assert "kernel.cu(2): error" in message(code)


def test_a_function_that_is_declared_and_not_defined():
    code = "__device__ float f(float x);\n" + 'extern "C" __global__ void k(float* x) {\n    x[0] = f(1);\n}'
    assert "Unresolved extern function" in message(code)


@pytest.mark.parametrize("mode", ["full", "fast"])
@pytest.mark.parametrize("header", ["vector", "stdio.h", "math.h", "cmath", "nowhere.h", "sys/types.h"])
def test_headers_that_nvrtc_has_not_got(header, mode):
    code = f'#define N 1\n#include <{header}>\nextern "C" __global__ void k(float* x) {{ x[0] = N; }}'
    text = message(code, mode=mode)
    assert text.splitlines()[0] == f'kernel.cu(2): catastrophic error: cannot open source file "{header}"'
    assert text.splitlines()[-1] == "Compilation terminated."
    said = nvrtc.compile_source(code, "compute_75").log.splitlines()
    assert said[0] == text.splitlines()[0]
    skipped = code.replace("#include", "#ifdef NOT_DEFINED\n#include").replace(">\n", ">\n#endif\n")
    with cp.checks(mode):
        cp.RawKernel(skipped, "k").compile()


def test_a_header_of_the_caller_s_own_is_found(tmp_path):
    (tmp_path / "math.h").write_text("#define ONE 1\n")
    code = '#include "math.h"\nextern "C" __global__ void k(float* x) { x[0] = ONE; }'
    cp.RawKernel(code, "k", options=(f"-I{tmp_path}",)).compile()


def test_wmma_says_what_to_do():
    assert "WMMA" in message('#include <mma.h>\nextern "C" __global__ void k(float* x) { x[0] = 1; }')


def test_shared_inside_a_macro_says_what_to_do():
    code = '#define SMEM __shared__ float s[4]\nextern "C" __global__ void k(float* x) {\n    SMEM;\n}'
    assert "__shared__ inside of a macro" in message(code)


def test_translation_keeps_the_lines():
    code = """
__shared__ int flag;
template <typename T, int N>
__device__ T first(T v) {
    __shared__ T buffer[N], other[2 * N];
    static __shared__ __align__(16) unsigned char raw[64];
    extern __shared__ float dynamic[];
    /* __shared__ int not_this; */ const char* text = "__shared__ nor this";
    return buffer[0] + other[0] + raw[0] + dynamic[0] + flag;
}
extern "C" {
__global__ void __launch_bounds__(128, 2) k(const float* __restrict__ x, int (*pairs)[2], int n = 3);
}
"""
    translation = translate(code)
    flag_line = next(line for line in code.splitlines() if "+ flag;" in line)
    assert flag_line in translation.code  # its function has a reference of that name
    assert translation.code.count("\n") == code.count("\n")
    assert "/* __shared__ int not_this; */" in translation.code
    assert '"__shared__ nor this"' in translation.code
    (kernel,) = translation.kernels
    assert (kernel.name, kernel.is_extern_c, kernel.is_template) == ("k", True, False)
    assert [parameter.name for parameter in kernel.parameters] == ["x", "pairs", "n"]
    for before, after in zip(code.splitlines(), translation.code.splitlines(), strict=True):
        if "__shared__" not in before and before not in {"__device__ T first(T v) {", "}"}:
            assert before == after


def test_a_function_without_device_is_refused_as_nvrtc_refuses_it():
    code = """namespace tools {
template <class T> inline T twice(T x) { return 2 * x; }
}
struct Pair { float a, b; float sum() const { return a + b; } };
static int table[] = {1, 2};
constexpr int size(int n) { return 2 * n; }
__device__ float half(float x) { return 0.5f * x; }
extern "C" {
__global__ void __launch_bounds__(64) k(float* x) {
    __shared__ float s[size(2)];
    s[0] = half(x[0]);
    x[0] = tools::twice(s[0]);
}
}"""
    lines = message(code).splitlines()
    said = 'calling a __host__ function("twice") from a __global__ function("k") is not allowed'
    assert lines[0].startswith(f"kernel.cu(12): error: {said}")
    assert lines[2].index("^") == lines[1].index("twice")
    with cp.checks("full"):
        cp.RawKernel(code, "k", options=("-default-device",)).compile()
        cp.RawKernel(code.replace("inline T", "inline __device__ T"), "k").compile()


def test_line_directives_name_the_file_and_the_line():
    code = """#line 1 "block_sum.cuh"
__device__ float first(float* s) {
    return s[99999];
}
#line 1 "rms.cu"
extern "C" __global__ void k(float* x) {
    x[0] = first(x);
}
"""
    with pytest.raises(cp.OutOfBounds) as caught:
        cp.RawKernel(code, "k")((1,), (1,), (cp.zeros(4, np.float32),))
    assert (caught.value.site.file, caught.value.line) == ("block_sum.cuh", 2)
    assert caught.value.source_line.strip() == "return s[99999];"
    assert "block_sum.cuh, line 2:  return s[99999];" in str(caught.value)
    lines = message(code.replace("first(x)", "second(x)")).splitlines()
    assert lines[0].startswith("rms.cu(2): error:")
    assert lines[1] == "    2 |     x[0] = second(x);"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("__syncthreads;", "'__syncthreads' is a function: a call needs its parentheses"),
        ("__shared__ float cell[n]; x[0] = cell[0];", "the size of a __shared__ array must be a constant"),
        ("x[0] = threadidx.x;", "did you mean 'threadIdx'?"),
    ],
)
def test_a_message_has_none_of_our_own_names(line, says):
    text = message(f'extern "C" __global__ void k(float* x, int n) {{\n    {line}\n}}')
    assert says in text
    assert "emu_" not in text
    assert text.startswith("kernel.cu(2): error: ")
