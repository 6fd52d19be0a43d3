"""What Prometheus reads from ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cudnn_ops.server.async_engine import AsyncEngine

#: Bounds of the histograms, in seconds.
_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_BETWEEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_WHOLE = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)


class _OfTheEngine(Collector):
    """The engine's counters, read when they are asked for."""

    def __init__(self, serving: AsyncEngine) -> None:
        self._serving = serving

    def collect(self) -> Iterator[Metric]:
        engine = self._serving.engine
        stats, cache = engine.stats, engine.cache
        for name, value, meaning in (
            ("running", engine.running, "Requests that hold pages."),
            ("waiting", engine.waiting, "Requests that wait in the engine."),
            ("unfinished", self._serving.unfinished, "Requests that run or wait."),
            ("pages", cache.pages, "Pages of the cache."),
            ("pages_used", cache.pages - cache.available, "Pages that requests hold."),
            ("ready", int(self._serving.is_ready), "Whether requests are taken."),
        ):
            yield GaugeMetricFamily(f"cudnn_ops_{name}", meaning, value)
        for name, count, meaning in (
            ("finished_requests", stats.finished, "Requests that are complete."),
            ("failed_requests", stats.failed, "Requests that ended by an error of their own."),
            ("aborted_requests", stats.aborted, "Requests that were aborted."),
            ("steps", stats.steps, "Steps of the engine."),
            ("overlapped_steps", stats.overlapped, "Steps queued while the one before ran."),
            ("graph_replays", stats.replays, "Steps that were replayed from a CUDA graph."),
            ("computed_tokens", stats.computed_tokens, "Tokens that went through the model."),
            ("extra_tokens", stats.extra_tokens, "Those of them whose request had ended."),
            ("generated_tokens", stats.output_tokens, "Tokens that were generated."),
            ("prefix_hit_tokens", stats.prefix_hits, "Prompt tokens found in the cache."),
            ("preemptions", stats.preemptions, "Requests that lost their pages."),
            ("draft_tokens", stats.speculation.draft_tokens, "Draft tokens."),
            ("accepted_tokens", stats.speculation.accepted_tokens, "Accepted draft tokens."),
            ("step_seconds", stats.seconds, "Time spent in steps."),
        ):
            yield CounterMetricFamily(f"cudnn_ops_{name}", meaning, count)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, serving: AsyncEngine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_OfTheEngine(serving))
        self.requests = Counter(
            "cudnn_ops_http_requests",
            "Answers of the routes that generate, by status; 499: the client left.",
            ("route", "status"),
            registry=self._registry,
        )
        self.prompt_tokens = Counter(
            "cudnn_ops_prompt_tokens", "Tokens of admitted prompts.", registry=self._registry
        )
        self.first = self._histogram(
            "time_to_first_token", "From a request's arrival to its first token.", _FIRST
        )
        self.between = self._histogram(
            "time_between_tokens",
            "Between two updates of a request, over the tokens of the later one.",
            _BETWEEN,
        )
        self.whole = self._histogram(
            "request", "From a request's arrival to the end of its answer.", _WHOLE
        )

    def _histogram(self, name: str, meaning: str, bounds: tuple[float, ...]) -> Histogram:
        name = f"cudnn_ops_{name}_seconds"
        return Histogram(name, meaning, buckets=bounds, registry=self._registry)

    def text(self) -> bytes:
        """All of them in Prometheus's format."""
        return generate_latest(self._registry)
