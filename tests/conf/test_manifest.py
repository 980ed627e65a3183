"""Manifests that somebody has edited: refused when they are opened, and never waited for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.artefacts.encoder_files import read_plan_file
from conf.artefacts.run import read_json
from conf.errors import InputDataError
from conf.manifest import MANIFEST_FILE, Manifest
from tests.training.tiny_dataset import write_tiny_dataset
from training.checkpoint.checkpoint_files import read_checkpoint

Change = Callable[[dict[str, Any]], None]


def first_shard(data: dict[str, Any]) -> dict[str, Any]:
    return data["splits"][0]["shards"][0]


def set_shard(**values: Any) -> Change:
    return lambda data: first_shard(data).update(values)


def list_twice(data: dict[str, Any]) -> None:
    data["splits"][0]["shards"].append(dict(first_shard(data)))


def set_longest(value: Any) -> Change:
    found = {"train": {"history": {"length": {"min": 0, "max": value}}}}
    return lambda data: data.update(statistics=found)


def list_by_another_name(data: dict[str, Any]) -> None:
    shard = first_shard(data)
    other = shard["path"].replace("/", "/./")
    data["splits"][0]["shards"].append({**shard, "path": other})


CHANGES: dict[str, tuple[Change, str]] = {
    "more rows than bytes": (set_shard(rows=10**15), "a record takes 16 bytes"),
    "rows below 0": (set_shard(rows=-1), "a whole number from 0 on"),
    "rows that are true": (set_shard(rows=True), "a whole number from 0 on"),
    "no checksum": (set_shard(crc32c="xyz"), "8 hexadecimal digits"),
    "a path that is none": (set_shard(path=["a"]), "text"),
    "a shard listed twice": (list_twice, "each file once"),
    "a shard by two names": (list_by_another_name, "a file's path"),
    "a size beyond int64": (set_shard(bytes=10**4000), "a whole number from 0 on"),
    "a list longer than a shard": (set_longest(10**12), "history.length.max"),
    "lengths that are none": (lambda data: data["statistics"].update(train=[]), "is not complete"),
    "a split named twice": (lambda data: data["splits"].append(data["splits"][0]), "each once"),
    "a name of another type": (lambda data: data.update(dataset_name=7), "text"),
    "a list for counts": (lambda data: data["counts"].update(read=[1]), "by name"),
    "an unknown key": (lambda data: data.update(surprise=1), "surprise"),
    "splits that are none": (lambda data: data.update(splits=7), "is not complete"),
    "a later format": (lambda data: data.update(format_version=99), "format"),
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return (write_tiny_dataset(tmp_path_factory.mktemp("datasets")) / MANIFEST_FILE).read_text()


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_that_cannot_be_true_is_named(text: str, name: str) -> None:
    change, said = CHANGES[name]
    data = json.loads(text)
    change(data)
    with pytest.raises(InputDataError) as caught:
        Manifest.loads(json.dumps(data), "a/manifest.json")
    assert said in str(caught.value)
    assert "a/manifest.json" in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "{", "\x00"])
def test_what_json_cannot_read_is_input_that_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputDataError, match=r"a/manifest\.json is not valid JSON"):
        Manifest.loads(text, "a/manifest.json")
    for name in ("export.json", "encoders.json", "checkpoint.json"):
        (tmp_path / name).write_text(text)
    for read in (lambda _: read_json(tmp_path / "export.json"), read_plan_file, read_checkpoint):
        with pytest.raises(InputDataError):
            read(tmp_path)


def test_a_shard_holds_as_much_as_it_has_room_for(text: str) -> None:
    data = json.loads(text)
    rows = first_shard(data)["bytes"] * 1032 // 16
    data["compression"] = "gzip"
    first_shard(data)["rows"] = rows
    assert Manifest.loads(json.dumps(data)).splits[0].shards[0].rows == rows
    first_shard(data)["rows"] = rows + 1
    with pytest.raises(InputDataError, match="at most"):
        Manifest.loads(json.dumps(data))
    data = json.loads(text)
    most = max(one["bytes"] for split in data["splits"] for one in split["shards"])
    set_longest(most)(data)
    assert Manifest.loads(json.dumps(data)).statistics["train"]["history"]["length"]["max"] == most
    set_longest(most + 1)(data)
    with pytest.raises(InputDataError, match=f"from 0 to {most:,}, or null"):
        Manifest.loads(json.dumps(data))
    set_longest(None)(data)
    assert Manifest.loads(json.dumps(data)).statistics


def test_feature_lists_are_those_that_were_found_else_those_of_the_config(text: str) -> None:
    tiny_manifest = Manifest.loads(text)
    assert tiny_manifest.find_feature_lists() == frozenset()
    sequences = replace(tiny_manifest, record_type="SequenceExample")
    assert sequences.find_feature_lists() == {"history", "genres", "seen"}
    source = replace(sequences.source, config={"output": {"feature_lists": ["history"]}})
    configured = replace(sequences, source=source)
    assert configured.find_feature_lists() == {"history"}
    assert "feature_lists" not in configured.to_json()
    read = Manifest.loads(replace(configured, feature_lists=()).dumps())
    assert read.find_feature_lists() == set()
