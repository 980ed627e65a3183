from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from jobs.reporting.blocks import Details, Note
from jobs.reporting.sections.features import build_features, fill_length_bins


def _cells(finished, split, feature):
    section = build_features(finished)
    block = next(b for b in section.blocks if b.summary.startswith(f"{split}:"))
    table = block.blocks[0]
    row = next(row for row in table.rows if row[0].text == feature)
    return {column.title: cell for column, cell in zip(table.columns, row, strict=True)}


def test_one_table_per_split_the_first_open(finished):
    blocks = build_features(finished).blocks
    assert all(isinstance(block, Details) for block in blocks)
    assert [block.is_open for block in blocks] == [True] + [False] * (len(blocks) - 1)
    assert len(blocks) == len(finished.manifest.splits)


def test_a_plain_value_has_a_range_and_an_id_has_an_oov_share(finished):
    rating = _cells(finished, "train", "rating")
    assert (rating["Min"].text, rating["Max"].text) == ("1", "5")
    assert rating["OOV"].text == "\u2013"
    user = _cells(finished, "train", "user_id")
    assert user["Min"].text == "\u2013"
    assert user["OOV"].text.endswith("%")


def test_lists_have_lengths_and_a_histogram_of_them(finished):
    history = _cells(finished, "train", "history")
    assert history["Length"].text.endswith(", up to 50")
    assert "Lengths of history" in history["Histogram"].svg
    assert "Values of rating" in _cells(finished, "train", "rating")["Histogram"].svg


def test_features_without_values_in_a_split_are_left_out(finished):
    table = build_features(finished).blocks[0].blocks[0]
    names = {row[0].text for row in table.rows}
    assert "seen" not in names
    assert "rating" in names


def test_no_statistics_no_dataset(finished):
    bare = replace(finished, manifest=replace(finished.manifest, statistics={}))
    assert build_features(bare).blocks[0].missing
    gone = replace(finished, manifest=None, gaps={"dataset": "gone"})
    assert build_features(gone).blocks == (Note("gone", missing=True),)


@given(st.lists(st.integers(0, 500), min_size=1))
def test_length_bins_have_no_gaps_and_keep_every_count(lengths):
    def low_of(length: int) -> int:
        return 0 if length == 0 else 1 << (length.bit_length() - 1)

    found = {low_of(length) for length in lengths}
    bins = [
        {"low": low, "high": max(2 * low - 1, low),
         "count": sum(low_of(length) == low for length in lengths)}
        for low in sorted(found)
    ]  # fmt: skip
    filled = fill_length_bins(bins)
    assert sum(item["count"] for item in filled) == len(lengths)
    assert filled[0]["low"] == 0
    for before, after in pairwise(filled):
        assert after["low"] == before["high"] + 1
    assert fill_length_bins([]) == []
