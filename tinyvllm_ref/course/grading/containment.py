"""How an answer's process is kept apart: bubblewrap where it is, another user where the grader is root, limits always.

:func:`find` tries the levels from the best on, by starting a process and asking it what it can reach; the report
says which one was used and what was found.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
import shlex
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ...checkpoint.names import REPOSITORY
from ...emulation import toolchain
from . import runtime
from .limits import Limits

BUBBLEWRAP, USER, LIMITS = "bubblewrap", "user", "limits"
LEVELS = (BUBBLEWRAP, USER, LIMITS)

SAYS = {
    BUBBLEWRAP: "contained: bubblewrap (no network, read-only system, empty working folder, nothing of the course)",
    USER: "not contained: another user, who can read what everybody may read and use the network",
    LIMITS: "not contained: limits alone, and what the grader's account may do an answer may do",
}

_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # beside /usr, or links into it
# Numbers that systemd keeps for users that are made for one process, so that nobody's files have them.
_RUNNER = "tinyvllm_ref.course.grading.runner_process"
_FIRST_UID, _NUM_UIDS = 61184, 4000


class NotAvailable(ValueError):
    """A level of containment does not work here; the message says why."""


@dataclass(frozen=True)
class Containment:
    """A level that works, and what a process in it could reach when it was tried.

    Attributes
    ----------
    level : str
    found : dict
        ``readable``, ``writable``, ``network``, ``uid``, ``environment``.
    why : tuple of str
        Why no better level was taken.
    """

    level: str
    found: dict[str, Any]
    why: tuple[str, ...] = ()

    @property
    def says(self) -> str:
        return SAYS[self.level]


@dataclass(frozen=True)
class Place:
    """A contained process that is ready to be started.

    Attributes
    ----------
    command : list of str
    environment : dict
    folder : str
        The working folder it begins in.
    uid : int or None
        The user that the process is to become or to be; None where it stays who it is.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    uid: int | None


@contextmanager
def place(level: str, limits: Limits, tree: Path, module: str, seed: Path) -> Iterator[Place]:
    """A place for ``python -m module``, with `tree` as its only code of this project.

    Parameters
    ----------
    level : str
    limits : Limits
    tree : Path
        From :mod:`.runtime`.
    module : str
        Of `tree`; it gets its settings as the first argument (see ``runner_process.main``).
    seed : Path
        What its home begins as a copy of.
    """
    own_user = _own_uid() if os.geteuid() == 0 and level != LIMITS else nullcontext(None)
    with own_user as uid:
        if level == BUBBLEWRAP:
            yield _wrapped(limits, tree, module, seed, uid)
        else:
            with _unwrapped(limits, tree, module, seed, uid) as found:
                yield found


@contextmanager
def _own_uid() -> Iterator[int]:
    """A user that nothing else has while it is used, neither another grader here nor what an answer left behind.

    What a fork bomb has started counts against its user's processes until it is cleared away, which takes a while: the
    next answer must not be that user.
    """
    start = secrets.randbelow(_NUM_UIDS)
    for k in range(_NUM_UIDS):
        uid = _FIRST_UID + (start + k) % _NUM_UIDS
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                if sys.platform == "linux":  # a name that one process can have, and that goes away with it
                    claim.bind(f"\0tinyvllm-user-{uid}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                yield uid
                return
    raise RuntimeError(f"none of the {_NUM_UIDS:,} users for answers is free")


@contextmanager
def _unwrapped(limits: Limits, tree: Path, module: str, seed: Path, uid: int | None) -> Iterator[Place]:
    """A folder of its own, and nothing around it."""
    with tempfile.TemporaryDirectory(prefix="tinyvllm-run-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        work = Path(folder) / "w"
        work.mkdir()
        if uid is not None:
            os.chown(work, uid, uid)
        else:  # the system counts what this user runs already, a desktop's hundreds of threads among them
            limits = replace(limits, processes=limits.processes + _tasks_of_this_user())
        settings = _settings(limits, uid, str(seed), "")
        yield Place(
            _python(str(tree), module, settings),
            _environment(str(work), str(tree)),
            str(work),
            uid,
        )


def _tasks_of_this_user() -> int:
    """What the user of this process runs, with threads."""
    total = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid():
                total += process.num_threads()
    return total


def _settings(limits: Limits, uid: int | None, seed: str, open_folder: str) -> str:
    return json.dumps({"limits": limits.as_dict(), "uid": uid, "seed": seed, "open_folder": open_folder})


def _python(tree: str, module: str, settings: str) -> list[str]:
    # -I: nothing of the environment or the working folder. -S: no .pth file of the installation brings this
    # project's own folder back.
    paths = [tree, *_packages()]
    code = f"import sys; sys.path[:0] = [{tree!r}]; sys.path += {paths[1:]!r}; "
    code += f"from {module} import main; main()"
    return [sys.executable, "-I", "-S", "-B", "-c", code, settings]


def _environment(folder: str, tree: str) -> dict[str, str]:
    """All variables that a contained process has."""
    environment = {
        "PATH": os.pathsep.join(dict.fromkeys([*_compiler_folders(), "/usr/local/bin", "/usr/bin", "/bin"])),
        "HOME": f"{folder}/home",
        "TMPDIR": f"{folder}/work",
        "TINYVLLM_HOME": f"{folder}/home",
        "TINYVLLM_MY_ENGINE": f"{folder}/my_engine",
        "TINYVLLM_DEVICE": "cpu",
        "TINYVLLM_CHECKS": "full",
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TINYVLLM_GRADING_TREE": tree,
        "TINYVLLM_GRADING_PACKAGES": os.pathsep.join(_packages()),
    }
    with contextlib.suppress(
        toolchain.CompilerNotFound
    ):  # what is installed is made for the one that is found here
        environment["CXX"] = shlex.join(toolchain.find().command)
    return environment


def _packages() -> list[str]:
    """Folders of installed packages."""
    found = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return [folder for folder in dict.fromkeys(found) if os.path.isdir(folder)]


def _compiler_folders() -> list[str]:
    try:
        found = shutil.which(toolchain.find().command[0])
    except toolchain.CompilerNotFound:
        found = None
    return [str(Path(found).parent)] if found else []


# ---------------- bubblewrap


def _wrapped(limits: Limits, tree: Path, module: str, seed: Path, uid: int | None) -> Place:
    program = shutil.which("bwrap")
    if program is None:
        raise NotAvailable("bubblewrap is not installed (`bwrap` is not on PATH)")
    inside, begin = "/runtime", "/runtime-seed"
    command = [program, "--die-with-parent", "--new-session", "--clearenv"]
    environment = _environment("/tmp", inside)
    for name, value in environment.items():
        command += ["--setenv", name, value]
    if uid is None:
        command += ["--unshare-all"]
    else:
        # Root in a user namespace would still be root's account to the kernel, which is free of limits on
        # processes. So it stays outside of one, with two capabilities that it loses when it becomes `uid`.
        command += [
            "--unshare-ipc",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-uts",
            "--unshare-cgroup-try",
        ]
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    # First, for the Python that is needed may lie in /tmp.
    command += ["--size", str(limits.file_bytes), "--tmpfs", "/tmp"]
    command += ["--hostname", "grading", *_system_mounts(), "--proc", "/proc", "--dev", "/dev"]
    command += ["--size", str(64 << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    command += ["--ro-bind", str(tree), inside, "--ro-bind", str(seed), begin]
    command += ["--remount-ro", "/", "--chdir", "/tmp"]
    settings = _settings(limits, uid, begin, "/tmp" if uid is not None else "")
    command += ["--", *_python(inside, module, settings)]
    # The user is changed inside, once what bubblewrap needs root for is done.
    return Place(command, {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}, "/", None)


@functools.cache
def _mount_list() -> tuple[str, ...]:
    mounts: list[str] = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        if os.path.islink(name):
            mounts += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            mounts += ["--ro-bind", name, name]
    for name in (
        "/etc/alternatives",
        "/etc/ld.so.cache",
        "/etc/ld.so.conf",
        "/etc/ld.so.conf.d",
        "/nix/store",
    ):
        if os.path.exists(name):
            mounts += ["--ro-bind", name, name]
    prefixes = [sys.base_prefix, sys.prefix, *(str(Path(folder).parent) for folder in _compiler_folders())]
    prefixes = [os.path.realpath(prefix) for prefix in prefixes] + [sys.prefix]
    # What lies in a folder that is shown, and must not be seen, is covered; what of it is needed comes after.
    if _is_inside(str(REPOSITORY), ["/usr", *prefixes]):
        mounts += ["--tmpfs", str(REPOSITORY)]
    for prefix in dict.fromkeys(prefixes):
        if not _is_inside(prefix, ["/usr"]) or _is_inside(prefix, [str(REPOSITORY)]):
            for parent in reversed(Path(prefix).parents[:-1]):  # else they are for their owner alone
                mounts += ["--perms", "0755", "--dir", str(parent)]
            mounts += ["--ro-bind", prefix, prefix]
    for folder in _packages():
        if os.path.isdir(f"{folder}/tinyvllm_ref"):
            mounts += ["--tmpfs", f"{folder}/tinyvllm_ref"]
    for link in _links_to(sys.executable):
        is_mounted = _is_inside(link, ["/usr", *_SYSTEM, *prefixes])
        if not is_mounted and not any(_is_inside(prefix, [link]) for prefix in prefixes):
            for parent in reversed(Path(link).parents[:-1]):
                mounts += ["--perms", "0755", "--dir", str(parent)]
            mounts += ["--symlink", os.readlink(link), link]
    return tuple(mounts)


def _links_to(path: str) -> list[str]:
    """All links on the way of a path to its file: a virtual environment's Python may be a link to a link."""
    found: list[str] = []
    while True:
        ways = [*reversed(Path(path).parents), Path(path)]
        link = next((str(way) for way in ways if way.is_symlink()), None)
        if link is None or link in found:
            return found
        found.append(link)
        rest = os.path.relpath(path, link)
        path = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link), rest))


def _system_mounts() -> list[str]:
    return list(_mount_list())


def _is_inside(path: str, folders: Sequence[str]) -> bool:
    return any(os.path.commonpath([path, folder]) == folder for folder in folders)


# ---------------- which level works


def find(
    wanted: str, limits: Limits, *, secret_files: Sequence[Path] = (), writable: Sequence[Path] = ()
) -> Containment:
    """The best level that works, or the one that is asked for.

    Parameters
    ----------
    wanted : str
        ``"auto"`` or one of :data:`LEVELS`.
    limits : Limits
    secret_files, writable : sequence of Path
        Files that must not be read, and folders that must not be written to, beside the course's own.

    Raises
    ------
    NotAvailable
        None works; the message says why.
    """
    if wanted not in ("auto", *LEVELS):
        raise ValueError(f"containment is {wanted!r}; it must be one of auto, {', '.join(LEVELS)}")
    candidates = LEVELS if wanted == "auto" else (wanted,)
    why: list[str] = []
    for level in candidates:
        if level == USER and os.geteuid() != 0:
            why.append("user: only root can start a process as another user")
            continue
        if level == LIMITS and os.geteuid() == 0 and wanted == "auto":
            raise NotAvailable(
                "this is root, and answers can not be kept from being root: "
                + "; ".join(why)
                + ". Install bubblewrap, or grade as an ordinary user, or accept it with --containment limits"
            )
        try:
            found = probe(level, limits, secret_files, writable)
        except NotAvailable as error:
            why.append(f"{level}: {error}")
            continue
        if level == BUBBLEWRAP and (found["readable"] or found["writable"] or found["network"]):
            reached = [*found["readable"], *found["writable"], *(["the network"] if found["network"] else [])]
            why.append(f"bubblewrap: from inside one can reach {', '.join(reached)}")
            continue
        return Containment(level, found, tuple(why))
    raise NotAvailable("; ".join(why))


def probe(
    level: str, limits: Limits, secret_files: Sequence[Path], writable: Sequence[Path]
) -> dict[str, Any]:
    """Start a process at a level, and ask it what it can reach."""
    from .process import Process, Stopped

    files = [REPOSITORY / "solutions", runtime.PACKAGE / "course" / "exercises", runtime.PACKAGE / "kernels"]
    files += secret_files
    with socket.create_server(("127.0.0.1", 0)) as server:
        message = {
            "do": "probe",
            "read": [str(path) for path in files if path.exists()],
            "write": [str(path) for path in [REPOSITORY, *writable] if path.exists()],
            "connect": list(server.getsockname()),
        }
        try:
            with (
                place(level, limits, runtime.runner_tree(), _RUNNER, runtime.runner_seed()) as where,
                Process(where, limits) as process,
            ):
                try:
                    reply = process.ask(message, limits.patience + 30)
                except Stopped as error:
                    said = process.said.decode(errors="replace").strip().rpartition("\n")[2]
                    hidden = _closed_to_others() if level == USER else ""
                    raise NotAvailable(f"a process does not start ({hidden or said or error})") from None
        except OSError as error:
            raise NotAvailable(f"a process does not start ({error})") from None
    if "uid" not in reply:
        raise NotAvailable(f"a process does not start ({reply.get('fault')})")
    return dict(reply)


def _closed_to_others() -> str:
    """Why another user can not run this Python; empty where it can."""
    for needed in dict.fromkeys([sys.base_prefix, sys.prefix, *_packages()]):
        for folder in (Path(needed), *Path(needed).parents):
            if not folder.stat().st_mode & 0o001:
                return f"another user can not read {needed}, for {folder} is its owner's alone"
    return ""


def user_of(uid: int) -> None:
    """Kill what is left of a user made for one process; in a child that has become this user."""
    code = f"import os, signal; os.setresuid({uid}, {uid}, {uid}); os.kill(-1, signal.SIGKILL)"
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
