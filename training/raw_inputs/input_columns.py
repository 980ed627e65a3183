"""One raw input of a model: its type, what is missing or pads, and which values are refused.

Like `training.raw_inputs.raw_columns` it is shipped to executors without TensorFlow and Sluice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from training.raw_inputs.written_values import ISO, WrittenForm


@dataclass(frozen=True)
class InputColumn:
    """One raw input of a model.

    Attributes:
        name: Name of the input: the feature's, where TensorFlow allows it in a signature.
        feature: Name of the feature.
        column: Raw column that the feature was made from.
        dtype: `int64`, `float32`, `float64` or `string`.
        is_list: Whether it is `[batch, length]` rather than `[batch]`.
        length: The fixed length of a list, None where any length will do.
        max_len: Values that are read of a longer list, None for all.
        pad_token: Fills a list that is shorter than others in the batch.
        null_token: Means a missing value; None: of floats, NaN does.
        is_required: Whether each row must have a value: the feature has no pad_value.
        time_unit: Unit of the times that the feature's date is made of; None: it is no date.
        time_kind: `event` where they are the times of the log, all of them dates since 1980, `date`
            where they are others of such a log; None: the log's times count from anywhere, or are
            not known.
        written: How the source writes its column; None: values come as they are.
    """

    name: str
    feature: str
    column: str
    dtype: str
    is_list: bool
    length: int | None
    max_len: int | None
    pad_token: int | float | str | None
    null_token: int | float | str | None = None
    is_required: bool = False
    time_unit: str | None = None
    time_kind: str | None = None
    written: WrittenForm | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the input as a JSON object."""
        content = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("time_unit", "time_kind", "written") or value is not None
        }
        return content if self.written is None else {**content, "written": self.written.to_json()}

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Self:
        """Builds an input from what `export.json` says of it; what it does not know is passed."""
        known = {field.name for field in fields(cls)} - {"written"}
        written = None if item.get("written") is None else WrittenForm(**item["written"])
        return cls(**{n: value for n, value in item.items() if n in known}, written=written)

    @property
    def read_unit(self) -> str | None:
        """Unit of the times that the model reads; None: it reads no times."""
        if self.written is not None and self.written.time is not None:
            return "ms"
        return self.time_unit if self.dtype != "string" else None

    @property
    def time_form(self) -> str:
        """How the source writes the times: text of a column of numbers is read as ISO 8601."""
        return ISO if self.written is None or self.written.time is None else self.written.time


def find_padding(dtype: str, pad_token: int | float | str | None) -> int | float | bytes:
    """Returns what fills a list of an input; arguments are those of `InputColumn`."""
    padding = _encode(pad_token)
    if padding is None:
        return b"" if dtype in ("string", "bytes") else 0
    return padding


def find_missing(
    dtype: str, null_token: int | float | str | None, is_required: bool
) -> int | float | bytes | None:
    """Returns what stands for a missing value of an input; None: it must be there.

    Arguments are those of `InputColumn`.
    """
    if null_token is not None:
        return _encode(null_token)
    is_number = dtype in ("float32", "float64")
    return float("nan") if is_number and not is_required else None


def _encode(token: int | float | str | None) -> int | float | bytes | None:
    return token.encode() if isinstance(token, str) else token
