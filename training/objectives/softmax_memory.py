"""Memory that a softmax over the whole catalogue takes: said in plans, refused before training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import keras
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest, bound_list
from conf.splits import CATALOG
from conf.training.models import ModelConfig, SequenceConfig
from conf.training.objectives import SoftmaxConfig
from training.distribution.workers import free_memory_bytes
from training.models.embedded_inputs import InputFeature
from training.models.model import Model
from training.models.retrieval import RetrievalModel
from training.models.sequence import count_queries
from training.networks.tower import Dice
from training.objectives.catalog_softmax import BLOCK_ITEMS
from training.reader.feature_columns import list_length

_LOGIT_COPIES = 3
"""The logits of a block of items, their softmax and their gradient."""
_VECTOR_COPIES = 5
"""The table, its rows of a step and their gradients, and two numbers for each of the optimizer."""
_TOWER_COPIES = 2
"""What a layer of the item tower makes, kept for the backward pass, and its gradient."""
_DICE_COPIES = 3
"""Of Dice: its input normalized, its gate, and what it makes of both."""
_MASKED_SCORE_BYTES = 3 * tf.bool.size + tf.float32.size
"""Of a score of a block: the marks of its row, of its target and of both; and what they leave."""


@dataclass(frozen=True)
class SoftmaxMemory:
    """What a softmax over the whole catalogue takes.

    Attributes:
        items: Items of the catalogue.
        queries: Positions that are ranked together, padding included.
        dim: Length of an item's vector, or of its row where that is longer.
        masked_rows: Rows that are ranked together without their user's items; 0: no mask.
        tower: Numbers that the item tower makes of an item; 0: the item's row is its vector, or
            the model is not built yet.
        free: Bytes that were free before the model was built; None: not known.
    """

    items: int
    queries: int
    dim: int
    masked_rows: int = 0
    tower: int = 0
    free: int | None = field(default=None, compare=False)

    @property
    def logits_bytes(self) -> int:
        """Bytes of the scores of a block of items, which grow with the batch."""
        return _LOGIT_COPIES * tf.float32.size * min(self.items, BLOCK_ITEMS) * self.queries

    @property
    def vectors_bytes(self) -> int:
        """Bytes of the items' vectors with what is kept of them, which no batch makes smaller."""
        return _VECTOR_COPIES * tf.float32.size * self.items * self.dim

    @property
    def tower_bytes(self) -> int:
        """Bytes of what the item tower makes of all items, which no batch makes smaller."""
        return _TOWER_COPIES * tf.float32.size * self.items * self.tower

    @property
    def mask_bytes(self) -> int:
        """Bytes of which items each row leaves out, and of a block of scores without these."""
        if not self.masked_rows:
            return 0
        of_block = _MASKED_SCORE_BYTES * min(self.items, BLOCK_ITEMS) * self.queries
        return tf.bool.size * self.items * self.masked_rows + of_block

    @property
    def needed_bytes(self) -> int:
        """Bytes of all of them."""
        return self.logits_bytes + self.vectors_bytes + self.tower_bytes + self.mask_bytes

    def to_json(self) -> dict[str, int | None]:
        """Returns the bytes, and those that are free, as a plan shows them."""
        return {
            "logits_bytes": self.logits_bytes,
            "item_vectors_bytes": self.vectors_bytes,
            "item_tower_bytes": self.tower_bytes,
            "mask_bytes": self.mask_bytes,
            "free_bytes": self.free,
        }


def estimate_softmax_memory(
    config: ModelConfig, manifest: Manifest, rows: int
) -> SoftmaxMemory | None:
    """Estimates what the objective of a model takes; None: it is no softmax over the catalogue.

    The item tower is not counted yet: see `count_item_tower`.

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
    return SoftmaxMemory(
        int(items),
        rows * queries,
        int(getattr(config, "embedding_dim", 0)),
        masked_rows=rows if objective.mask == "user_items" else 0,
        free=free_memory_bytes(),
    )


def count_item_tower(memory: SoftmaxMemory, model: Model, manifest: Manifest) -> SoftmaxMemory:
    """Adds what the item tower of a model makes of the whole catalogue in a step.

    Counted are the outputs of each layer of its network, inputs among them, and the rows of each
    position of a list before it is pooled. What happens inside a layer of one's own is not seen.

    Args:
        memory: What is estimated of the model's config.
        model: The model.
        manifest: The dataset version, for the lengths of lists.
    """
    if not isinstance(model, RetrievalModel):
        return memory
    features = [
        feature
        for part in model.embedded_inputs
        for feature in part.features
        if feature.name in model.item_inputs
    ]
    keys = [feature.dim or 0 for feature in features if feature.name == manifest.keys.item]
    tower = sum(_count_positions(feature, manifest) for feature in features)
    for network in model.networks:
        if network.label == "item_tower":
            tower += _count_outputs(network.keras_model)
    return replace(memory, dim=max(memory.dim, *keys), tower=tower)


def _count_positions(feature: InputFeature, manifest: Manifest) -> int:
    """Counts the numbers of a list's positions; a list of no known length has one."""
    if not feature.spec.is_list or (feature.dim is None and not feature.pools_numbers):
        return 0
    length = list_length(bound_list(manifest, feature.spec, (CATALOG, "train")))
    return (length or 1) * (feature.dim or 1)


def _count_outputs(model: keras.Model) -> int:
    """Counts the numbers that the layers of a network make of a row."""
    return sum(
        math.prod(size or 1 for size in tensor.shape[1:])
        * (_DICE_COPIES if isinstance(operation, Dice) else 1)
        for operation in model.operations
        for node in operation._inbound_nodes  # As in `find_read_inputs`.
        for tensor in node.output_tensors
    )


def require_softmax_memory(memory: SoftmaxMemory | None) -> None:
    """Refuses a softmax that the machine has no memory for, before a step is made.

    Devices with a memory of their own are not looked at: there, running out of it is an error of
    the step.

    Raises:
        ConfigError: It takes more bytes than are free.
    """
    if memory is None or tf.config.list_physical_devices("GPU"):
        return
    free = free_memory_bytes() if memory.free is None else memory.free
    if free is None or memory.needed_bytes <= free:
        return
    raise ConfigError(
        "a softmax over the whole catalogue does not fit in memory",
        received=f"{memory.queries:,} queries a step x {memory.items:,} items: "
        f"{memory.logits_bytes:,} bytes of logits, and {memory.vectors_bytes:,} bytes of vectors "
        f"of {memory.dim} numbers{_describe_others(memory)}",
        allowed=f"{free:,} bytes, which are free",
        fix="set model.objective.kind=sampled_softmax with negatives={source: uniform, count: "
        f"1000}}, or {_advise(memory, free)}",
    )


def _describe_others(memory: SoftmaxMemory) -> str:
    tower = f", and {memory.tower_bytes:,} bytes of the item tower's layers and lists"
    mask = f", and {memory.mask_bytes:,} bytes of the mask of users' items"
    return (tower if memory.tower else "") + (mask if memory.masked_rows else "")


def _advise(memory: SoftmaxMemory, free: int) -> str:
    """Returns what else takes less; batches where a smaller one is enough."""
    if memory.vectors_bytes > free:
        return "a smaller model.embedding_dim, as the items' vectors alone do not fit"
    if memory.vectors_bytes + memory.tower_bytes > free:
        return (
            "a smaller item tower (model.item_hidden_units, model.item_features), as the items' "
            "vectors and what it makes of them do not fit"
        )
    mask = ", or model.objective.mask=none" if memory.masked_rows else ""
    return f"a smaller input.batch_size, or optimizer.accumulate_steps{mask}"
