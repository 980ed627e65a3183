from __future__ import annotations

import pytest

from conf.errors import ConfigError
from etl.tfrecord.unknown_columns import refuse_unknown


def test_all_unknown_names_are_listed_and_the_nearest_is_offered() -> None:
    refuse_unknown("no such column", [], ["price"])
    with pytest.raises(ConfigError, match=r"(?s)no such column.*prize, x.*price, day.*'price'"):
        refuse_unknown("no such column", iter(["prize", "x"]), iter(["price", "day"]))
