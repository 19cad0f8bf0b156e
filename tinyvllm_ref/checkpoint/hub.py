"""Files of a model repository from the Hugging Face hub: resumable, and each one checked.

The hub answers a HEAD request for ``{endpoint}/{repo}/resolve/{revision}/{file}`` with the file's size, the
commit, and an etag that is a checksum: the SHA-256 of a large file (``X-Linked-Etag``), or git's own SHA-1 of
a small one.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import requests
from tqdm import tqdm

_TIMEOUT_S = (10, 60)  # to connect, and between two pieces
_CHUNK_BYTES = 1 << 16  # what a broken connection loses of the bytes that had come
_ATTEMPTS = 5


class FetchError(RuntimeError):
    """A model could not be fetched; the message says what to do."""


class HubUnreachable(FetchError):
    """No connection to the hub, or none that lasts."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What the hub says of one file.

    Attributes
    ----------
    name : str
        In the repository.
    url : str
    size : int
        Bytes.
    checksum : str
        64 hexadecimal digits: SHA-256 of the bytes. 40: SHA-1 of ``"blob {size}\\0"`` and the bytes, as git
        has it.
    commit : str
        The revision that the file was found in.
    """

    name: str
    url: str
    size: int
    checksum: str
    commit: str


class Hub:
    """One endpoint of the hub, with the user's token.

    Parameters
    ----------
    endpoint : str, optional
        By default ``$HF_ENDPOINT``, else ``https://huggingface.co``.
    token : str, optional
        By default ``$HF_TOKEN`` or ``$HUGGING_FACE_HUB_TOKEN``. It is sent to the endpoint alone, and only
        over https or to this machine.
    pause_s : float
        Seconds before the second attempt after a broken connection; doubled for each further one.
    """

    def __init__(self, endpoint: str | None = None, token: str | None = None, pause_s: float = 1.0) -> None:
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self.pause_s = pause_s
        self._session = requests.Session()
        # A file that is compressed on the way has no byte positions to resume from.
        self._session.headers.update({"Accept-Encoding": "identity", "User-Agent": "tinyvllm"})
        token = token or os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
        address = urlsplit(self.endpoint)
        secure = address.scheme == "https" or address.hostname in ("localhost", "127.0.0.1", "::1")
        self._headers = {"Authorization": f"Bearer {token.strip()}"} if token and secure else {}

    def find(self, repo: str, name: str, revision: str = "main") -> RemoteFile | None:
        """What the hub says of a file; None where the repository has no such file.

        Raises
        ------
        HubUnreachable
            No answer.
        FetchError
            The hub refuses, or gives no checksum.
        """
        url = f"{self.endpoint}/{repo}/resolve/{quote(revision, safe='')}/{quote(name)}"
        response = self._head(url)
        if (
            response.status_code == 404
            and response.headers.get("X-Error-Code", "EntryNotFound") == "EntryNotFound"
        ):
            return None
        self._check(response, repo, name)
        headers = response.headers
        checksum = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").removeprefix("W/").strip('"')
        size = headers.get("X-Linked-Size") or headers.get("Content-Length") or ""
        if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", checksum) or not size.isdigit():
            raise FetchError(f"{url}: the answer has no checksum and size (etag {checksum!r}, size {size!r})")
        return RemoteFile(name, url, int(size), checksum, headers.get("X-Repo-Commit", revision))

    def download(self, file: RemoteFile, folder: Path, progress: bool = True) -> Path:
        """Get a file into a folder, going on where an earlier attempt broke off; whole and right, or an
        error.

        Raises
        ------
        HubUnreachable
            The connection broke several times without a new byte in between. What came is kept.
        FetchError
            The hub refuses; or the bytes are not those of the checksum, and have been deleted.
        """
        target = folder / file.name
        # The checksum in the name: what is left of another version is never continued with this one.
        part = folder / f"{file.name}.{file.checksum[:12]}.part"
        if (
            target.is_file()
            and target.stat().st_size == file.size
            and checksum_of(target, file) == file.checksum
        ):
            return target
        with tqdm(total=file.size, unit="B", unit_scale=True, desc=file.name, disable=not progress) as bar:
            self._download_part(file, part, bar)
        actual = checksum_of(part, file)
        if actual != file.checksum:
            part.unlink()
            raise FetchError(
                f"{file.url}: the checksum of what came is {actual}; the hub says {file.checksum};"
                " it was deleted, try again"
            )
        os.replace(part, target)
        return target

    def _download_part(self, file: RemoteFile, part: Path, bar: tqdm[Any]) -> None:
        failures = 0
        while True:
            have = part.stat().st_size if part.is_file() else 0
            if have > file.size:
                part.unlink()
                continue
            if have == file.size and part.is_file():
                bar.update(have - bar.n)
                return
            try:
                self._continue(file, part, have, bar)
            except (
                requests.ConnectionError,
                requests.Timeout,
                requests.exceptions.ChunkedEncodingError,
            ) as error:
                now = part.stat().st_size if part.is_file() else 0
                failures = 1 if now > have else failures + 1
                if failures == _ATTEMPTS:
                    fault = (
                        f"{file.url}: broke off at {now:,} of {file.size:,} bytes ({type(error).__name__})"
                    )
                    raise HubUnreachable(fault) from error
                time.sleep(self.pause_s * 2 ** (failures - 1))

    def _continue(self, file: RemoteFile, part: Path, have: int, bar: tqdm[Any]) -> None:
        """One request for the bytes from `have` on, appended to the part."""
        headers = {**self._headers, "Range": f"bytes={have}-"}
        with self._session.get(file.url, headers=headers, stream=True, timeout=_TIMEOUT_S) as response:
            self._check(response, file.url, file.name)
            start = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
            if response.status_code != 206 or start is None or int(start[1]) != have:
                have = 0  # a server that does not resume sends the whole file
            bar.update(have - bar.n)
            with part.open("r+b" if have else "wb") as out:
                out.seek(have)
                for chunk in response.iter_content(_CHUNK_BYTES):
                    out.write(chunk)
                    bar.update(len(chunk))
                    if out.tell() > file.size:
                        raise FetchError(
                            f"{file.url}: more bytes came than the {file.size:,} that were announced"
                        )

    def _head(self, url: str) -> requests.Response:
        """HEAD, following redirects within the hub (a renamed repository) but not those to the bytes."""
        try:
            for _ in range(5):
                response = self._session.head(
                    url, headers=self._headers, allow_redirects=False, timeout=_TIMEOUT_S
                )
                location = response.headers.get("Location", "")
                if (
                    not response.is_redirect
                    or "X-Linked-Etag" in response.headers
                    or urlsplit(location).netloc
                ):
                    return response
                url = urljoin(url, location)
        except (requests.ConnectionError, requests.Timeout) as error:
            raise HubUnreachable(f"{self.endpoint} cannot be reached ({type(error).__name__})") from error
        raise FetchError(f"{url}: redirected too often")

    def _check(self, response: requests.Response, repo: str, name: str) -> None:
        status = response.status_code
        if status < 400:
            return
        said = response.headers.get("X-Error-Message", response.reason)
        if status in (401, 403):
            token = "the token in HF_TOKEN was not accepted" if self._headers else "no HF_TOKEN is set"
            raise FetchError(
                f"{self.endpoint} refuses {repo} ({status}, {said}); {token}. Accept the licence on the"
                " model's page, make a token that may read it, and set HF_TOKEN to it"
            )
        if status == 404:
            raise FetchError(f"{self.endpoint} has no {repo} with {name} (404, {said})")
        if status >= 500 or status == 429:
            raise HubUnreachable(f"{self.endpoint} answers {status} ({said}) for {name}; try again later")
        raise FetchError(f"{self.endpoint} answers {status} ({said}) for {repo}, {name}")


def checksum_of(path: Path, file: RemoteFile) -> str:
    """The checksum of a local file, by the rule that the remote one's follows."""
    if len(file.checksum) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
