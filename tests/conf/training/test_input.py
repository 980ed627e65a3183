"""What training does about damage, as the config has it."""

from __future__ import annotations

import pytest

from conf.training import InputConfig


@pytest.mark.parametrize(
    ("policy", "found_bytes", "split", "expected"),
    [
        ("fail", None, "train", False),
        ("fail", 9, "train", False),
        ("skip_record", None, "train", False),  # no record of it is there
        ("skip_record", 9, "train", True),
        ("skip_record", 11, "train", False),  # another file
        ("skip_shard", None, "train", True),
        ("skip_shard", 9, "train", True),
        ("skip_shard", 11, "train", True),
        ("skip_shard", None, "test", False),  # what a model is measured on has to be whole
        ("skip_record", 9, "catalog", False),
    ],
)
def test_which_shards_training_does_without(policy, found_bytes, split, expected) -> None:
    config = InputConfig(on_corrupt=policy)
    assert config.passes_over(split, found_bytes, 10) is expected
