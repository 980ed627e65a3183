"""Estimated sizes: lines exactly where all are seen, records to a factor of two."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.provenance import InputFile
from etl.estimate import estimate_rows, estimate_sizes
from etl.features import plan_features


def describe(path: Path) -> InputFile:
    return InputFile("s", str(path), path.stat().st_size, 1)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 40), max_size=30), st.booleans())
def test_lines_of_small_files_are_counted(tmp_path_factory, lengths, ends):
    path = tmp_path_factory.mktemp("f") / "a"
    text = "\n".join("x" * n for n in lengths) + ("\n" if ends and lengths else "")
    path.write_text(text)
    assert estimate_rows([describe(path)]) == len(text.splitlines())


def test_lines_of_a_large_file_follow_from_its_beginning(tmp_path):
    path = tmp_path / "a"
    path.write_text("".join(f"{n % 1000:04d}\n" for n in range(100_000)))
    assert estimate_rows([describe(path)]) == 100_000
    assert estimate_rows([]) == 0


def test_records_are_estimated_to_a_factor_of_two(built):
    result, config = built
    estimate = estimate_sizes(config, plan_features(config), result.manifest.source.inputs)
    assert estimate.rows == {"ratings": 14, "users": 4, "items": 7}
    train = result.manifest.split("train")
    assert estimate.output_bytes / estimate.records == pytest.approx(
        train.bytes / train.rows, rel=1
    )
    assert estimate.shards == config.output.shards
