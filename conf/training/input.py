"""How shards become batches."""

from __future__ import annotations

from pydantic import Field

from conf.training.base import Finite


class InputConfig(Finite):
    """How shards become batches."""

    batch_size: int = Field(256, ge=1, description="Global, over all replicas.")
    shuffle_buffer: int = Field(200_000, ge=1, description="Records.")
    interleave_shards: int = Field(4, ge=1)
    parallel_parses: int | None = Field(None, ge=1, description="None: chosen by tf.data.")
