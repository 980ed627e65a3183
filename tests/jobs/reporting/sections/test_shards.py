from __future__ import annotations

from dataclasses import replace

from conf.manifest import ShardInfo, SplitInfo
from jobs.reporting.sections.shards import build_shards


def test_every_shard_with_its_checksum(finished):
    details = build_shards(finished).blocks[1]
    listed = {(row[0].text, row[4].text) for row in details.blocks[0].rows}
    wanted = {(s.path, s.crc32c) for split in finished.manifest.splits for s in split.shards}
    assert listed == wanted
    assert details.is_open


def test_very_many_shards_are_cut_and_say_so(finished):
    shards = tuple(ShardInfo(f"train/{n}", n, 10, "00000000") for n in range(1000))
    manifest = replace(finished.manifest, splits=(SplitInfo("train", shards),))
    section = build_shards(replace(finished, manifest=manifest))
    details = section.blocks[1]
    assert not details.is_open
    assert len(details.blocks[0].rows) == 200
    assert "1,000" in details.blocks[1].text
    assert "0 to 999" in [cell.text for cell in section.blocks[0].rows[0]]


def test_an_empty_split_has_a_row(finished):
    manifest = replace(finished.manifest, splits=(SplitInfo("validation", ()),))
    row = build_shards(replace(finished, manifest=manifest)).blocks[0].rows[0]
    assert [cell.text for cell in row] == ["validation", "0", "0", "0 B", "\u2013", "\u2013"]
