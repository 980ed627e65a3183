"""Generated logs: MovieLens-like ratings and click sequences."""

import itertools
import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import ConfigError
from etl.sample_data.clicks import plan_clicks, write_clicks
from etl.sample_data.config import DirtRates, SampleConfig
from etl.sample_data.movielens import (
    DirtShare,
    SampleChunk,
    format_ratings,
    plan_chunks,
    share_dirt,
    write_sample,
)
from etl.sample_data.ratings import RatingEvents, build_catalogue
from tests.etl.sample_data.helpers import classify, hit_rate, leave_last_out, read_ids, read_lines


def test_size_scales_with_ratings():
    assert SampleConfig(ratings=100_000).size == (100_000, 1_500, 800)
    small, large = SampleConfig(ratings=100_000).size, SampleConfig(ratings=100_000_000).size
    assert large.ratings / large.users > small.ratings / small.users
    assert large.ratings / large.movies > small.ratings / small.movies
    assert 100_000 < large.users < 1_000_000


@pytest.mark.parametrize(("ratings", "users", "movies"), [(1_000, 900, None), (100_000, 10, 50)])
def test_refuses_ratings_that_users_and_movies_cannot_hold(ratings, users, movies):
    with pytest.raises(ConfigError):
        SampleConfig(ratings, users, movies)


USERS = set(range(1, 11))


def dirty_config(*rates: float) -> SampleConfig:
    return SampleConfig(ratings=200, users=10, movies=50, seed=1, dirt=DirtRates(*rates))


def mix_dirt(config: SampleConfig) -> str:
    """The lines of 200 ratings by ten users, with all of the sample's dirt."""
    chunk = SampleChunk(0, range(10), range(200))
    return format_ratings(make_events(), config, chunk).decode("latin-1")


def flat_counts(share: DirtShare) -> dict[str, int]:
    counts = share.count_kinds()
    return {**counts["malformed"], **counts["unknown"], "duplicate": counts["duplicate"]}


def make_events(rows: int = 200) -> RatingEvents:
    user = np.repeat(np.arange(1, 11), rows // 10)
    movie = np.tile(np.arange(1, 21), 10)
    stamps = 956_703_932 + np.random.default_rng(0).integers(10**8, size=rows)
    return RatingEvents(user, movie, movie % 5 + 1, stamps)


@settings(max_examples=30, deadline=None)
@given(rates=st.tuples(*[st.floats(0, 0.5)] * 3), cuts=st.lists(st.integers(0, 1_000), max_size=5))
def test_shares_add_up_to_the_exact_totals(rates, cuts):
    config = SampleConfig(ratings=1_000, dirt=DirtRates(*rates))
    edges = [0, *sorted(cuts), 1_000]
    shares = [share_dirt(config, range(*bounds)) for bounds in itertools.pairwise(edges)]
    total = sum((Counter(flat_counts(share)) for share in shares), Counter())
    assert total["duplicate"] == round(1_000 * rates[1])
    assert total["unknown_movie"] + total["unknown_user"] == round(1_000 * rates[2])
    assert total.total() == sum(round(1_000 * rate) for rate in rates)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5])
def test_lines_hold_exactly_the_counted_dirt(rate):
    events, config = make_events(), dirty_config(rate, rate, rate)
    movies = {*events.movie_ids.tolist(), *build_catalogue(config).movie_ids.tolist()}
    valid, counts = classify(mix_dirt(config).split("\n")[:-1], USERS, movies)
    assert counts == flat_counts(share_dirt(config, range(200)))
    expected = zip(
        events.user_ids.tolist(),
        events.movie_ids.tolist(),
        events.ratings.tolist(),
        events.event_ts.tolist(),
        strict=True,
    )
    assert sorted(valid) == sorted(expected)


SMALL = SampleConfig(ratings=6_000, rows_per_chunk=1_000, dirt=DirtRates(0.01, 0.02, 0.013))


def read_all(out):
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_the_config_alone_decides_the_bytes_of_every_file(tmp_path):
    for name, seed in (("one", 7), ("same", 7), ("other", 8)):
        seen: list[int] = []
        write_sample(replace(SMALL, seed=seed), tmp_path / name, on_ratings=seen.append)
        write_clicks(plan_clicks(3_000, 200, seed=seed), tmp_path / f"{name}-clicks")
        assert (len(seen), sum(seen)) == (len(plan_chunks(SMALL)), SMALL.ratings)
    for kind, count in (("", 4), ("-clicks", 2)):
        one, same, other = (read_all(tmp_path / f"{n}{kind}") for n in ("one", "same", "other"))
        assert one == same
        assert len(one) == count
        assert all(one[name] != other[name] for name in one)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("samples") / "demo"
    card = write_sample(SampleConfig(), out)
    rows, counts = classify(
        read_lines(out / "ratings.dat"), read_ids(out / "users.dat"), read_ids(out / "movies.dat")
    )
    return card, rows, counts


def test_card_counts_every_line_of_dirt_exactly(tmp_path):
    card = write_sample(SMALL, tmp_path / "out")
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
