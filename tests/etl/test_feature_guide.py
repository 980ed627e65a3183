"""The guide's config on a small log: what it makes ends in the records, users and catalogue."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from conf.etl import BuildConfig
from etl.build import build_dataset
from tests.etl.test_build import read_split

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "features.md"
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
    (block,) = GUIDE.read_text().split("```yaml\n")[1:]
    data = yaml.safe_load(block.split("```")[0])
    data |= {"data_dir": str(folder), "output": {"root": str(folder / "out"), "shards": 1}}
    data["split"] |= {"validation_from_ts": 4 * DAY, "test_from_ts": 5 * DAY}
    return build_dataset(spark, BuildConfig.model_validate(data))


def test_records_hold_the_past_of_their_event(shop):
    train = read_split(shop.version, shop.manifest, "train")
    (row,) = [
        r
        for r in train
        if r["user_id"] == 1 and r["user_views_7d"] == 1 and r["visit_position"] == 3
    ]
    # The view of 11 at 2 days + 1200 s: clicks on 10 (latest of two) and 11, all in this visit.
    assert row["clicked"] == [10, 11]
    assert row["clicked_category"] == ["shoes", "hats"]
    assert row["clicked_price"] == [6, 7]
    assert row["clicked_age"] == pytest.approx([math.log1p(1 / 6), math.log1p(1 / 3)])
    assert row["visit_items"] == [10, 11]
    assert row["price"] == 7
    assert row["item_ctr"] == pytest.approx((1 + 1) / (0 + 1 + 20))
    (test,) = read_split(shop.version, shop.manifest, "test")
    assert (test["price"], test["visit_position"], test["visit_items"]) == (6, 1, [])


def test_unmatched_events_are_counted_by_reason(shop):
    counts = shop.manifest.counts
    assert counts.dropped == {"unmatched:items": 1}
    assert counts.unmatched == {"items": {"unknown_key": 1}}
    assert counts.joined == len(LOG) - 1


def test_users_and_catalogue_stand_at_the_end_of_the_log(shop):
    users = {r["user_id"]: r for r in read_split(shop.version, shop.manifest, "users")}
    assert users[1]["clicked"] == [10, 11]
    assert users[1]["clicked_age"] == pytest.approx(
        [math.log1p(72 - 1 / 6), math.log1p(72)], rel=1e-5
    )
    assert users[1]["visit_items"] == [10]
    assert users[2]["clicked"] == [11]
    assert users[2]["visit_items"] == []
    assert users[2]["user_views_7d"] == 2
    items = {r["item_id"]: r for r in read_split(shop.version, shop.manifest, "catalog")}
    assert {item: (row["category"], row["price"]) for item, row in items.items()} == {
        10: ("shoes", 6),
        11: ("hats", 7),
    }
    assert items[10]["item_ctr"] == pytest.approx((2 + 1) / (3 + 21))
