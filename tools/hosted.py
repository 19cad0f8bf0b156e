"""Make a notebook's kernel ready for the course, where somebody else set up Python: a hosted notebook, say.

The first cell of each lesson runs this when the course cannot be imported. What the lessons import is installed with
pip into the Python of this kernel, CuPy too where there is an NVIDIA driver; JupyterLab is not, for one is running.
"""

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent
NOT_HERE = ("jupyterlab", "nbval")  # of the extra `course`: for a terminal


def requirements(folder, with_gpu):
    """The lines of pyproject.toml that a lesson needs."""
    import tomllib

    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def of_extra(name):
        """An extra's lines; the project's own extras among them are written out, for no index has the project."""
        for line in project["optional-dependencies"][name]:
            if line.startswith(f"{project['name']}["):
                for other in line[len(project["name"]) + 1 : -1].split(","):
                    yield from of_extra(other.strip())
            else:
                yield line

    lines = [*project["dependencies"], *of_extra("course"), *(of_extra("gpu") if with_gpu else [])]
    return [line for line in lines if not line.startswith(NOT_HERE)]


def has_driver():
    """Whether an NVIDIA driver is there."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def install(folder):
    """Install what is missing; the error says what to do.

    Raises
    ------
    RuntimeError
        Python is too old, or pip did not get what is needed.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 (somebody else's Python)
        found = ".".join(map(str, sys.version_info[:2]))
        raise RuntimeError(
            f"this notebook runs on Python {found}, and tinyvllm needs 3.11 or newer: choose another kernel or runtime"
        )
    with_gpu = has_driver()
    print(
        "Installing what the course needs" + (", with CuPy for the GPU" if with_gpu else "") + " ...",
        flush=True,
    )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += requirements(folder, with_gpu)
    command += ["--editable", str(folder)] if os.access(folder, os.W_OK) else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise RuntimeError(
            f"pip could not install what the course needs: {said}\n"
            "Without a network? It needs one, this once (a hosted notebook may have a switch for it). "
            "Then run this cell again."
        )


def make_findable(folder):
    """Let this process and those that it starts find the package, which pip has told only later ones about.

    And the program `tinyvllm`, behind `!` in a cell: its folder is in the PATH of a shell, not of each kernel.
    """
    sys.path.insert(0, str(folder))
    for name, first in (("PYTHONPATH", str(folder)), ("PATH", sysconfig.get_path("scripts"))):
        os.environ[name] = os.pathsep.join(filter(None, [first, os.environ.get(name)]))
    importlib.invalidate_caches()


def replaced_modules():
    """Packages that were imported before pip brought another version of them."""
    from importlib.metadata import version

    loaded = [name for name in ("numpy", "cupy", "matplotlib") if name in sys.modules]
    names = {"cupy": "cupy-cuda12x"}
    return [name for name in loaded if sys.modules[name].__version__ != version(names.get(name, name))]


if __name__ == "__main__":
    install(FOLDER)
    make_findable(FOLDER)
    if replaced_modules():
        print("Installed. Restart the kernel now (its menu has it), then run the cells from the top.")
    else:
        print("Installed.")
