"""Memory that a softmax over the whole catalogue takes: one sum of bytes, compared once.

No TensorFlow is imported: a plan says the bytes before anything is built.
"""

from __future__ import annotations

from conf.manifest import Manifest, bound_list
from conf.training.models import ModelConfig, SequenceConfig
from conf.training.objectives import SoftmaxConfig
from training.reader.feature_columns import list_length

BLOCK_ITEMS = 2048
"""Items whose scores are held at a time."""


def count_softmax_bytes(config: ModelConfig, manifest: Manifest, rows: int) -> int | None:
    """Returns what the loss of `rows` rows takes; None: it is no softmax over the catalogue.

    float32: of a block of items the scores, their softmax and its gradient, with a mask two more;
    of each item five vectors (the row in the table, in the step and in the gradient, and two slots
    of the optimizer) and each hidden unit of its tower with the gradient. A byte for each mark.
    """
    objective = getattr(config, "objective", None)
    if not isinstance(objective, SoftmaxConfig) or manifest.keys.item is None:
        return None
    items = int(manifest.schema[manifest.keys.item].vocabulary_size or 0)
    is_masked = objective.mask == "user_items"
    scores = (5 if is_masked else 3) * min(items, BLOCK_ITEMS) * rows * _queries(config, manifest)
    units = sum(getattr(config, "item_hidden_units", None) or ())
    vectors = items * (5 * int(getattr(config, "embedding_dim", 0)) + 2 * units)
    return 4 * (scores + vectors) + (items * rows if is_masked else 0)


def _queries(config: ModelConfig, manifest: Manifest) -> int:
    """Positions of a row that are trained, padding included."""
    if not isinstance(config, SequenceConfig) or not getattr(config, "every_position", False):
        return 1
    name = config.sequence[0] if config.sequence else manifest.find_history()
    if name is None or name not in manifest.schema:
        return 1  # The model refuses it.
    return list_length(bound_list(manifest, manifest.schema[name])) or 1
