"""Where submissions are judged: here, on several processes of this machine, or on a Dask cluster."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from ...installing import install_extra
from . import runtime, work

Job = Mapping[str, Any]
Done = tuple[int, dict[str, Any] | None, str]
"""Number of the job, its result, and why there is none."""


def run_here(jobs: Sequence[Job]) -> Iterator[Done]:
    """One after the other, in this process."""
    for number, job in enumerate(jobs):
        try:
            yield number, work.do(job), ""
        except Exception as error:  # a defect of the grader costs one submission
            yield number, None, f"{type(error).__name__}: {error}"


def run_with_dask(
    jobs: Sequence[Job], workers: int, scheduler: str | None, tls: Mapping[str, str] | None = None
) -> Iterator[Done]:
    """On `workers` processes of this machine, or on the cluster of an existing scheduler.

    A worker that dies costs the submission that it had; that one is tried once more, elsewhere.

    Raises
    ------
    ValueError
        Dask is not installed.
    """
    try:
        import dask
        import distributed as _distributed
    except ImportError:
        raise ValueError(
            f"several jobs need Dask: {install_extra('grade')}; or leave --jobs and --scheduler out"
        ) from None
    distributed: Any = _distributed  # its classes have no types
    settings = {
        "distributed.scheduler.allowed-failures": 1,  # deaths of workers that had a task: tried again once
        # A worker has the task that it runs and no other, which would be blamed for its death as well.
        "distributed.scheduler.worker-saturation": 1.0,
        "distributed.worker.daemon": False,
    }
    with dask.config.set(settings), ExitStack() as stack:
        if scheduler is None:
            stack.enter_context(runtime.shared_with_children(any(job.get("lesson") for job in jobs)))
            cluster = stack.enter_context(
                distributed.LocalCluster(
                    n_workers=workers,
                    threads_per_worker=1,
                    processes=True,
                    host="127.0.0.1",
                    dashboard_address=None,
                    memory_limit=0,
                    silence_logs=50,
                )
            )
            client = stack.enter_context(distributed.Client(cluster))
        else:
            security = _security(tls)
            client = stack.enter_context(distributed.Client(scheduler, security=security, timeout=30))
        yield from _gather(client, distributed, jobs)


def _gather(client: Any, distributed: Any, jobs: Sequence[Job]) -> Iterator[Done]:
    futures = {client.submit(work.do, job, pure=False): number for number, job in enumerate(jobs)}
    for future in distributed.as_completed(futures):
        number = futures[future]
        error = future.exception()
        if error is None:
            yield number, future.result(), ""
        elif type(error).__name__ == "KilledWorker":
            yield number, None, "the worker died twice with it"
        else:
            yield number, None, f"{type(error).__name__}: {error}"
        future.release()


def require_safe(address: str) -> None:
    """Refuse an address at which others could read the submissions and the secret's seeds, or send results."""
    parts = urlsplit(address if "://" in address else f"tcp://{address}")
    if parts.scheme == "tls":
        return
    host = parts.hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    if not is_here or parts.scheme != "tcp":
        raise ValueError(
            f"--scheduler {address}: it must be tls://..., or on this machine (tcp://127.0.0.1:8786): "
            "a Dask scheduler runs what anybody who reaches it sends"
        )


def require_usable(workers: int, scheduler: str | None) -> None:
    """Refuse what can not be worked with, before anything is done.

    Raises
    ------
    ValueError
        No worker, or an address that is neither TLS nor this machine.
    """
    if workers < 1:
        raise ValueError(f"--jobs is {workers}; it must be at least 1")
    if scheduler is not None:
        require_safe(scheduler)


def _security(tls: Mapping[str, str] | None) -> Any:
    import distributed.security

    Security: Any = distributed.security.Security
    if not tls:
        return Security()  # what Dask's own configuration says
    return Security(
        tls_ca_file=tls["ca"], tls_client_cert=tls["cert"], tls_client_key=tls["key"], require_encryption=True
    )


def run(
    jobs: Sequence[Job], workers: int, scheduler: str | None, tls: Mapping[str, str] | None = None
) -> Iterator[Done]:
    """Do all jobs, in any order."""
    require_usable(workers, scheduler)
    if not jobs:
        return iter(())
    if scheduler is None and workers == 1:
        return run_here(jobs)
    return run_with_dask(jobs, min(workers, len(jobs)), scheduler, tls)


def cpu_count() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


__all__ = ["cpu_count", "require_safe", "require_usable", "run", "run_here", "run_with_dask"]
