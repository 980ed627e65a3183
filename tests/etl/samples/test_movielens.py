import json
import os
from dataclasses import replace

import numpy as np
import pytest

from conf.errors import ConfigError
from etl.samples import movielens
from etl.samples.config import DirtRates, SampleConfig
from etl.samples.movielens import plan_chunks, write_sample
from tests.etl.samples.logs import classify, hit_rate, leave_last_out, read_ids, read_lines

SMALL = SampleConfig(ratings=6_000, rows_per_chunk=1_000, dirt=DirtRates(0.01, 0.02, 0.013))


def read_all(out):
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("samples") / "demo"
    card = write_sample(SampleConfig(), out, workers=1)
    rows, counts = classify(
        read_lines(out / "ratings.dat"), read_ids(out / "users.dat"), read_ids(out / "movies.dat")
    )
    return card, rows, counts


def test_bytes_do_not_depend_on_the_number_of_workers(tmp_path):
    write_sample(SMALL, tmp_path / "one", workers=1)
    write_sample(SMALL, tmp_path / "three", workers=3)
    one, three = read_all(tmp_path / "one"), read_all(tmp_path / "three")
    assert set(one) == {"users.dat", "movies.dat", "ratings.dat", "SAMPLE.json"}
    assert one == three


def test_seed_changes_every_file(tmp_path):
    write_sample(SMALL, tmp_path / "a", workers=1)
    write_sample(replace(SMALL, seed=8), tmp_path / "b", workers=1)
    a, b = read_all(tmp_path / "a"), read_all(tmp_path / "b")
    assert all(a[name] != b[name] for name in a)


def test_card_counts_every_line_of_dirt_exactly(tmp_path):
    card = write_sample(SMALL, tmp_path / "out", workers=1)
    assert json.loads((tmp_path / "out" / "SAMPLE.json").read_text()) == card
    lines = read_lines(tmp_path / "out" / "ratings.dat")
    users, movies = (
        read_ids(tmp_path / "out" / "users.dat"),
        read_ids(tmp_path / "out" / "movies.dat"),
    )
    valid, counts = classify(lines, users, movies)
    assert len(valid) == len({row[:2] for row in valid}) == card["ratings"]["valid"] == 6_000
    assert counts == {
        **card["ratings"]["malformed"],
        **card["ratings"]["unknown"],
        "duplicate": card["ratings"]["duplicate"],
    }
    assert sum(counts.values()) == 60 + 120 + 78
    assert card["lines"] == {
        "users.dat": len(users),
        "movies.dat": len(movies),
        "ratings.dat": len(lines),
    }


def test_default_sample_meets_the_stated_size_and_rates(demo):
    card, rows, counts = demo
    assert len(rows) == 100_000
    assert len({row[0] for row in rows}) == 1_500
    assert counts["duplicate"] == 200
    assert counts["unknown_movie"] + counts["unknown_user"] == 200
    assert sum(counts.values()) == 500
    assert card["config"]["users"] == 1_500


def test_taste_can_be_learnt_and_beats_popularity(demo):
    train, target = leave_last_out(demo[1])
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


def test_recent_events_tell_more_than_old_ones(demo):
    rows = sorted(demo[1], key=lambda row: (row[0], row[3]))
    train, target = leave_last_out(demo[1])
    movies = {movie: i for i, movie in enumerate(np.unique([row[1] for row in rows]).tolist())}
    history: dict[int, list[int]] = {}
    for user, movie, _, _ in rows:
        history.setdefault(user, []).append(movies[movie])
    together = train.T @ train
    similarity = together / (np.sqrt(np.outer(*[np.diag(together)] * 2)) + 1e-9)

    def score(pick):
        used = np.zeros_like(train)
        for index, events in enumerate(history.values()):
            used[index, pick(events[:-1])] = 1.0
        return hit_rate(used @ similarity, train, target)

    assert score(lambda events: events[-8:]) > 1.5 * score(lambda events: events[:8])


def test_chunks_cover_every_user_once():
    chunks = plan_chunks(SMALL)
    assert len(chunks) > 3
    assert [u for c in chunks for u in c.users] == list(range(SMALL.size.users))
    assert sum(c.rows for c in chunks) == SMALL.ratings
    assert all(c.rows_before == sum(b.rows for b in chunks[: c.index]) for c in chunks)


def test_large_samples_come_in_parts_with_the_same_lines(tmp_path, monkeypatch):
    write_sample(SMALL, tmp_path / "single", workers=1)
    monkeypatch.setattr(movielens, "MAX_SINGLE_FILE_RATINGS", 5_000)
    write_sample(SMALL, tmp_path / "parts", workers=1)
    parts = sorted(p.name for p in (tmp_path / "parts" / "ratings.dat").iterdir())
    assert parts == [f"part-{i:05d}" for i in range(len(plan_chunks(SMALL)))]
    assert read_lines(tmp_path / "parts" / "ratings.dat") == read_lines(
        tmp_path / "single" / "ratings.dat"
    )


def test_progress_ends_at_all_ratings(tmp_path):
    seen: list[int] = []
    write_sample(SMALL, tmp_path / "out", workers=1, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == SMALL.ratings


def test_a_failing_chunk_leaves_the_earlier_sample(tmp_path, monkeypatch):
    write_sample(SMALL, tmp_path / "out", workers=1)
    before = read_all(tmp_path / "out")

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(movielens, "draw_events", fail)
    with pytest.raises(MemoryError):
        write_sample(replace(SMALL, seed=8), tmp_path / "out", workers=1, overwrite=True)
    assert read_all(tmp_path / "out") == before
    assert os.listdir(tmp_path) == ["out"]


def test_refuses_no_workers(tmp_path):
    with pytest.raises(ConfigError, match="workers"):
        write_sample(SMALL, tmp_path / "out", workers=0)
