"""Imports flow downward only, and `import tinyvllm_ref` is cheap."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "tinyvllm_ref"

# Each module (or package, with all in it) may import those of its own line and of the lines below it, unless
# a rule of its own follows. The order is that of the call chain.
LEVELS = [
    ["cli", "course", "__main__"],
    ["server", "doctor", "bench"],
    ["random_model", "speed"],
    ["llm", "assembly"],
    ["engine"],
    ["scheduler", "model_runner"],
    ["fast_path"],
    [
        "block_manager",
        "tokenizer",
        "completion",
        "model",
        "sampler",
        "batch",
        "decode_graph",
        "decode_products",
        "staging",
    ],
    ["buffers"],
    [
        "kernels",
        "blas",
        "capturable_blas",
        "dependent_launch",
        "tensor_map",
        "kv_cache",
        "checkpoint",
        "bf16",
    ],
    ["request", "parts", "lost_device"],
    ["device"],
    ["outputs"],
    ["sampling_params", "config", "emulation", "installing"],
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}

# What these may import of the project, and nothing else. None: anything of their level or below.
ONLY = {
    "config": set(),
    "sampling_params": set(),
    "parts": set(),
    "emulation": set(),
    "installing": set(),
    "request": {"sampling_params"},
    "block_manager": {"request"},
    "scheduler": {"block_manager", "request", "sampling_params"},
    "device": {"emulation", "installing"},
    "lost_device": {"device"},
    "tokenizer": set(),
    "checkpoint": {"bf16", "config", "device", "installing"},
}
PURE = ("request", "block_manager", "scheduler", "sampling_params", "config", "parts")
ONLY_CUPY = "device"  # the one module that may import cupy


def modules():
    """(top-level name below tinyvllm_ref, path) of every file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ("tinyvllm_ref" if parts[0] == "__init__" else parts[0]), path


def runtime_imports(tree):
    """All imports of a file, those under `if TYPE_CHECKING:` left out."""
    stack = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        stack += list(ast.iter_child_nodes(node))


def imported_names(path, module):
    """Full names of what a file imports; of the project itself also by relative imports."""
    package = ["tinyvllm_ref", *path.relative_to(PACKAGE).parts[:-1]]
    for node in runtime_imports(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.level:
            base = package[: len(package) - node.level + 1]
            yield from (".".join([*base, *((node.module or alias.name).split("."))]) for alias in node.names)
        elif node.module == "tinyvllm_ref":
            yield from (f"tinyvllm_ref.{alias.name}" for alias in node.names)
        else:
            yield node.module


def violations(module, path):
    """What one file must not import, as sentences."""
    for name in imported_names(path, module):
        root, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if root == "cupy" and module != ONLY_CUPY:
            yield f"{path.name} imports cupy; only device.py may"
        if module in PURE and root in ("numpy", "cupy", "torch"):
            yield f"{path.name} imports {root}; it is pure Python"
        if root != "tinyvllm_ref" or target == module or not target:
            continue
        if target not in LEVEL:
            # A public name of the package itself (LLM, SamplingParams): for those on top only.
            if LEVEL.get(module, 0) > LEVEL["llm"]:
                yield f"{path.name} imports {target} from the package itself"
        elif module in ONLY and target not in ONLY[module]:
            allowed = ", ".join(sorted(ONLY[module])) or "nothing of the project"
            yield f"{path.name} imports {target}; it may import {allowed}"
        elif module != "tinyvllm_ref" and LEVEL[target] < LEVEL[module]:
            yield f"{path.name} imports {target}, which is above it"
        elif target == "course" and module not in ("cli", "__main__"):
            yield f"{path.name} imports course; only the command line may"


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=lambda value: getattr(value, "name", value))
def test_imports_flow_downward(module, path):
    assert module == "tinyvllm_ref" or module in LEVEL, f"{module} has no level; add it to LEVELS"
    assert list(violations(module, path)) == []


@pytest.mark.parametrize(
    ("module", "text", "message"),
    [
        ("scheduler", "import numpy as np", "imports numpy; it is pure Python"),
        ("scheduler", "def f():\n    from tinyvllm_ref.engine import Engine", "imports engine"),
        ("request", "from . import scheduler", "imports scheduler"),
        ("kernels", "from tinyvllm_ref import model", "imports model, which is above it"),
        ("kernels", "import cupy", "only device.py may"),
        ("engine", "from tinyvllm_ref.course.grade import x", "imports course"),
        ("engine", "from tinyvllm_ref import LLM", "imports LLM from the package itself"),
        ("config", "from tinyvllm_ref.parts import Parts", "nothing of the project"),
        ("emulation", "from tinyvllm_ref.device import cp", "imports device"),
        ("parts", "if TYPE_CHECKING:\n    from tinyvllm_ref.config import ModelConfig", None),
        ("llm", "from tinyvllm_ref.engine import Engine\nimport numpy", None),
    ],
)
def test_the_rules_find_what_they_forbid(monkeypatch, tmp_path, module, text, message):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    path = tmp_path / f"{module}.py"
    path.write_text(text)
    found = list(violations(module, path))
    assert (message is None and not found) or (len(found) == 1 and message in found[0])


def run_python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return result.stdout.strip()


def test_nothing_heavy_is_imported_with_the_package():
    heavy = (
        "cupy",
        "torch",
        "tokenizers",
        "jinja2",
        "requests",
        "tqdm",
        "matplotlib",
        "IPython",
        "typer",
        "starlette",
    )
    loaded = run_python(
        f"import sys, tinyvllm_ref; print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert loaded == "[]"


@pytest.mark.parametrize("module", PURE)
def test_the_pure_modules_load_no_numpy(module):
    assert run_python(f"import sys, tinyvllm_ref.{module}; print('numpy' in sys.modules)") == "False"


def test_import_takes_less_than_150_ms_beyond_numpy():
    code = (
        "import time; import numpy; begin = time.process_time(); import tinyvllm_ref;"
        " print(time.process_time() - begin)"
    )
    # CPU time, and the best of three: what else the machine does is not the package's cost.
    times = [float(run_python(code)) for _ in range(3)]
    assert min(times) < 0.150, f"import took {statistics.median(times) * 1e3:.0f} ms"


def test_the_pure_modules_are_strictly_typed():
    mypy = pytest.importorskip("mypy.api")
    root = PACKAGE.parent
    files = [str(PACKAGE / f"{module}.py") for module in PURE]
    output, errors, status = mypy.run(["--config-file", str(root / "pyproject.toml"), *files])
    assert status == 0, output + errors
    assert "strict = true" in (root / "pyproject.toml").read_text()
