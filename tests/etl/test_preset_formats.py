"""Presets of libfm text and of click sequences on small inputs: records hold what lines say."""

from __future__ import annotations

from collections import Counter

from conf.etl import BuildConfig
from conf.load import load_config
from etl.build import build_dataset
from etl.samples.clicks import ClickSampleConfig, write_clicks
from tests.etl.reading import read_sparse, read_split


def test_libfm_lines_become_rows_of_a_sparse_tensor(spark, tmp_path):
    lines = [f"{'1' if i % 3 == 0 else '-1'} {i}:1 {100 + i % 7}:0.5" for i in range(60)]
    for name, own in (("train.x", lines), ("validation", lines[:9]), ("test", lines[30:])):
        (tmp_path / f"frappe.{name}.libfm").write_text("\n".join(own) + "\n")
    overrides = [f"data_dir={tmp_path}", f"output.root={tmp_path / 'out'}", "output.shards=1"]
    result = build_dataset(spark, load_config(BuildConfig, "etl", "frappe", overrides))
    assert dict(result.manifest.counts.kept) == {"train": 60, "validation": 9, "test": 30}
    assert Counter(read_sparse(result, "test", label="used")) == Counter(
        (float(i % 3 == 0), ((i + 2, 1.0), (102 + i % 7, 0.5))) for i in range(30, 60)
    )


def test_click_sequences_become_aligned_lists_latest_first(spark, tmp_path):
    write_clicks(ClickSampleConfig(sessions=400, videos=60, dirty=0.01), tmp_path / "log")
    overrides = [f"data_dir={tmp_path / 'log'}", f"output.root={tmp_path / 'out'}"]
    overrides += ["output.shards=1", "output.eval_shards=1"]
    result = build_dataset(spark, load_config(BuildConfig, "etl", "clicks", overrides))
    counts = result.manifest.counts
    assert counts.quarantined["sessions"] == {
        "malformed_entry:clicks": 2,
        "missing_value:clicks": 1,
        "empty_entry:clicks": 1,
    }
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


def split_click(click: str) -> tuple[int, int]:
    video, _, column = click.partition("_")
    return int(video), int(column or 0)
