"""Sample data: generated logs, what they are drawn from, and archives that are fetched whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest

from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from etl.sample_data import archive
from etl.sample_data.archive import fetch_archive, replace_directory
from etl.sample_data.logs import (
    draw_chunks,
    plan_clicks,
    write_clicks,
    write_sample,
)
from etl.sample_data.ratings import (
    DirtRates,
    plan_sample,
)
from tests.etl.sample_data.helpers import (
    FILES,
    Script,
    classify,
    hit_rate,
    leave_last_out,
    make_zip,
    read_lines,
    serve,
)

SMALL = replace(plan_sample(6_000, dirt=DirtRates(0.01, 0.02, 0.013)), rows_per_chunk=1_000)


def read_all(out):
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_the_config_alone_decides_the_bytes_of_every_file(tmp_path):
    for name, seed in (("one", 7), ("same", 7), ("other", 8)):
        config, seen = replace(SMALL, seed=seed), []
        write_sample(config, tmp_path / name, on_ratings=seen.append)
        write_clicks(plan_clicks(3_000, 200, seed=seed), tmp_path / f"{name}-clicks")
        assert seen == [len(chunk.rows) for chunk in draw_chunks(config)]
        assert sum(seen) == SMALL.ratings
    for kind, count in (("", 4), ("-clicks", 2)):
        one, same, other = (read_all(tmp_path / f"{n}{kind}") for n in ("one", "same", "other"))
        assert one == same
        assert len(one) == count
        assert all(one[name] != other[name] for name in one)


@pytest.mark.parametrize("rates", [(0.01, 0.02, 0.013), (0, 0, 0), (0.5, 0.5, 0.5)])
def test_card_counts_every_line_of_dirt_exactly(tmp_path, rates):
    card = write_sample(replace(SMALL, dirt=DirtRates(*rates)), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "SAMPLE.json").read_text()) == card
    valid, counts = classify(tmp_path / "out")
    ratings = card["ratings"]
    assert len(valid) == len({row[:2] for row in valid}) == ratings["valid"] == 6_000
    told = {**ratings["malformed"], **ratings["unknown"], "duplicate": ratings["duplicate"]}
    assert {kind: counts[kind] for kind in told} == told
    of_kinds = [sum(ratings["malformed"].values()), ratings["duplicate"]]
    assert [*of_kinds, sum(ratings["unknown"].values())] == [round(6_000 * rate) for rate in rates]
    files = ("users.dat", "movies.dat", "ratings.dat")
    assert card["lines"] == {name: len(read_lines(tmp_path / "out" / name)) for name in files}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("samples") / "demo"
    return write_sample(plan_sample(), out), classify(out)[0]


def test_taste_can_be_learnt_and_beats_popularity(demo):
    card, rows = demo
    assert (len(rows), card["config"]["users"]) == (100_000, 1_500)
    train, target = leave_last_out(rows)
    popularity = np.broadcast_to(train.sum(axis=0), train.shape)
    together = train.T @ train
    norm = np.sqrt(np.outer(np.diag(together), np.diag(together))) + 1e-9
    similarity = together / norm - np.eye(len(together)) * (np.diag(together) / np.diag(norm))
    by_popularity = hit_rate(popularity, train, target)
    by_neighbours = hit_rate(train @ similarity, train, target)
    noise = np.random.default_rng(0).random(train.shape)
    assert 0.02 < by_popularity < 0.12
    assert by_neighbours > 2.5 * by_popularity
    assert hit_rate(noise, train, target) < by_popularity  # untrained must not look trained


CLICKS_SMALL = plan_clicks(sessions=3_000, videos=200, dirty=0.01)
# The grammar as it is documented, read without Sluice's code.
CLICK = r"[1-9]\d*(?:_[1-9]\d*)?"
SESSION = re.compile(rf"{CLICK}(?: {CLICK})*\t{CLICK}")


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    out = tmp_path_factory.mktemp("clicks") / "out"
    card = write_clicks(CLICKS_SMALL, out)
    assert json.loads((out / "SAMPLE.json").read_text()) == card
    return card, (out / "clicks.tsv").read_text().splitlines()


def test_card_counts_what_follows_the_grammar_and_what_does_not(lines):
    card, rows = lines
    bad = [row for row in rows if not SESSION.fullmatch(row)]
    assert len(rows) - len(bad) == card["sessions"]["valid"] == 3_000
    assert card["sessions"]["malformed"] == {
        "malformed_entry": sum("__" in row for row in bad),
        "missing_value": sum(row.startswith("_") for row in bad),
        "empty_entry": sum(row.startswith(" ") for row in bad),
    }
    assert len(bad) == card["lines"]["clicks.tsv"] - 3_000 == 30


def test_clicks_stand_in_columns_and_outside_of_them(lines):
    rows = [row for row in lines[1] if SESSION.fullmatch(row)]
    clicks = [click for row in rows for click in re.split(r"[ \t]", row)]
    inside = np.mean(["_" in click for click in clicks])
    assert len(clicks) == 3_000 * 8
    assert inside == pytest.approx(0.75, abs=0.01)
    # Mostly a video's own column: what came before tells where the next click is.
    columns: dict[str, list[str]] = {}
    for click in clicks:
        video, _, column = click.partition("_")
        if column:
            columns.setdefault(video, []).append(column)
    often = [max(map(own.count, set(own))) / len(own) for own in columns.values() if len(own) > 50]
    assert 0.75 < np.mean(often) < 0.95


def listed(folder):
    """What is in a folder, the files that processes lock aside."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))


def publish(out, text="new", *, overwrite=False):
    with replace_directory(out, "CARD", overwrite=overwrite) as staging:
        (staging / "CARD").write_text(text)


def test_replaces_only_on_request_and_only_its_own_kind(tmp_path):
    out, file, link = tmp_path / "out", tmp_path / "file", tmp_path / "link"
    out.mkdir()  # An empty folder is nobody's.
    publish(out, "old")
    file.write_text("x")
    link.symlink_to(out)
    for target, overwrite in ((out, False), (file, True), (link, True)):
        with pytest.raises(ConfigError):
            publish(target, overwrite=overwrite)
    assert (out / "CARD").read_text() == "old"
    publish(out, overwrite=True)
    assert (out / "CARD").read_text() == "new"
    (out / "CARD").rename(out / "thesis.txt")
    with pytest.raises(ConfigError):
        publish(out, overwrite=True)
    assert listed(tmp_path) == ["file", "link", "out"]
    assert (out / "thesis.txt").exists()


def fetch(script, out, monkeypatch, *, published=None):
    sha256 = hashlib.sha256(published or script.body).hexdigest()
    monkeypatch.setitem(archive.ARCHIVES, "ml-x", sha256)
    with serve(script):
        fetch_archive("ml-x", out, script.base_url, overwrite=True)


def test_downloads_again_verifies_and_strips_the_top_folder(tmp_path, monkeypatch):
    script = Script(make_zip(), failures=[503])
    fetch(script, tmp_path / "out", monkeypatch)
    assert script.asked == ["/sets/ml-x.zip"] * 2
    assert sorted(os.listdir(tmp_path / "out")) == ["DOWNLOAD.json", "README", "users.dat"]
    assert (tmp_path / "out" / "README").read_bytes() == FILES["ml-x/README"]
    card = json.loads((tmp_path / "out" / "DOWNLOAD.json").read_text())
    assert card["sha256"] == hashlib.sha256(script.body).hexdigest()
    assert card["files"] == {"README": {"bytes": 10}, "users.dat": {"bytes": 19}}


def test_a_download_stops_above_its_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "_MOST_BYTES", 10_000)
    script = Script(b"x" * 20_000, stated_length=1 << 40)
    with pytest.raises(InputDataError, match="10,000 bytes"):
        fetch(script, tmp_path / "out", monkeypatch)
    assert len(script.asked) == 1
    assert listed(tmp_path) == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"body": b"other"}, InputDataError),
        ({"failures": [404]}, UpstreamNotReadyError),
        ({"stated_length": 10_000}, UpstreamNotReadyError),
    ],
)
def test_a_refused_download_leaves_the_earlier_one(tmp_path, monkeypatch, answer, error):
    monkeypatch.setattr(archive, "_RETRIES", 0)
    fetch(Script(make_zip()), tmp_path / "out", monkeypatch)
    with pytest.raises(error):
        fetch(Script(**{"body": make_zip(), **answer}), tmp_path / "out", monkeypatch,
              published=make_zip())  # fmt: skip
    assert (tmp_path / "out" / "users.dat").read_bytes() == FILES["ml-x/users.dat"]
    assert listed(tmp_path) == ["out"]
