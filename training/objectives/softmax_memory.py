"""Memory that a softmax over the whole catalogue takes: said in plans, refused before training."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.models import ModelConfig, SequenceConfig
from conf.training.objectives import SoftmaxConfig
from training.distribution.tensorflow_runtime import free_memory_bytes
from training.models.sequence_rows import count_queries
from training.objectives.catalog_softmax import BLOCK_ITEMS

_LOGIT_COPIES = 3
"""The logits of a block of items, their softmax and their gradient."""
_VECTOR_COPIES = 5
"""The table, its rows of a step and their gradients, and two numbers for each of the optimizer."""


@dataclass(frozen=True)
class SoftmaxMemory:
    """What a softmax over the whole catalogue takes.

    Attributes:
        items: Items of the catalogue.
        queries: Positions that are ranked together, padding included.
        dim: Length of an item's vector.
    """

    items: int
    queries: int
    dim: int

    @property
    def logits_bytes(self) -> int:
        """Bytes of the scores of a block of items, which grow with the batch."""
        return _LOGIT_COPIES * tf.float32.size * min(self.items, BLOCK_ITEMS) * self.queries

    @property
    def vectors_bytes(self) -> int:
        """Bytes of the items' vectors with what is kept of them, which no batch makes smaller."""
        return _VECTOR_COPIES * tf.float32.size * self.items * self.dim

    def to_json(self) -> dict[str, int | None]:
        """Returns the bytes, and those that are free, as a plan shows them."""
        return {
            "logits_bytes": self.logits_bytes,
            "item_vectors_bytes": self.vectors_bytes,
            "free_bytes": free_memory_bytes(),
        }


def estimate_softmax_memory(
    config: ModelConfig, manifest: Manifest, rows: int
) -> SoftmaxMemory | None:
    """Estimates what the objective of a model takes; None: it is no softmax over the catalogue.

    Args:
        config: The model's config.
        manifest: The dataset version.
        rows: Rows that are ranked together: of a step, or of a part where gradients accumulate.
    """
    objective = getattr(config, "objective", None)
    if not isinstance(objective, SoftmaxConfig) or manifest.keys.item is None:
        return None
    items = manifest.schema[manifest.keys.item].vocabulary_size or 0
    queries = count_queries(config, manifest) if isinstance(config, SequenceConfig) else 1
    return SoftmaxMemory(int(items), rows * queries, int(getattr(config, "embedding_dim", 0)))


def require_softmax_memory(memory: SoftmaxMemory | None) -> None:
    """Refuses a softmax that the machine has no memory for, before a table is made.

    Devices with a memory of their own are not looked at: there, running out of it is an error of
    the step.

    Raises:
        ConfigError: It takes more bytes than are free.
    """
    free = free_memory_bytes()
    if memory is None or free is None or tf.config.list_physical_devices("GPU"):
        return
    needed = memory.logits_bytes + memory.vectors_bytes
    if needed <= free:
        return
    smaller = "a smaller input.batch_size, or optimizer.accumulate_steps"
    if memory.vectors_bytes > free:
        smaller = "a smaller model.embedding_dim, as the items' vectors alone do not fit"
    raise ConfigError(
        "a softmax over the whole catalogue does not fit in memory",
        received=f"{memory.queries:,} queries a step x {memory.items:,} items: "
        f"{memory.logits_bytes:,} bytes of logits, and {memory.vectors_bytes:,} bytes of vectors "
        f"of {memory.dim} numbers",
        allowed=f"{free:,} bytes, which are free",
        fix="set model.objective.kind=sampled_softmax with negatives={source: uniform, count: "
        f"1000}}, or {smaller}",
    )
