"""Which embedding tables grow."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from conf.training.base import Finite, kind_alone

MOST_ROWS = 1 << 40
"""More than any machine has memory for, and far from where 64 bits end."""


class StaticTableConfig(Finite):
    """A row for each id of a vocabulary, from the start on."""

    kind: Literal["static"] = "static"


class DynamicTableConfig(Finite):
    """A row for each key that training meets, whatever its value; made when it is met."""

    kind: Literal["dynamic"] = "dynamic"
    features: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="Features that share the table; None: those whose table has its name.",
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        le=MOST_ROWS,
        description="Keys that get a row, at most; further ones read zeros.",
    )
    capacity: int = Field(
        65_536,
        ge=1,
        le=MOST_ROWS,
        description="Rows that memory is reserved for from the start.",
    )


TableConfig = Annotated[
    StaticTableConfig | DynamicTableConfig,
    Field(discriminator="kind"),
    kind_alone("dynamic"),
]
EmbeddingsConfig = dict[Annotated[str, Field(min_length=1)], TableConfig]
"""Tables by name: a feature's, that of what features share, or a new one that names `features`."""
