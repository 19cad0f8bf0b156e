"""How a server behaves towards its clients."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits and keys of one server.

    Attributes
    ----------
    api_key : str or None
        What clients must send as ``Authorization: Bearer KEY``; None asks for nothing.
    max_body_bytes : int
        A longer body is refused with 413 before it is read to its end.
    body_seconds : float
        A body that has not come within this time is refused with 408.
    retry_seconds : int
        What ``Retry-After`` says where the queue is full.
    allowed_hosts : tuple of str
        Names that the Host header may have; an empty tuple allows all. A server on a loopback address allows
        loopback names only, so that no web page can reach it under a name of its own (DNS rebinding).

    Raises
    ------
    ValueError
        A limit is not positive, or the key is empty or not printable ASCII.
    """

    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    retry_seconds: int = 1
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "body_seconds", "retry_seconds"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            raise ValueError("the API key must be printable ASCII characters without spaces, at least one")
