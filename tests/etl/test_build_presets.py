"""Rows that presets and the guide's configs make of small inputs."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import yaml

from conf.etl.build import BuildConfig
from conf.etl.encodings import FeatureConfig
from conf.load import load_config
from etl.build import build_dataset, check_config
from etl.sample_data.logs import plan_clicks, write_clicks
from etl.versions.run_fingerprint import RunRequest
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


def test_the_guide_s_features_make_a_plan(tmp_path):
    (block,) = (GUIDES / "features.md").read_text().split("```yaml\n")[1:]
    data = yaml.safe_load(block.split("```")[0])
    data |= {"data_dir": str(tmp_path), "output": {"root": str(tmp_path / "out"), "shards": 1}}
    plan = check_config(BuildConfig.model_validate(data), RunRequest())
    names = {spec["name"] for spec in data["features"]}
    assert {"clicked", "session_items", "item_ctr", "price"} <= names
    assert plan.keys.user == "user_id"


def test_the_guide_s_table_of_encodings_has_every_kind_as_it_is_written():
    text = (GUIDES / "encoders.md").read_text(encoding="utf-8")
    data = {"name": "x", "column": "y", "role": "user"}
    kinds = set()
    for encoding in re.findall(r"^\| `(\{.*?\})` \|", text, re.MULTILINE):
        feature = FeatureConfig.model_validate({**data, "encoding": yaml.safe_load(encoding)})
        kinds.add(feature.encoding.kind)
    field = FeatureConfig.model_json_schema()["properties"]["encoding"]
    assert kinds == set(field["discriminator"]["mapping"])
