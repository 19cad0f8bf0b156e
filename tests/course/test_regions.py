"""BEGIN SOLUTION ... END SOLUTION: what a learner gets, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_ref import emulation as cp
from tinyvllm_ref.course.regions import RegionError, find, to_solution, to_stub

PYTHON = """\
def f(x):
    # BEGIN SOLUTION (2 lines): double it
    y = x + x
    # a remark is not counted

    return y
    # STUB if x:
    # STUB     return None
    # STUB
    # STUB return 0
    # END SOLUTION
"""


def test_a_region_in_python():
    (region,) = find(PYTHON)
    assert (region.stated, region.counted, region.what) == (2, 2, "double it")
    assert to_stub(PYTHON) == (
        "def f(x):\n    # TODO (about 2 lines): double it\n    if x:\n        return None\n\n    return 0\n"
    )
    assert to_solution(PYTHON) == (
        "def f(x):\n    y = x + x\n    # a remark is not counted\n\n    return y\n"
    )


def test_one_line_is_one_line():
    text = "# BEGIN SOLUTION (1 line): x\nx = 1\n# STUB x = None\n# END SOLUTION"
    assert to_stub(text) == "# TODO (about 1 line): x\nx = None"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a\n# BEGIN SOLUTION (1 line): x\nb", 1, "without an END SOLUTION"),
        ("a\n# END SOLUTION", 1, "without a BEGIN SOLUTION"),
        (
            "# BEGIN SOLUTION (1 line): x\n# BEGIN SOLUTION (1 line): y\n# END SOLUTION",
            1,
            "inside of the one",
        ),
        ("# BEGIN SOLUTION\n# END SOLUTION", 0, "must be `# BEGIN SOLUTION (6 lines): what to do`"),
        ("# BEGIN SOLUTION (two lines): x\n# END SOLUTION", 0, "must be `# BEGIN"),
        ("# BEGIN SOLUTION (2 lines):\n# END SOLUTION", 0, "must be `# BEGIN"),
        ("x = 1  # BEGIN SOLUTION (1 line): x\n# END SOLUTION", 0, "alone on its line"),
        ("# BEGIN SOLUTION (1 line): x\nx = 1  # END SOLUTION", 1, "alone on its line"),
        ("# BEGIN SOLUTION (1 line): x\nx\n// END SOLUTION", 2, "begins with # ends with //"),
        ("// BEGIN SOLUTION (1 line): x\n# STUB y\n// END SOLUTION", 1, "STUB after # in a region"),
        ("x\n    // STUB return 0;", 1, "STUB outside of a region"),
    ],
)
def test_what_is_refused(text, line, message):
    with pytest.raises(RegionError) as caught:
        find(text)
    assert message in str(caught.value)
    assert caught.value.line == line


# ---------------- any text
def _is_plain(line: str) -> bool:
    bare = line.strip(" \t")
    return "SOLUTION" not in line and not bare.startswith(("# STUB", "// STUB"))


lines = st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",))).filter(_is_plain)
indents = st.text(" \t", max_size=8)
whats = st.text(
    st.characters(exclude_characters="\n", exclude_categories=("Cs", "Z", "Cc")), min_size=1
).filter(_is_plain)


@st.composite
def texts(draw):
    """(text, its stub, its solution), each as lines."""
    text, stub, solution = [], [], []
    for _ in range(draw(st.integers(0, 4))):
        outside = draw(st.lists(lines, max_size=3))
        indent, mark, count, what = (
            draw(indents),
            draw(st.sampled_from(("#", "//"))),
            draw(st.integers(0, 99)),
            draw(whats),
        )
        inside = draw(st.lists(st.tuples(st.booleans(), indents, lines), max_size=5))
        text += [*outside, f"{indent}{mark} BEGIN SOLUTION ({count} lines): {what}"]
        plural = "line" if count == 1 else "lines"
        stub += [*outside, f"{indent}{mark} TODO (about {count} {plural}): {what}"]
        solution += outside
        for is_stub, depth, line in inside:
            if is_stub:
                text.append(f"{depth}{mark} STUB {line}")
                stub.append(depth + line if line else "")
            else:
                text.append(line)
                solution.append(line)
        text.append(f"{indent}{mark} END SOLUTION")
    outside = draw(st.lists(lines, max_size=3))
    return [*text, *outside], [*stub, *outside], [*solution, *outside]


@given(texts())
def test_text_outside_of_regions_is_unchanged(made):
    text, stub, solution = ("\n".join(part) for part in made)
    assert to_stub(text) == stub
    assert to_solution(text) == solution


@given(st.lists(st.sampled_from("BE."), max_size=8))
def test_regions_are_read_where_begin_and_end_alternate_and_nowhere_else(kinds):
    words = {"B": "# BEGIN SOLUTION (1 line): x", "E": "# END SOLUTION", ".": "x"}
    text = "\n".join(words[kind] for kind in kinds)
    marks = "".join(kind for kind in kinds if kind != ".")
    if marks.replace("BE", "") == "":
        assert len(find(text)) == marks.count("B")
    else:
        with pytest.raises(RegionError):
            find(text)


CUDA = """
extern "C" __global__ void twice(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    // BEGIN SOLUTION (3 lines): twice x[i]
    float value = x[i];
    float sum = value + value;
    if (i < n) y[i] = sum;
    // STUB float sum = 0.0f;
    // END SOLUTION
    LAST
}
"""


def test_a_compiler_names_the_line_of_the_stub_that_the_learner_sees():
    stub = to_stub(CUDA.replace("LAST", "int wrong = no_such_name;"))
    with pytest.raises(cp.cuda.compiler.CompileException) as caught:
        cp.RawKernel(stub, "twice").compile()
    shown = stub.split("\n").index("    int wrong = no_such_name;") + 1
    assert f"({shown})" in str(caught.value)
    assert "no_such_name" in str(caught.value)


@pytest.mark.parametrize("make", [to_stub, to_solution])
def test_both_texts_compile(make):
    cp.RawKernel(make(CUDA.replace("LAST", "")), "twice").compile()
