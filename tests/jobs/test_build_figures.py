"""What `sluice build` shows beside the version before, and what it refuses, by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import jobs.support.spark_session
from conf.artefacts.dataset import DatasetPaths, read_manifest, resolve_version
from etl.quality.figures import Figure, Share
from jobs.cli import main
from jobs.reporting.build_summary import MANY_FEATURES, list_figure_rows, print_figures
from jobs.support.formatting import MISSING
from tests.etl.logs import build_config, write_logs

USERS, EVENTS = 12, 9


def write_ratings(logs: Path, unknown_items: int = 0, rating: int | None = None) -> None:
    """Each user's events; the first ones of each are of items that no dictionary knows."""
    lines = [
        f"{user}::{77 if k < unknown_items else 10 + (3 * user + k) % 6}"
        f"::{rating or 1 + (user + k) % 5}::{100 * user + k}"
        for user in range(1, USERS + 1)
        for k in range(EVENTS)
    ]
    (logs / "ratings.dat").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Logs, a config that keeps events without an item's entry, and a file of it."""
    folder = tmp_path_factory.mktemp("figures")
    logs = write_logs(folder / "logs")
    (logs / "users.dat").write_text("".join(f"{u}::{'FM'[u % 2]}::a\n" for u in range(1, 13)))
    joins = [{"source": "users", "column": "user"}]
    joins.append({"source": "items", "column": "item", "unmatched": "keep"})
    config = build_config(logs, folder / "datasets", joins=joins, output={
        "root": str(folder / "datasets"), "shards": 1, "eval_shards": 1,
    })  # fmt: skip
    file = folder / "build.yaml"
    file.write_text(yaml.safe_dump(config.resolved()))
    return logs, file, DatasetPaths(folder / "datasets", config.name)


@pytest.fixture
def build(spark, files, monkeypatch, capsys):
    """Runs the command in the suite's session: its exit code, and what it wrote."""
    monkeypatch.setattr(jobs.support.spark_session, "build_session", lambda *_, **__: spark)
    monkeypatch.setattr(spark, "stop", lambda: None)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["build", str(files[1]), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_figures_are_shown_beside_those_before_and_mistakes_are_refused(build, files, capsys):
    logs, _, paths = files
    write_ratings(logs)
    code, out, _ = build()
    assert code == 0
    assert "share of events matched by join items" in out
    assert "│ tags " in out
    first = resolve_version(paths.base)
    manifest = read_manifest(first)
    assert manifest.counts.matched == {"users": 108, "items": 108}
    assert manifest.vocabularies == {"user": 12, "gender": 2, "item": 6, "tags": 3}
    assert manifest.contract == ()

    # Half of the items have no entry any more: published, and warned of everywhere.
    write_ratings(logs, unknown_items=5)
    code, out, err = build("--log-format", "json")
    assert code == 0
    result = json.loads(out)
    rule = "share of events matched by join items"
    assert rule in {warning["rule"] for warning in result["warnings"]}
    logged = [json.loads(line) for line in err.splitlines()]
    warned = [entry["message"] for entry in logged if entry.get("level") == "warning"]
    assert any(
        f"{rule}: received 44.44% of 108, 100.00% in the version before" in message
        for message in warned
    )
    found = {rule["rule"]: rule for rule in read_manifest(resolve_version(paths.base)).contract}
    assert found[rule]["severity"] == "warn"
    assert not found[rule]["passed"]
    assert main(["inspect", str(paths.base), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    shown = {figure["figure"]: figure for figure in summary["figures"]}
    assert shown[rule]["share"] == pytest.approx(4 / 9)
    assert shown[rule]["share_before"] == 1.0
    assert shown[rule]["far"]
    assert shown["share of nulls of feature tags (train)"]["share"] > 0.4
    assert rule in {entry["rule"] for entry in summary["contract"]}

    # No item has an entry: refused before anything is fitted or written.
    second = paths.current.read_text()
    write_ratings(logs, unknown_items=EVENTS)
    code, out, err = build()
    assert code == 3
    assert "join items: none of 108 events has an entry (unknown_key 108)" in err
    assert "`contract: {allow: [items]}`" in err
    assert "fit encoders" not in err
    assert paths.current.read_text() == second


@pytest.mark.exhaustive
def test_a_constant_feature_and_a_label_of_one_class_are_refused_at_the_end(build, files):
    logs, _, paths = files
    write_ratings(logs)
    build()
    before = paths.current.read_text(), sorted(paths.versions.iterdir())
    write_ratings(logs, rating=5)
    code, _, err = build()
    assert code == 3
    assert "the data look wrong in 2 ways; nothing was published" in err
    assert "constant feature rating: the value 5 in all" in " ".join(err.split())
    assert "label label of one class: the value 1.0 in all" in " ".join(err.split())
    assert (paths.current.read_text(), sorted(paths.versions.iterdir())) == before
    allowed = "contract.allow=[rating, label]"
    code, out, _ = build("--set", allowed)
    assert code == 0
    assert "! 100%" in out


def figure(kind, name, now, before=None, split=None):
    return Figure(kind, name, split, now, before)


def test_rows_of_many_features_are_only_those_that_tell():
    far = figure("oov", "f3", Share(600, 1_000), Share(1, 1_000), "test")
    figures = [
        figure("joined", "users", Share(9, 10), Share(90, 100)),
        figure("tokens", "gender", 2),
        *(figure("null", f"f{n}", Share(0, 99), split="train") for n in range(MANY_FEATURES)),
        figure("null", "f7", Share(1, 4), Share(1, 4), "test"),
        far,
    ]
    whole, rows = list_figure_rows(figures)
    assert whole == [
        ("share of events matched by join users", "90.0%", "90.0%"),
        ("tokens of vocabulary gender", "2", MISSING),
    ]
    assert rows == [
        ("f3", "0%", MISSING, MISSING, "! 60.0% (0.100%)"),
        ("f7", "0%", "25.0%", MISSING, MISSING),
        (f"{MANY_FEATURES - 2} more: none", "", "", "", ""),
    ]
    _, few = list_figure_rows(figures[:5])
    assert [row[0] for row in few] == ["f0", "f1", "f2"]


def test_users_with_too_few_events_to_hold_one_out_are_counted(build, files, tmp_path):
    logs, _, _ = files
    write_ratings(logs)
    log = logs / "ratings.dat"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[: 10 * EVENTS + 2]))
    code, out, _ = build("--set", f"output.root={tmp_path}")
    assert code == 0
    row = "users with too few events to hold one out, in train alone"
    assert [line.split("│")[2].strip() for line in out.splitlines() if row in line] == ["1"]


def test_nothing_is_printed_of_a_build_that_had_nothing_to_do(capsys):
    print_figures((), Console())
    assert capsys.readouterr().out == ""
