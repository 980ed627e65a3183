from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jobs.inspection.sizes import RecordSizes


@given(st.lists(st.lists(st.integers(0, 2**31 - 1))))
def test_every_record_is_in_the_bin_that_holds_its_length(blocks):
    sizes = RecordSizes()
    for block in blocks:
        sizes.update(np.array(block, np.int64))
    lengths = [length for block in blocks for length in block]
    found = sizes.to_json()
    assert sizes.records == len(lengths)
    assert found["shortest"] == min(lengths, default=None)
    assert found["longest"] == max(lengths, default=None)
    for bin_ in found["bins"]:
        assert bin_["records"] == sum(bin_["from"] <= n <= bin_["to"] for n in lengths)
    assert sum(bin_["records"] for bin_ in found["bins"]) == len(lengths)
