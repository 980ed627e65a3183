"""What answers requests: models, batches, recommendations; counts of all for Prometheus."""

from __future__ import annotations

import os
from collections.abc import Awaitable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from training.index.item_columns import read_item_files
from training.serving.batching import Batcher, Steps, plan_call
from training.serving.model_store import ModelStore
from training.serving.recommend import ListModels, Recommender
from training.serving.served_version import Loading, ServedVersion
from training.serving.server_config import SHARED_COUNTS, ServerConfig
from training.serving.tensors import (
    encode_json,
    format_predict,
    parse_json,
    parse_predict,
    read_signature_name,
)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Server:
    """Answers requests by the models of a directory."""

    def __init__(self, config: ServerConfig) -> None:
        self.metrics, self.limits = Metrics(), config.limits
        files = read_item_files(config.recommend.items_file, config.recommend.blocked_file)
        loading = Loading(files, config.verify, config.pages)
        self.store = ModelStore(
            config.directory, config.poll_seconds, loading, self.metrics.count_load
        )
        self.store.load()
        models = ListModels(self.store, config.recommend)
        self.store.start(models.check_version)
        self.recommender = Recommender(models, self.limits.request)
        self.batcher = Batcher(self.limits, self.metrics.batch_rows.observe)

    def predict(self, version: ServedVersion, body: bytes) -> Awaitable[bytes]:
        """Answers the body of `:predict`."""
        return self.batcher.answer(len(body), self._predict(version, body))

    def recommend(self, body: bytes) -> Awaitable[bytes]:
        """Answers the body of `/v1/recommend`."""
        return self.batcher.answer(len(body), self.recommender.recommend(body))

    def _predict(self, version: ServedVersion, body: bytes) -> Steps:
        limits = self.limits.request
        data = parse_json(body, limits.values)
        name = read_signature_name(data)
        signature = version.find_signature(name)
        inputs, is_row = parse_predict(data, signature.specs, signature.names, limits)
        call = plan_call(version, name, inputs, limits)
        del body, data, inputs  # While it waits a request holds its arrays alone.
        outputs = yield call
        return encode_json(format_predict(outputs, is_row=is_row))

    def close(self) -> None:
        """Ends the look-out for new versions, and the threads."""
        self.store.stop()
        self.batcher.close()


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
        self._loads = Counter("sluice_model_loads", what, ["model", "result"], registry=all_)

    def count_load(self, model: str, version: ServedVersion | None) -> None:
        """Counts a version, or an index of it, that answers now; None: one that failed."""
        self._loads.labels(model, "failed" if version is None else "served").inc()
        if version is not None:
            self._versions.labels(model).set(version.number)
            self._indexes.labels(model).set(version.index or 0)

    def render(self) -> bytes:
        """Returns the text that Prometheus reads: of all processes, where there are several."""
        if SHARED_COUNTS not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry)
