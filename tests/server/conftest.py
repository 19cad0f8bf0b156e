"""One server and one engine of the same model, for all tests of a process."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from tinyvllm_ref import LLM

from .serving import MODEL, Served, served


@pytest.fixture(scope="session", autouse=True)
def many_files() -> None:
    """A thousand clients in this process, and mostly their server too, are more open files than a shell allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@pytest.fixture(scope="session")
def reference() -> LLM:
    """An engine by itself."""
    return LLM(MODEL, num_blocks=1024)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Served]:
    with served() as server:
        yield server


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """It is idle after every test."""
    yield shared_server
    shared_server.check_idle()
