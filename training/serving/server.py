"""What answers requests: models, batches, limits, recommendations."""

from __future__ import annotations

from typing import Any

import orjson

from training.index.item_columns import read_item_files
from training.serving.lists.recommend import Recommender
from training.serving.models.batching import Batcher, Builder
from training.serving.models.metrics import Metrics
from training.serving.models.model_store import ModelStore
from training.serving.models.served_version import Loading, ServedVersion
from training.serving.models.server_config import ServerConfig
from training.serving.requests.limits import FULL_BODIES, Budget, check_json
from training.serving.requests.tensors import (
    Arrays,
    format_predict,
    parse_json,
    parse_predict,
    read_signature_name,
)


class Server:
    """Answers requests by the models of a directory.

    Args:
        config: What is served.

    Raises:
        UpstreamNotReadyError: No model can be loaded.
        ConfigError: A model that is named is not there.
        InputDataError: A file of items or of blocked ones cannot be read.
    """

    def __init__(self, config: ServerConfig) -> None:
        limits = config.limits
        self.metrics, self.limits = Metrics(), limits
        files = read_item_files(config.recommend.items_file, config.recommend.blocked_file)
        loading = Loading(files, config.verify, config.pages)
        self.store = ModelStore(config.directory, config.poll_seconds, self.metrics, loading)
        asked = (config.recommend.retrieval, config.recommend.ranker)
        self.store.require(name for name in asked if name is not None)
        self.store.load()
        self.bodies = Budget(FULL_BODIES * limits.body_bytes, "bytes of bodies")
        self.builder = Builder()
        observe = self.metrics.batch_rows.observe
        self.batcher = Batcher(limits.calls, limits.request, observe, self.builder)
        self.recommender = Recommender(self.store, self.batcher, self.builder, config.recommend)
        self.store.check = self.recommender.check_version
        self.store.start()

    async def parse(self, body: bytes) -> dict[str, Any]:
        """Reads the JSON object of a body; a long one beside the event loop.

        Args:
            body: UTF-8.

        Raises:
            RequestError: It is none, or holds more than a request may.
        """
        return await self.builder.run(len(body), _parse, body, self.limits.request.values)

    async def predict(self, version: ServedVersion, data: dict[str, Any], size: int) -> bytes:
        """Answers `:predict`.

        Args:
            version: What answers.
            data: The request.
            size: Bytes that it came in.
        """
        signature = read_signature_name(data)
        specs, about = version.find_specs(signature), version.find_inputs(signature)
        inputs, is_row = await self.builder.run(
            size, parse_predict, data, specs, about, self.limits.request
        )
        del data  # While it waits a request holds its arrays alone.
        outputs = await self.batcher.call(version, signature, inputs)
        return await self.builder.run(_count_bytes(outputs), _encode_predict, outputs, is_row)

    async def recommend(self, data: dict[str, Any], size: int) -> bytes:
        """Answers `/v1/recommend`; arguments as those of `predict`."""
        return await self.recommender.recommend(data, size)

    def close(self) -> None:
        """Ends the look-out for new versions, and the threads."""
        self.store.stop()
        self.batcher.close()
        self.builder.close()


def encode_json(body: dict[str, Any]) -> bytes:
    """Returns the bytes of a JSON object; its arrays become lists, floats as short as they can be.

    Args:
        body: What it holds: JSON, and arrays of numbers.
    """
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _parse(body: bytes, values: int) -> dict[str, Any]:
    check_json(body, values)
    return parse_json(body)


def _count_bytes(outputs: Arrays) -> int:
    return sum(8 * value.size for value in outputs.values())


def _encode_predict(outputs: Arrays, is_row: bool) -> bytes:
    return encode_json(format_predict(outputs, is_row=is_row))
