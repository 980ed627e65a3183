"""How a step is computed: compiled by XLA, in half precision."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from conf.training.base import Finite


class ComputeConfig(Finite):
    """How a step is computed; weights and optimizer state are float32 in any case."""

    xla: bool = Field(False, description="Compile loss and gradients; on one device.")
    mixed_precision: bool = Field(
        False, description="Products of matrices in half precision: float16 on GPU, bfloat16 on CPU"
    )
    half_dtype: Literal["float16", "bfloat16"] | None = Field(
        None, description="None: by device. float16 has its loss scaled."
    )
    initial_loss_scale: float = Field(32768.0, ge=1)
    loss_scale_growth_steps: int = Field(2000, ge=1, description="Finite steps until it doubles.")
