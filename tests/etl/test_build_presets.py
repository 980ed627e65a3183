"""Rows that presets and the guide's configs make of small inputs."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from conf.etl.build import BuildConfig
from conf.etl.encodings import FeatureConfig
from conf.load import load_config
from etl.build import build_dataset
from etl.sample_data.logs import plan_clicks, write_clicks
from tests.etl.built_versions import read_split


def test_click_sequences_become_aligned_lists_latest_first(spark, tmp_path):
    write_clicks(plan_clicks(sessions=400, videos=60, dirty=0.01), tmp_path / "log")
    overrides = [f"data_dir={tmp_path / 'log'}", f"output.root={tmp_path / 'out'}"]
    overrides += ["output.shards=1", "output.eval_shards=1"]
    result = build_dataset(spark, load_config(BuildConfig, "etl", "clicks", overrides))
    counts = result.manifest.counts
    assert counts.quarantined["sessions"] == {
        "malformed_entry:clicks": 2,
        "missing_value:clicks": 1,
        "empty_entry:clicks": 1,
    }

    def split_click(click: str) -> tuple[int, int]:
        video, _, column = click.partition("_")
        return int(video), int(column or 0)

    expected = []
    for line in (tmp_path / "log" / "clicks.tsv").read_text().splitlines():
        if "__" in line or line[0] in "_ ":
            continue
        clicks, target = line.split("\t")
        pairs = [split_click(click) for click in clicks.split(" ")]
        expected.append((tuple(reversed(pairs))[:20], split_click(target)))
    found = []
    for split in ("train", "validation", "test"):
        for row in read_split(result.version, result.manifest, split):
            if row["label"] == 1:
                pairs = tuple(zip(row["clicks"], row["click_columns"], strict=True))
                found.append((pairs, (row["video"], row["column"])))
    known = {video for pairs, (video, _) in found for video in (video, *(v for v, _ in pairs))}
    assert Counter(found) == Counter(
        (tuple((v if v in known else "OOV", c) for v, c in pairs), (target, column))
        for pairs, (target, column) in expected
    )
    assert counts.kept["train"] == counts.drawn["train"] * 5 // 4


GUIDES = Path(__file__).parents[2] / "docs" / "guide"
DAY = 86_400
LOG = [
    (1, 10, "view", 0),
    (1, 10, "click", 60),
    (2, 10, "view", 90),
    (1, 11, "click", 2 * DAY),
    (1, 10, "click", 2 * DAY + 600),
    (1, 11, "view", 2 * DAY + 1200),
    (2, 11, "view", 3 * DAY),
    (2, 12, "view", 3 * DAY),  # not in the dictionary
    (2, 11, "click", 4 * DAY),
    (1, 10, "view", 5 * DAY),
]
ITEMS = [(10, "shoes"), (11, "hats"), (11 + 88, "socks")]
PRICES = [
    # item, from, to, entered at, price
    (10, -1, DAY, -1, 5),
    (10, DAY, "", DAY, 6),
    (10, 0, "", 4 * DAY, 99),  # a late correction of what has long been replaced
    (11, -1, "", -1, 7),
    (11, 6 * DAY, "", -1, 8),  # a price of the future
]


@pytest.fixture(scope="module")
def shop(spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    for name, rows in (("log", LOG), ("items", ITEMS), ("prices", PRICES)):
        lines = ["\t".join(map(str, row)) for row in rows]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    (block,) = (GUIDES / "features.md").read_text().split("```yaml\n")[1:]
    data = yaml.safe_load(block.split("```")[0])
    data |= {"data_dir": str(folder), "output": {"root": str(folder / "out"), "shards": 1}}
    data["split"] |= {"validation": 4 * DAY, "test": 5 * DAY}
    return build_dataset(spark, BuildConfig.model_validate(data))


@pytest.mark.exhaustive
def test_records_hold_the_past_of_their_event(shop):
    train = read_split(shop.version, shop.manifest, "train")
    wanted = {"user_id": 1, "user_views_7d": 1, "session_position": 3}
    (row,) = [row for row in train if row.items() >= wanted.items()]
    # The view of 11 at 2 days + 1200 s: clicks on 10 (latest of two) and 11, all in this visit.
    assert row["clicked"] == [10, 11]
    assert row["clicked_category"] == ["shoes", "hats"]
    assert row["clicked_price"] == [6, 7]
    assert row["clicked_age"] == pytest.approx([1 / 6, 1 / 3])
    assert row["session_items"] == [10, 11]
    assert row["price"] == 7
    assert row["item_ctr"] == pytest.approx((1 + 1) / (0 + 1 + 20))
    (test,) = read_split(shop.version, shop.manifest, "test")
    assert (test["price"], test["session_position"], test["session_items"]) == (6, 1, [])
    assert shop.manifest.counts.dropped == {"unmatched:items": 1}
    assert shop.manifest.counts.unmatched == {"items": {"unknown_key": 1}}


@pytest.mark.exhaustive
def test_users_and_catalogue_stand_at_the_end_of_the_log(shop):
    users = {r["user_id"]: r for r in read_split(shop.version, shop.manifest, "users")}
    assert users[1]["clicked"] == [10, 11]
    assert users[1]["clicked_age"] == pytest.approx([72 - 1 / 6, 72], rel=1e-5)
    assert users[1]["session_items"] == [10]
    assert users[2]["clicked"] == [11]
    assert users[2]["session_items"] == []
    assert users[2]["user_views_7d"] == 2
    items = {r["item_id"]: r for r in read_split(shop.version, shop.manifest, "catalog")}
    assert {item: (row["category"], row["price"]) for item, row in items.items()} == {
        10: ("shoes", 6),
        11: ("hats", 7),
    }
    assert items[10]["item_ctr"] == pytest.approx((2 + 1) / (3 + 21))


def test_the_guide_s_table_of_encodings_has_every_kind_as_it_is_written():
    text = (GUIDES / "encoders.md").read_text(encoding="utf-8")
    data = {"name": "x", "column": "y", "role": "user"}
    kinds = set()
    for encoding in re.findall(r"^\| `(\{.*?\})` \|", text, re.MULTILINE):
        feature = FeatureConfig.model_validate({**data, "encoding": yaml.safe_load(encoding)})
        kinds.add(feature.encoding.kind)
    field = FeatureConfig.model_json_schema()["properties"]["encoding"]
    assert kinds == set(field["discriminator"]["mapping"])
