"""`sluice versions` as it is called: what it prints, what it changes, what it refuses."""

from __future__ import annotations

import json

import pytest

from conf.dataset import DatasetPaths, published_versions, resolve_version
from jobs.cli import main
from jobs.versions import print_diff
from tests.etl.versions.versions import publish


@pytest.fixture
def dataset(tmp_path) -> DatasetPaths:
    paths = DatasetPaths(tmp_path, "d")
    for name in ("v1", "v2", "v3"):
        publish(paths, name)
    return paths


def test_list_shows_versions_and_the_current_one(dataset, capsys):
    assert main(["versions", "list", str(dataset.base)]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("v1", "v2", "v3", "train 1", "* current"))
    assert main(["versions", "list", str(dataset.base), "--log-format", "json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(e["version_id"], e["is_current"], e["parent"], e["bytes"]) for e in entries] == [
        ("v1", False, None, 10), ("v2", False, "v1", 10), ("v3", True, "v2", 10),
    ]  # fmt: skip


def test_an_id_is_printed_in_one_piece_however_narrow_the_screen(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    paths = DatasetPaths(tmp_path, "d")
    ids = ["20261122T045610270269Z-9f95aa63", "20261122T045655308608Z-05754819"]
    for version_id in ids:
        publish(paths, version_id)
    assert main(["versions", "list", str(paths.base)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(version_id in line for line in lines) for version_id in ids)
    assert max(map(len, lines)) <= 80


def test_a_diff_shows_numbers_of_distinct_values_as_numbers(capsys):
    exact = {"count": 1200, "exact": True, "method": "counted"}
    about = {"count": 34000, "exact": False, "method": "HyperLogLog, 3.25 % standard error"}
    print_diff("v1", "v2", {"statistics": {"train.item": {"distinct": [exact, about]}}})
    assert "  train.item: distinct 1,200 -> about 34,000\n" in capsys.readouterr().out


def test_rollback_diff_and_gc(dataset, capsys):
    base = str(dataset.base)
    assert main(["versions", "rollback", base]) == 0
    assert resolve_version(dataset.base).name == "v2"
    assert main(["versions", "rollback", base, "--to", "v1", "--log-format", "json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"before": "v2", "current": "v1"}
    assert main(["versions", "diff", base, "v2", "v3", "--log-format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"old": "v2", "new": "v3", "diff": {}}
    assert main(["versions", "gc", base, "--keep", "1", "--dry-run"]) == 0
    assert capsys.readouterr().out == "would remove v2\n"
    assert main(["versions", "gc", base, "--keep", "1"]) == 0
    assert published_versions(dataset.base) == ["v1", "v3"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["list", "{root}"], 4, "<output.root>/<name>"),
        (["list", "{base}/versions/v1"], 2, "this is one version"),
        (["rollback", "{base}", "--to", "v9"], 2, "no such published version"),
        (["diff", "{base}", "v9"], 2, "no such version"),
        (["gc", "{base}"], 2, "--keep"),
        (["purge", "{base}"], 2, "purge"),
    ],
)
def test_mistakes_are_explained(dataset, capsys, arguments, code, text):
    given = [part.format(root=dataset.root, base=dataset.base) for part in arguments]
    assert main(["versions", *given]) == code
    assert text in capsys.readouterr().err
    assert published_versions(dataset.base) == ["v1", "v2", "v3"]
