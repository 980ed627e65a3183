"""Prometheus metrics of the server, one registry per application."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from training.serving.models.server_config import SHARED_COUNTS

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counts of requests, latencies, sizes of batches, versions that answer."""

    def __init__(self) -> None:
        self._registry = all_ = CollectorRegistry()
        self.requests = Counter(
            "sluice_requests", "Answered requests.", ["method", "status"], registry=all_
        )
        self.seconds = Histogram(
            "sluice_request_seconds", "Time to the answer.", ["method"], buckets=SECONDS,
            registry=all_,
        )  # fmt: skip
        self.batch_rows = Histogram(
            "sluice_batch_rows", "Rows of a call of a model.", buckets=ROWS, registry=all_
        )
        what = "Version that answers; the lowest of all processes."
        self._versions = Gauge("sluice_model_version", what, ["model"], registry=all_,
                               multiprocess_mode="livemin")  # fmt: skip
        self._indexes = Gauge("sluice_index_version", "Index that answers; 0: none.", ["model"],
                              registry=all_, multiprocess_mode="livemin")  # fmt: skip
        what = "Versions and indexes that were loaded, or failed."
        self.reloads = Counter("sluice_model_loads", what, ["model", "result"], registry=all_)

    def count_load(self, model: str, version: int, index: int | None) -> None:
        """Counts a version, or an index of it, that answers now."""
        self.reloads.labels(model, "served").inc()
        self._versions.labels(model).set(version)
        self._indexes.labels(model).set(index or 0)

    def render(self) -> bytes:
        """Returns the text that Prometheus reads: of all processes, where there are several."""
        if SHARED_COUNTS not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry)
