"""One output element a thread, or a few: guards, strides, vector loads, element types and structs."""

from __future__ import annotations

import numpy as np

from .case import BF16_CUDA, BF16_TOLERANCE, ByValue, KernelCase, empty, f64, from_bf16, normal, to_bf16

VECTOR_ADD = r"""
extern "C" __global__ void vector_add(const float* x, const float* y, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y[i];
}
"""

SAXPY = r"""
extern "C" __global__ void saxpy(float a, const float* __restrict__ x, float* __restrict__ y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    y[i] = a * x[i] + y[i];
}
"""

GRID_STRIDE = r"""
extern "C" __global__ void scale_all(const float* x, float* out, float a, long long n) {
    long long stride = (long long)gridDim.x * blockDim.x;
    long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (long long i = first; i < n; i += stride) out[i] = a * x[i];
}
"""

VECTOR_LOADS = r"""
// 16 bytes a thread, and what is left of the row one by one.
extern "C" __global__ void scale_by_fours(const float* x, float* out, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n / 4) {
        float4 v = reinterpret_cast<const float4*>(x)[i];
        v.x *= a;
        v.y *= a;
        v.z *= a;
        v.w *= a;
        reinterpret_cast<float4*>(out)[i] = v;
    }
    int tail = n / 4 * 4 + i;
    if (tail < n) out[tail] = a * x[tail];
}
"""

MAKE_VECTORS = r"""
extern "C" __global__ void pack(const float* x, float4* packed, int2* pairs, uchar4* bytes, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    packed[i] = make_float4(x[i], -x[i], 2.0f * x[i], float(i));
    pairs[i] = make_int2(i, -i);
    bytes[i] = make_uchar4(i, i + 1, 255 - i, 7);
}
"""

SILU_MUL = (
    BF16_CUDA
    + r"""
// gate_up (rows, 2 * width) -> out (rows, width): silu(gate) * up; a row a block of threads in y.
extern "C" __global__ void silu_mul(const float* gate_up, bf16* out, int width) {
    int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (column >= width) return;
    float gate = gate_up[(size_t)row * 2 * width + column];
    float up = gate_up[(size_t)row * 2 * width + width + column];
    out[(size_t)row * width + column] = float_to_bf16(gate / (1.0f + expf(-gate)) * up);
}
"""
)

ROPE = r"""
// x (tokens, heads, dim) rotated in place, pairs (i, i + dim / 2); a block a token, a thread a pair.
extern "C" __global__ void rope(float* x, const int* positions, const float* inv_freq, int heads, int dim) {
    int token = blockIdx.x, half = dim / 2;
    for (int k = threadIdx.x; k < heads * half; k += blockDim.x) {
        int head = k / half, i = k % half;
        float* row = x + ((size_t)token * heads + head) * dim;
        float s, c;
        sincosf(positions[token] * inv_freq[i], &s, &c);
        float a = row[i], b = row[i + half];
        row[i] = a * c - b * s;
        row[i + half] = b * c + a * s;
    }
}
"""

EMBEDDING_FLOAT4 = r"""
// ids (tokens,), table (vocabulary, width) with width a multiple of 4; a block a token.
extern "C" __global__ void gather(const int* ids, const float4* table, float4* out, int fours) {
    const float4* row = table + (size_t)ids[blockIdx.x] * fours;
    float4* target = out + (size_t)blockIdx.x * fours;
    for (int c = threadIdx.x; c < fours; c += blockDim.x) target[c] = __ldg(row + c);
}
"""

EMBEDDING_UINT4 = (
    BF16_CUDA
    + r"""
// Eight bfloat16 a load where rows are 16-byte aligned, one by one for the rest; a block a token.
extern "C" __global__ void embedding(const int* ids, const bf16* table, float* out, int width) {
    const bf16* row = table + (size_t)ids[blockIdx.x] * width;
    float* target = out + (size_t)blockIdx.x * width;
    int eights = width % 8 == 0 ? width / 8 : 0;
    for (int c = threadIdx.x; c < eights; c += blockDim.x) {
        uint4 packed = reinterpret_cast<const uint4*>(row)[c];
        unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            target[8 * c + 2 * k] = __uint_as_float(words[k] << 16);
            target[8 * c + 2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
        }
    }
    for (int c = 8 * eights + threadIdx.x; c < width; c += blockDim.x) target[c] = bf16_to_float(row[c]);
}
"""
)

NARROW_TYPES = r"""
// Neighbouring threads write neighbouring bytes and shorts: no race, though they share a word.
extern "C" __global__ void classify(const float* x, bool* positive, signed char* sign, short* scaled,
                                    unsigned char* parity, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    positive[i] = x[i] > 0;
    sign[i] = x[i] > 0 ? 1 : -1;
    scaled[i] = (short)(x[i] * 100.0f);
    parity[i] = (unsigned char)(i & 1);
}
"""

NARROW_SHARED = r"""
// The same in shared memory, read back by another thread.
extern "C" __global__ void reverse_narrow(const unsigned char* x, const short* y, unsigned char* x_out,
                                          short* y_out) {
    __shared__ unsigned char bytes[101];
    __shared__ short words[101];
    __shared__ bool odd[101];
    int t = threadIdx.x, last = blockDim.x - 1;
    bytes[t] = x[t];
    words[t] = y[t];
    odd[t] = t % 2;
    __syncthreads();
    x_out[t] = bytes[last - t];
    y_out[t] = odd[last - t] ? words[last - t] : -words[last - t];
}
"""

STRUCTS = r"""
struct Particle {
    float x, y;
    int id;
};
struct Step {
    float dx, dy;
};
__device__ Particle moved(Particle p, Step step) {
    p.x += step.dx;
    p.y += step.dy;
    return p;
}
extern "C" __global__ void move_all(const Particle* particles, Particle* out, float dx, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Step step = {dx, -2.0f * dx};
    out[i] = moved(particles[i], step);
    out[i].id += 1;
}
"""

STRUCT_PARAMETER = r"""
struct Affine {
    float scale;
    int shift;
    double bias[3];
};
extern "C" __global__ void affine(Affine f, const float* x, double* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = f.scale * x[i] + f.shift + f.bias[i % 3];
}
"""

LAMBDAS = r"""
template <class F> __device__ float twice(F f, float x) { return f(f(x)); }
extern "C" __global__ void lambdas(const float* x, float* out, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    auto line = [a](float v) { return a * v + 1.0f; };
    auto in_range = [&] { return i < n; };
    if (in_range()) out[i] = twice(line, x[i]);
}
"""

HELPERS = r"""
#define SQUARE(v) ((v) * (v))
namespace geometry {
__device__ __forceinline__ float squared_norm(float3 v) { return SQUARE(v.x) + SQUARE(v.y) + SQUARE(v.z); }
__device__ __noinline__ void normalise(float3& v) {
    float inverse = 1.0f / sqrtf(squared_norm(v));
    v.x *= inverse;
    v.y *= inverse;
    v.z *= inverse;
}
}  // namespace geometry
enum Axis { X, Y, Z };
static __device__ const float weights[3] = {1.0f, 10.0f, 100.0f};
// points (n, 3) -> their directions, and a weighted coordinate sum.
extern "C" __global__ void __launch_bounds__(64)
    directions(const float* points, float* out, float* sums, int n) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float3 v = make_float3(points[3 * i + X], points[3 * i + Y], points[3 * i + Z]);
    geometry::normalise(v);
    out[3 * i + X] = v.x;
    out[3 * i + Y] = v.y;
    out[3 * i + Z] = v.z;
    sums[i] = v.x * weights[X] + v.y * weights[Y] + v.z * weights[Z];
}
"""

DOUBLES = r"""
extern "C" __global__ void logistic_map(const double* x, double* out, double r, int steps, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double v = x[i];
    for (int k = 0; k < steps; k++) v = r * v * (1.0 - v);
    out[i] = sqrt(v) + exp(-v) + fma(v, v, 1.0) + pow(v, 1.5);
}
"""

WRAP_AROUND = r"""
// Unsigned arithmetic wraps; 64-bit products keep their upper half.
extern "C" __global__ void hash(const unsigned* x, unsigned* mixed, unsigned long long* wide, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned h = x[i];
    h ^= h >> 16;
    h *= 0x7feb352du;
    h ^= h >> 15;
    h *= 0x846ca68bu;
    mixed[i] = h ^ (h >> 16);
    wide[i] = (unsigned long long)x[i] * 0x9e3779b97f4a7c15ull + 1ull;
}
"""

WIDE_INDEX = r"""
// Offsets beyond 32 bits are computed, and brought back: rows lie `stride` apart, more than 2^31 elements.
extern "C" __global__ void far_rows(const float* x, float* out, long long* offsets, long long stride, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    size_t far = (size_t)i * stride;
    offsets[i] = (long long)far;
    out[i] = x[far / stride];
}
"""

WHOLE_BLOCKS_LEAVE = r"""
// Blocks past the rows that are wanted leave before the barrier, all threads together.
extern "C" __global__ void reverse_rows(const int* x, int* out, int rows) {
    __shared__ int row[37];
    if (blockIdx.x >= rows) return;
    row[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = row[blockDim.x - 1 - threadIdx.x];
}
"""

SWITCH = r"""
extern "C" __global__ void dispatch(const int* op, const int* a, const int* b, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    switch (op[i]) {
        case 0: out[i] = a[i] + b[i]; break;
        case 1: out[i] = a[i] - b[i]; break;
        case 2: out[i] = max(a[i], b[i]); break;
        case 3: out[i] = min(a[i], b[i]) % 7; break;
        default: {
            int v = abs(a[i]), steps = 0;
            do {
                v /= 2;
                steps++;
            } while (v > 0);
            out[i] = steps;
        }
    }
}
"""

LOCAL_ARRAY = r"""
// The median of five neighbours, sorted in a thread's own array.
extern "C" __global__ void median5(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float w[5];
    #pragma unroll
    for (int k = 0; k < 5; k++) w[k] = x[min(max(i + k - 2, 0), n - 1)];
    for (int k = 1; k < 5; k++) {
        float v = w[k];
        int j = k;
        for (; j > 0 && w[j - 1] > v; j--) w[j] = w[j - 1];
        w[j] = v;
    }
    out[i] = w[2];
}
"""

_AFFINE = np.dtype([("scale", np.float32), ("shift", np.int32), ("bias", np.float64, 3)], align=True)
_PARTICLE = np.dtype([("x", np.float32), ("y", np.float32), ("id", np.int32)])


def _silu_mul(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(f64(gate_up), 2, axis=1)
    return f64(gate / (1 + np.exp(-gate)) * up)


def _rope(x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    angle = (positions[:, None].astype(np.float32) * inv_freq).astype(np.float64)[:, None, :]
    a, b = np.split(f64(x), 2, axis=2)
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=2
    )


def _logistic_map(x: np.ndarray, r: float, steps: int) -> np.ndarray:
    for _ in range(steps):
        x = r * x * (1 - x)
    return f64(np.sqrt(x) + np.exp(-x) + (x * x + 1) + x**1.5)


def _hash(x: np.ndarray) -> np.ndarray:
    h = x ^ (x >> np.uint32(16))
    h = h * np.uint32(0x7FEB352D)
    h = h ^ (h >> np.uint32(15))
    h = h * np.uint32(0x846CA68B)
    return np.asarray(h ^ (h >> np.uint32(16)))


def _dispatch(op: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    steps = np.array([max(int(abs(v)).bit_length(), 1) for v in a])
    return np.select(
        [op == 0, op == 1, op == 2, op == 3],
        [a + b, a - b, np.maximum(a, b), np.fmod(np.minimum(a, b), 7)],
        steps,
    )


def _median5(x: np.ndarray) -> np.ndarray:
    padded = np.pad(f64(x), 2, mode="edge")
    return f64(np.median(np.stack([padded[k : k + x.size] for k in range(5)]), axis=0))


CASES = [
    KernelCase(
        name="vector_add",
        code=VECTOR_ADD,
        kernel_name="vector_add",
        make=lambda rng: {
            "x": normal(rng, 1003),
            "y": normal(rng, 1003),
            "out": empty(1003),
            "n": np.int32(1003),
        },
        grid=(8,),
        block=(128,),
        expected=lambda a: {"out": f64(a.x) + a.y},
    ),
    KernelCase(
        name="vector_add_one_element",
        code=VECTOR_ADD,
        kernel_name="vector_add",
        make=lambda rng: {"x": normal(rng, 1), "y": normal(rng, 1), "out": empty(1), "n": np.int32(1)},
        grid=(1,),
        block=(1,),
        expected=lambda a: {"out": f64(a.x) + a.y},
    ),
    KernelCase(
        name="saxpy_1000_threads",
        code=SAXPY,
        kernel_name="saxpy",
        make=lambda rng: {
            "a": np.float32(1.7),
            "x": normal(rng, 2003),
            "y": normal(rng, 2003),
            "n": np.int32(2003),
        },
        grid=(3,),
        block=(1000,),
        expected=lambda a: {"y": f64(a.a) * a.x + a.y},
    ),
    KernelCase(
        name="grid_stride",
        code=GRID_STRIDE,
        kernel_name="scale_all",
        make=lambda rng: {"x": normal(rng, 4099), "out": empty(4099), "a": np.float32(-2.5), "n": 4099},
        grid=(3,),
        block=(33,),
        expected=lambda a: {"out": -2.5 * f64(a.x)},
    ),
    KernelCase(
        name="grid_stride_one_thread",
        code=GRID_STRIDE,
        kernel_name="scale_all",
        make=lambda rng: {"x": normal(rng, 97), "out": empty(97), "a": np.float32(0.5), "n": 97},
        grid=(1,),
        block=(1,),
        expected=lambda a: {"out": 0.5 * f64(a.x)},
    ),
    KernelCase(
        name="vector_loads_with_tail",
        code=VECTOR_LOADS,
        kernel_name="scale_by_fours",
        make=lambda rng: {
            "x": normal(rng, 1023),
            "out": empty(1023),
            "a": np.float32(3.0),
            "n": np.int32(1023),
        },
        grid=(2,),
        block=(128,),
        expected=lambda a: {"out": 3 * f64(a.x)},
    ),
    KernelCase(
        name="make_vectors",
        code=MAKE_VECTORS,
        kernel_name="pack",
        make=lambda rng: {
            "x": normal(rng, 41),
            "packed": empty(41, 4),
            "pairs": empty(41, 2, dtype=np.int32),
            "bytes": empty(41, 4, dtype=np.uint8),
            "n": np.int32(41),
        },
        grid=(1,),
        block=(64,),
        expected=lambda a: {
            "packed": np.stack([a.x, -a.x, 2 * a.x, np.arange(41)], 1).astype(np.float64),
            "pairs": np.stack([np.arange(41), -np.arange(41)], 1),
            "bytes": np.stack([np.arange(41), np.arange(41) + 1, 255 - np.arange(41), np.full(41, 7)], 1),
        },
    ),
    KernelCase(
        name="silu_mul",
        code=SILU_MUL,
        kernel_name="silu_mul",
        make=lambda rng: {
            "gate_up": 20 * normal(rng, 5, 74),
            "out": empty(5, 37, dtype=np.uint16),
            "width": np.int32(37),
        },
        grid=(2, 5),
        block=(32,),
        expected=lambda a: {"out": _silu_mul(a.gate_up)},
        tolerance=BF16_TOLERANCE,
    ),
    KernelCase(
        name="rope_half_split",
        code=ROPE,
        kernel_name="rope",
        make=lambda rng: {
            "x": normal(rng, 5, 3, 22),
            "positions": np.array([0, 1, 7, 100, 999], np.int32),
            "inv_freq": (10000.0 ** (-np.arange(11) / 11)).astype(np.float32),
            "heads": np.int32(3),
            "dim": np.int32(22),
        },
        grid=(5,),
        block=(20,),
        expected=lambda a: {"x": _rope(a.x, a.positions, a.inv_freq)},
        tolerance=1e-4,
    ),
    KernelCase(
        name="embedding_float4",
        code=EMBEDDING_FLOAT4,
        kernel_name="gather",
        make=lambda rng: {
            "ids": rng.integers(0, 17, 9).astype(np.int32),
            "table": normal(rng, 17, 52),
            "out": empty(9, 52),
            "fours": np.int32(13),
        },
        grid=(9,),
        block=(8,),
        expected=lambda a: {"out": f64(a.table[a.ids])},
        tolerance=0,
    ),
    *[
        KernelCase(
            name=f"embedding_uint4_width_{width}",
            code=EMBEDDING_UINT4,
            kernel_name="embedding",
            make=lambda rng, width=width: {  # type: ignore[misc]
                "ids": rng.integers(0, 19, 7).astype(np.int32),
                "table": to_bf16(normal(rng, 19, width)),
                "out": empty(7, width),
                "width": np.int32(width),
            },
            grid=(7,),
            block=(5,),
            expected=lambda a: {"out": f64(from_bf16(a.table[a.ids]))},
            tolerance=0,
        )
        for width in (56, 61)
    ],
    KernelCase(
        name="narrow_types",
        code=NARROW_TYPES,
        kernel_name="classify",
        make=lambda rng: {
            "x": normal(rng, 1021),
            "positive": empty(1021, dtype=np.bool_),
            "sign": empty(1021, dtype=np.int8),
            "scaled": empty(1021, dtype=np.int16),
            "parity": empty(1021, dtype=np.uint8),
            "n": np.int32(1021),
        },
        grid=(9,),
        block=(117,),
        expected=lambda a: {
            "positive": a.x > 0,
            "sign": np.where(a.x > 0, 1, -1),
            "scaled": np.trunc(a.x * np.float32(100)).astype(np.int64),
            "parity": np.arange(1021) & 1,
        },
    ),
    KernelCase(
        name="narrow_shared",
        code=NARROW_SHARED,
        kernel_name="reverse_narrow",
        make=lambda rng: {
            "x": rng.integers(0, 256, 101).astype(np.uint8),
            "y": rng.integers(-999, 999, 101).astype(np.int16),
            "x_out": empty(101, dtype=np.uint8),
            "y_out": empty(101, dtype=np.int16),
        },
        grid=(1,),
        block=(101,),
        expected=lambda a: {
            "x_out": a.x[::-1].astype(np.int64),
            "y_out": np.where(np.arange(101) % 2, a.y, -a.y)[::-1].astype(np.int64),
        },
    ),
    KernelCase(
        name="structs",
        code=STRUCTS,
        kernel_name="move_all",
        make=lambda rng: {
            "particles": _particles(rng, 77).view(np.uint8),
            "out": empty(77 * 12, dtype=np.uint8),
            "dx": np.float32(0.25),
            "n": np.int32(77),
        },
        grid=(3,),
        block=(32,),
        expected=lambda a: {"out": _moved(a.particles.view(_PARTICLE), a.dx).view(np.uint8)},
    ),
    KernelCase(
        name="struct_by_value",
        code=STRUCT_PARAMETER,
        kernel_name="affine",
        make=lambda rng: {
            "f": ByValue(np.array([(1.5, -7, [0.1, 0.2, 0.3])], _AFFINE)),
            "x": normal(rng, 70),
            "out": empty(70, dtype=np.float64),
            "n": np.int32(70),
        },
        grid=(3,),
        block=(32,),
        expected=lambda a: {"out": 1.5 * f64(a.x) - 7 + np.array([0.1, 0.2, 0.3])[np.arange(70) % 3]},
    ),
    KernelCase(
        name="lambdas",
        code=LAMBDAS,
        kernel_name="lambdas",
        make=lambda rng: {"x": normal(rng, 75), "out": empty(75), "a": np.float32(1.5), "n": np.int32(75)},
        grid=(2,),
        block=(50,),
        expected=lambda a: {"out": 1.5 * (1.5 * f64(a.x) + 1) + 1},
    ),
    KernelCase(
        name="device_helpers",
        code=HELPERS,
        kernel_name="directions",
        make=lambda rng: {
            "points": normal(rng, 101, 3),
            "out": empty(101, 3),
            "sums": empty(101),
            "n": np.int32(101),
        },
        grid=(2,),
        block=(64,),
        expected=lambda a: {
            "out": f64(a.points) / np.linalg.norm(f64(a.points), axis=1, keepdims=True),
            "sums": f64(a.points) @ [1, 10, 100] / np.linalg.norm(f64(a.points), axis=1),
        },
        tolerance=1e-5,
    ),
    KernelCase(
        name="doubles",
        code=DOUBLES,
        kernel_name="logistic_map",
        make=lambda rng: {
            "x": rng.random(67),
            "out": empty(67, dtype=np.float64),
            "r": np.float64(2.9),
            "steps": np.int32(9),
            "n": np.int32(67),
        },
        grid=(3,),
        block=(31,),
        expected=lambda a: {"out": _logistic_map(a.x, 2.9, 9)},
        tolerance=1e-13,
    ),
    KernelCase(
        name="integer_wrap_around",
        code=WRAP_AROUND,
        kernel_name="hash",
        make=lambda rng: {
            "x": rng.integers(0, 2**32, 333, dtype=np.uint32),
            "mixed": empty(333, dtype=np.uint32),
            "wide": empty(333, dtype=np.uint64),
            "n": np.int32(333),
        },
        grid=(3,),
        block=(128,),
        expected=lambda a: {
            "mixed": _hash(a.x),
            "wide": a.x.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1),
        },
    ),
    KernelCase(
        name="wide_index",
        code=WIDE_INDEX,
        kernel_name="far_rows",
        make=lambda rng: {
            "x": normal(rng, 13),
            "out": empty(13),
            "offsets": empty(13, dtype=np.int64),
            "stride": 3_000_000_019,
            "n": np.int32(13),
        },
        grid=(1,),
        block=(16,),
        expected=lambda a: {"out": f64(a.x), "offsets": np.arange(13) * 3_000_000_019},
        tolerance=0,
    ),
    KernelCase(
        name="whole_blocks_leave",
        code=WHOLE_BLOCKS_LEAVE,
        kernel_name="reverse_rows",
        make=lambda rng: {
            "x": rng.integers(-99, 99, (5, 37)).astype(np.int32),
            "out": empty(5, 37, dtype=np.int32),
            "rows": np.int32(5),
        },
        grid=(8,),
        block=(37,),
        expected=lambda a: {"out": a.x[:, ::-1]},
    ),
    KernelCase(
        name="switch",
        code=SWITCH,
        kernel_name="dispatch",
        make=lambda rng: {
            "op": rng.integers(0, 5, 211).astype(np.int32),
            "a": rng.integers(-1000, 1000, 211).astype(np.int32),
            "b": rng.integers(-1000, 1000, 211).astype(np.int32),
            "out": empty(211, dtype=np.int32),
            "n": np.int32(211),
        },
        grid=(4,),
        block=(64,),
        expected=lambda a: {"out": _dispatch(a.op, a.a, a.b)},
    ),
    KernelCase(
        name="local_array",
        code=LOCAL_ARRAY,
        kernel_name="median5",
        make=lambda rng: {"x": normal(rng, 203), "out": empty(203), "n": np.int32(203)},
        grid=(4,),
        block=(64,),
        expected=lambda a: {"out": _median5(a.x)},
        tolerance=0,
    ),
]


def _particles(rng: np.random.Generator, n: int) -> np.ndarray:
    particles = np.empty(n, _PARTICLE)
    particles["x"], particles["y"], particles["id"] = normal(rng, n), normal(rng, n), np.arange(n)
    return particles


def _moved(particles: np.ndarray, dx: np.float32) -> np.ndarray:
    moved = particles.copy()
    moved["x"] += dx
    moved["y"] += np.float32(-2) * dx
    moved["id"] += 1
    return moved
