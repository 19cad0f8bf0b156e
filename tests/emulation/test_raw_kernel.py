"""RawKernel and RawModule: what they take, what they refuse, and in which words."""

from __future__ import annotations

import numpy as np
import pytest

from tinyvllm_ref import emulation as cp

ADD = r"""
extern "C" __global__ void add(const float* a, const float* b, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}
"""


@pytest.fixture
def add():
    return cp.RawKernel(ADD, "add")


@pytest.fixture
def arrays():
    return cp.asarray(np.arange(10, dtype=np.float32)), cp.ones(10, np.float32), cp.empty(10, np.float32)


@pytest.mark.parametrize("mode", ["full", "fast"])
def test_runs(add, arrays, mode):
    a, b, out = arrays
    with cp.checks(mode):
        add((1,), (32,), (a, b, out, np.int32(10)))
    np.testing.assert_array_equal(cp.asnumpy(out), np.arange(10) + 1)


def test_nothing_is_compiled_before_the_first_call():
    kernel = cp.RawKernel("this is no C++", "nothing")
    with pytest.raises(cp.cuda.compiler.CompileException):
        kernel((1,), (1,), ())
    with pytest.raises(cp.cuda.compiler.CompileException):
        kernel.compile()


# ---------------- arguments


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({3: 10.0}, TypeError, ["argument 4", "int n", "10.0"]),
        ({3: np.float32(10)}, TypeError, ["argument 4", "int n", "float32"]),
        ({3: 2**40}, OverflowError, ["argument 4", "1099511627776", "2147483647"]),
        ({0: np.zeros(10, np.float32)}, TypeError, ["Unsupported type", "numpy.ndarray", "cp.asarray"]),
        ({0: [1.0, 2.0]}, TypeError, ["Unsupported type", "list", "const float* a"]),
        ({0: "f64"}, TypeError, ["float64", "const float* a", ".astype"]),
        ({1: "i32"}, TypeError, ["int32", "const float* b", ".view"]),
        ({0: "gaps"}, ValueError, ["view with gaps", "ascontiguousarray"]),
    ],
)
def test_refuses_arguments(add, arrays, change, error, words):
    args = [*arrays, np.int32(10)]
    special = {
        "f64": lambda: cp.zeros(10, np.float64),
        "i32": lambda: cp.zeros(10, np.int32),
        "gaps": lambda: cp.zeros(20, np.float32)[::2],
    }
    for position, value in change.items():
        args[position] = special[value]() if isinstance(value, str) else value
    with pytest.raises(error) as caught:
        add((1,), (32,), tuple(args))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_wrong_number_of_arguments_is_named(add, arrays, count):
    args = (*arrays, np.int32(10), np.int32(1))[:count]
    with pytest.raises(TypeError, match=rf"takes 4 arguments .*const float\* a.* {count} were given"):
        add((1,), (32,), args)


def test_a_python_float_is_refused_for_a_float():
    scale = cp.RawKernel(
        'extern "C" __global__ void scale(float* x, float a, double b) { x[threadIdx.x] *= a * (float)b; }',
        "scale",
    )
    x = cp.ones(4, np.float32)
    with pytest.raises(TypeError, match=r"argument 2, float a: a Python float .*np\.float32"):
        scale((1,), (4,), (x, 2.0, 3.0))
    scale((1,), (4,), (x, np.float32(2), 3.0))
    np.testing.assert_array_equal(cp.asnumpy(x), 6)


def test_python_ints_numpy_ints_and_bools_are_integers():
    code = """extern "C" __global__
    void put(long long* out, int a, unsigned char b, long long c, bool d, short e) {
        out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e;
    }"""
    put = cp.RawKernel(code, "put")
    out = cp.empty(5, np.int64)
    put((1,), (1,), (out, -7, np.uint8(200), 2**40, True, np.int16(-3)))
    np.testing.assert_array_equal(cp.asnumpy(out), [-7, 200, 2**40, 1, -3])
    with pytest.raises(TypeError, match="int32 was given, of 4 bytes; the kernel reads 8"):
        put((1,), (1,), (out, -7, np.uint8(200), np.int32(4), True, np.int16(-3)))


def test_structures_by_value():
    code = """struct Box { float lo, hi; int n; };
    extern "C" __global__ void fill(float* out, Box box) {
        int i = threadIdx.x;
        if (i < box.n) out[i] = box.lo + (box.hi - box.lo) * i / (box.n - 1);
    }"""
    box = np.array([(1.0, 3.0, 5)], np.dtype([("lo", "f4"), ("hi", "f4"), ("n", "i4")]))[0]
    out = cp.empty(5, np.float32)
    cp.RawKernel(code, "fill")((1,), (32,), (out, box))
    np.testing.assert_allclose(cp.asnumpy(out), [1, 1.5, 2, 2.5, 3])
    with pytest.raises(TypeError, match="structured dtype of 12 bytes"):
        cp.RawKernel(code, "fill")((1,), (32,), (out, 3))


def test_misaligned_vectors_are_refused():
    code = 'extern "C" __global__ void copy(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x]; }'
    copy = cp.RawKernel(code, "copy")
    x, y = cp.zeros(9, np.float32), cp.zeros(8, np.float32)
    copy((1,), (2,), (x, y))
    with pytest.raises(ValueError, match="no multiple of 16"):
        copy((1,), (2,), (x[1:], y))


# ---------------- geometry


@pytest.mark.parametrize(
    ("grid", "block", "words"),
    [
        ((0,), (32,), "x must be at least 1"),
        ((1,), (0,), "x must be at least 1"),
        ((1,), (1025,), "1,024"),
        ((1,), (32, 33), "1,056 threads"),
        ((1,), (1, 1, 65), "the limit is 64"),
        ((1, 65536), (1,), "65,535"),
    ],
)
def test_refuses_geometry_as_the_driver_does(add, arrays, grid, block, words):
    with pytest.raises(cp.cuda.driver.CUDADriverError, match="CUDA_ERROR_INVALID_VALUE") as caught:
        add(grid, block, (*arrays, np.int32(10)))
    assert words in str(caught.value)
    assert caught.value.status == 1


@pytest.mark.parametrize(
    ("grid", "error"), [((1, 1, 1, 1), ValueError), ((), ValueError), ((1.5,), TypeError)]
)
def test_refuses_geometry_of_the_wrong_form(add, arrays, grid, error):
    with pytest.raises(error, match="grid"):
        add(grid, (32,), (*arrays, np.int32(10)))


def test_dynamic_shared_memory_has_a_limit_that_can_be_raised():
    code = """extern "C" __global__ void last(float* out, int n) {
        extern __shared__ float s[];
        s[n - 1] = 3;
        out[0] = s[n - 1];
    }"""
    kernel = cp.RawKernel(code, "last")
    out = cp.empty(1, np.float32)
    with pytest.raises(cp.cuda.driver.CUDADriverError, match="max_dynamic_shared_size_bytes"):
        kernel((1,), (1,), (out, np.int32(16384)), shared_mem=65536)
    kernel.max_dynamic_shared_size_bytes = 65536
    kernel((1,), (1,), (out, np.int32(16384)), shared_mem=65536)
    assert float(out[0]) == 3
    with pytest.raises(cp.cuda.driver.CUDADriverError):
        kernel.max_dynamic_shared_size_bytes = 10**9


def test_static_shared_memory_over_48_kb_is_refused():
    code = (
        'extern "C" __global__ void big(float* out) { __shared__ float s[12289]; s[0] = 1; out[0] = s[0]; }'
    )
    with pytest.raises(cp.cuda.compiler.CompileException, match=r"49,?156 bytes|0xc004"):
        cp.RawKernel(code, "big")((1,), (1,), (cp.empty(1, np.float32),))


# ---------------- names


def test_an_unknown_kernel_is_not_found():
    with pytest.raises(cp.cuda.driver.CUDADriverError, match=r"named symbol not found.*`sub`.*`add`"):
        cp.RawKernel(ADD, "sub")((1,), (1,), ())


def test_a_kernel_with_a_cpp_name_is_not_found_and_the_message_says_why():
    code = "__global__ void k(int* x) { x[0] = 1; }"
    with pytest.raises(cp.cuda.driver.CUDADriverError, match='extern "C"'):
        cp.RawKernel(code, "k")((1,), (1,), (cp.empty(1, np.int32),))
    template = "template <class T> __global__ void k(T* x) { x[0] = 1; }"
    with pytest.raises(cp.cuda.driver.CUDADriverError, match="name_expressions"):
        cp.RawModule(code=template).get_function("k")


def test_kernels_made_by_a_macro_are_found():
    code = """#define KERNEL(name, op) extern "C" __global__ void name(float* x) { x[threadIdx.x] = op; }
    KERNEL(ones, 1.0f)
    KERNEL(twos, 2.0f)"""
    x = cp.empty(4, np.float32)
    cp.RawModule(code=code).get_function("twos")((1,), (4,), (x,))
    np.testing.assert_array_equal(cp.asnumpy(x), 2)


def test_instances_of_templates():
    code = """template <typename T, int N> __global__ void fill(T* x, T value) {
        if (threadIdx.x < N) x[threadIdx.x] = value;
    }"""
    module = cp.RawModule(code=code, name_expressions=["fill<float, 3>", "fill<int, 2>"])
    x, y = cp.zeros(4, np.float32), cp.zeros(4, np.int32)
    module.get_function("fill<float, 3>")((1,), (4,), (x, np.float32(2)))
    module.get_function("fill<int, 2>")((1,), (4,), (y, 5))
    np.testing.assert_array_equal(cp.asnumpy(x), [2, 2, 2, 0])
    np.testing.assert_array_equal(cp.asnumpy(y), [5, 5, 0, 0])


def test_a_module_from_a_file(tmp_path):
    path = tmp_path / "add.cu"
    path.write_text(ADD)
    kernel = cp.RawModule(path=str(path)).get_function("add")
    out = cp.empty(2, np.float32)
    kernel((1,), (2,), (cp.ones(2, np.float32), cp.ones(2, np.float32), out, np.int32(2)))
    np.testing.assert_array_equal(cp.asnumpy(out), 2)
    with pytest.raises(ValueError, match="machine code"):
        cp.RawModule(path="x.cubin")
    with pytest.raises(TypeError, match="Exactly one"):
        cp.RawModule()


@pytest.mark.parametrize("mode", ["full", "fast"])
def test_constant_memory_by_name(mode):
    code = """__constant__ float coefficients[3];
    extern "C" __global__ void dot(float* out) {
        out[0] = coefficients[0] + 10 * coefficients[1] + 100 * coefficients[2];
    }"""
    with cp.checks(mode):
        module = cp.RawModule(code=code)
        target = cp.ndarray((3,), np.float32, module.get_global("coefficients"))
        target[...] = cp.asarray(np.array([1, 2, 3], np.float32))
        out = cp.empty(1, np.float32)
        module.get_function("dot")((1,), (1,), (out,))
        assert float(out[0]) == 321
        with pytest.raises(cp.cuda.driver.CUDADriverError, match="nothing_here"):
            module.get_global("nothing_here")


# ---------------- options and backends


def test_options_reach_the_compiler(tmp_path):
    (tmp_path / "value.h").write_text("#define HEADER 100\n")
    code = '#include "value.h"\nextern "C" __global__ void put(int* x) { x[0] = N + HEADER; }'
    x = cp.empty(1, np.int32)
    options = ("-DN=5", f"-I{tmp_path}", "--std=c++14", "--use_fast_math", "-lineinfo")
    cp.RawKernel(code, "put", options=options)((1,), (1,), (x,))
    assert int(x[0]) == 105
    with pytest.raises(cp.cuda.compiler.CompileException, match="unrecognized option"):
        cp.RawKernel(ADD, "add", options=("--nonsense",)).compile()


@pytest.mark.parametrize("given", [{"enable_cooperative_groups": True}, {"jitify": True}])
def test_what_needs_a_card_is_refused(given):
    with pytest.raises(RuntimeError, match="needs a card"):
        cp.RawKernel(ADD, "add", **given)


def test_wrong_types_of_source_and_name():
    with pytest.raises(TypeError, match="code must be a str"):
        cp.RawKernel(b"x", "add")
    with pytest.raises(TypeError, match="name must be a str"):
        cp.RawKernel(ADD, 3)
    with pytest.raises(ValueError, match="backend"):
        cp.RawKernel(ADD, "add", backend="hip")


def test_missing_names_say_that_they_are_missing():
    with pytest.raises(AttributeError, match="fuse"):
        _ = cp.fuse
    with pytest.raises(AttributeError, match="ElementwiseKernel"):
        _ = cp.ElementwiseKernel


# ---------------- output


def test_printf_goes_to_standard_output(capsys):
    code = (
        'extern "C" __global__ void say(int n) { printf("thread %d of %d: %.2f\\n", threadIdx.x, n, 0.5f); }'
    )
    cp.RawKernel(code, "say")((1,), (2,), (np.int32(2),))
    assert capsys.readouterr().out == "thread 0 of 2: 0.50\nthread 1 of 2: 0.50\n"


@pytest.mark.parametrize("mode", ["full", "fast"])
def test_assert_stops_the_kernel(mode):
    code = 'extern "C" __global__ void check(int n) {\n    assert(threadIdx.x < n && "too many");\n}'
    with cp.checks(mode), pytest.raises(cp.KernelAssertion, match=r"threadIdx\.x < n") as caught:
        cp.RawKernel(code, "check")((1,), (8,), (np.int32(5),))
    assert caught.value.line == 2
    assert caught.value.thread == (5, 0, 0)


@pytest.mark.parametrize("mode", ["full", "fast"])
def test_division_by_zero_and_trap_are_faults(mode):
    divide = 'extern "C" __global__ void divide(int* x, int d) {\n    x[0] = 7 / d;\n}'
    trap = 'extern "C" __global__ void trap() {\n    __trap();\n}'
    with cp.checks(mode):
        with pytest.raises(cp.KernelFault, match="division by zero") as caught:
            cp.RawKernel(divide, "divide")((1,), (1,), (cp.zeros(1, np.int32), np.int32(0)))
        assert caught.value.line == 2
        with pytest.raises(cp.KernelFault, match="stopped itself"):
            cp.RawKernel(trap, "trap")((1,), (1,), ())


@pytest.mark.parametrize("mode", ["full", "fast"])
def test_a_full_stack_is_a_fault(mode):
    code = """extern "C" __global__ void deep(int* out, int n) {
    volatile int local[400000];
    for (int i = 0; i < 400000; i++) local[i] = i;
    out[0] = local[n];
}"""
    with cp.checks(mode), pytest.raises(cp.KernelError, match="stack is full"):
        cp.RawKernel(code, "deep")((1,), (1,), (cp.zeros(1, np.int32), np.int32(3)))
