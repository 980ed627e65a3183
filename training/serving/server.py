"""What answers requests: models, batches, limits, recommendations."""

from __future__ import annotations

from collections.abc import Awaitable

from training.index.item_columns import read_item_files
from training.serving.lists.recommend import ListModels, Recommender
from training.serving.models.batching import Batcher, Steps, plan_call
from training.serving.models.metrics import Metrics
from training.serving.models.model_store import ModelStore
from training.serving.models.served_version import Loading, ServedVersion
from training.serving.models.server_config import ServerConfig
from training.serving.requests.tensors import (
    encode_json,
    format_predict,
    parse_json,
    parse_predict,
    read_signature_name,
)


class Server:
    """Answers requests by the models of a directory."""

    def __init__(self, config: ServerConfig) -> None:
        limits = config.limits
        self.metrics, self.limits = Metrics(), limits
        files = read_item_files(config.recommend.items_file, config.recommend.blocked_file)
        loading = Loading(files, config.verify, config.pages)
        self.store = ModelStore(config.directory, config.poll_seconds, self.metrics, loading)
        self.store.load()
        models = ListModels(self.store, config.recommend)
        self.recommender = Recommender(models, limits.request)
        self.store.check = models.check_version
        self.store.start()
        self.batcher = Batcher(limits, self.metrics.batch_rows.observe)

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
