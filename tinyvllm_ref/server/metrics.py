"""What Prometheus reads at ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from .async_engine import AsyncEngine, OutputStream
from .deltas import Delta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counts and times of one server.

    Parameters
    ----------
    engine : AsyncEngine
        What is in hand is asked of it whenever the metrics are read.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._answers = self._counter("http_responses", "HTTP answers.", ["status"])
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of accepted prompts.")
        self._tokens = self._counter("generation_tokens", "Tokens generated.")
        self._finished = self._counter("completions", "Completions, by how they ended.", ["finish_reason"])
        self._first = self._histogram("time_to_first_token_seconds", "From acceptance on.", _FIRST)
        self._next = self._histogram("time_per_output_token_seconds", "From one token to the next.", _NEXT)
        self._whole = self._histogram("request_seconds", "From acceptance to the end.", _WHOLE)

    def answered(self, status: int) -> None:
        """An HTTP answer has been given."""
        self._answers.labels(str(status)).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus's text format."""
        return generate_latest(self._registry)

    async def watched(
        self, deltas: AsyncIterator[tuple[int, Delta]], streams: Sequence[OutputStream]
    ) -> AsyncIterator[tuple[int, Delta]]:
        """The same deltas, with their times and numbers noted."""
        began = time.perf_counter()
        latest: dict[tuple[int, int], float] = {}
        left = sum(stream.params.n for stream in streams)
        self._prompt_tokens.inc(sum(len(stream.prompt_token_ids) for stream in streams))
        try:
            async for number, delta in deltas:
                now = time.perf_counter()
                if delta.token_ids:
                    self._note_time(latest, (number, delta.index), now, began)
                    self._tokens.inc(len(delta.token_ids))
                if delta.finish_reason is not None:
                    left -= 1
                    self._finished.labels(delta.finish_reason).inc()
                yield number, delta
        finally:
            if left:
                self._finished.labels("abort").inc(left)
            self._whole.observe(time.perf_counter() - began)

    def _note_time(
        self, latest: dict[tuple[int, int], float], choice: tuple[int, int], now: float, began: float
    ) -> None:
        if choice in latest:
            self._next.observe(now - latest[choice])
        else:
            self._first.observe(now - began)
        latest[choice] = now

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"tinyvllm_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"tinyvllm_{name}", text, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """What the engine has in hand."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Any]:
        stats = self._engine.stats
        for name, text, value in (
            ("requests_running", "Completions being computed.", stats.running),
            ("requests_waiting", "Completions that wait.", stats.waiting),
            ("kv_blocks_used", "Blocks of the KV cache in use.", stats.blocks_used),
            ("kv_blocks_total", "Blocks of the KV cache.", stats.blocks_total),
        ):
            yield GaugeMetricFamily(f"tinyvllm_{name}", text, value)
        yield CounterMetricFamily(
            "tinyvllm_preemptions",
            "Times a request lost its blocks and was computed again.",
            stats.preemptions,
        )
