from __future__ import annotations

from conf.manifest import Manifest
from conf.training import InputConfig
from training.input.columns import plan_columns, select_features
from training.input.filters import build_row_filter
from training.input.pool_config import PoolConfig


def test_what_the_filter_looks_at_is_decoded_too(tiny_manifest: Manifest) -> None:
    config = InputConfig.model_validate({"filter": [{"feature": "label", "value": 1}]})
    columns = plan_columns(tiny_manifest, select_features(tiny_manifest, ["seen", "user_id"]))
    pools = PoolConfig(columns, build_row_filter(tiny_manifest, config))
    names = [feature.name for feature in pools.features]
    assert sorted(names) == ["label", "seen", "user_id"]
    assert [(column.name, names[place]) for column, place in pools.places] == [
        ("seen", "seen"),
        ("user_id", "user_id"),
    ]
    assert pools.are_dense == (False, True)
    assert pools.build_decoder() is not pools.build_decoder()  # one per thread
