"""The page at ``/``: a chat in one file, without anything from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

_FILE = Path(__file__).with_name("page.html")


@functools.cache
def _html() -> tuple[str, str]:
    """(the page, its Content-Security-Policy): its own script and style run, and nothing else."""
    text = _FILE.read_text(encoding="utf-8")

    def digests(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashes = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in found)
        return " ".join(f"'sha256-{value}'" for value in hashes)

    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {digests('script')};"
        f" style-src {digests('style')}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


async def page(request: Request) -> Response:
    """``GET /``."""
    text, policy = _html()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)
