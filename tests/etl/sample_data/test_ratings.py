"""Movies, users and ratings of a sample: the distributions that they are drawn from."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.sample_data.logs import draw_chunks, format_movies, format_users
from etl.sample_data.ratings import (
    FIRST_TS,
    GENRES,
    LAST_TS,
    SampleConfig,
    build_catalogue,
    build_titles,
    draw_activity,
    draw_events,
    draw_users,
    plan_sample,
)


def test_titles_are_distinct_latin1_with_a_year():
    genres = [GENRES[i % 18] for i in range(5_000)]
    titles = build_titles(genres, np.random.default_rng(0))
    names = [title.rpartition(" (")[0].removesuffix(", The") for title in titles]
    assert len(set(names)) == len(names)
    assert all(1919 <= int(title[-5:-1]) <= 2000 and title[-1] == ")" for title in titles)
    assert not any("::" in title or "|" in title for title in titles)
    encoded = "".join(titles).encode("latin-1")
    assert any(byte > 127 for byte in encoded)


def test_movies_file_has_every_movie_once_in_order_with_known_genres():
    config = plan_sample(ratings=20_000)
    lines = format_movies(config).decode("latin-1").splitlines()
    fields = [line.split("::") for line in lines]
    ids = [int(row[0]) for row in fields]
    assert ids == sorted(set(ids))
    assert len(ids) == config.movies
    assert max(ids) > len(ids)  # the ids have gaps
    for _, _, genres in fields:
        names = genres.split("|")
        assert set(names) <= set(GENRES)
        assert len(set(names)) == len(names)
    assert {name for row in fields for name in row[2].split("|")} == set(GENRES)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), movies=st.integers(20, 400), users=st.integers(2, 200))
def test_activity_sums_exactly_within_bounds(data, movies, users):
    ratings = data.draw(st.integers(max(100, 3 * users), max(100, users * (movies // 2))))
    if ratings > users * (movies // 2):
        return
    activity = draw_activity(plan_sample(ratings, users, movies))
    assert len(activity) == users
    assert activity.sum() == ratings
    assert activity.min() >= 3
    assert activity.max() <= movies // 2


def test_user_lines_keep_to_the_domains_of_movielens():
    config = plan_sample()
    [chunk] = draw_chunks(config)
    text = format_users(chunk, config)
    rows = [line.split("::") for line in text.decode().splitlines()]
    assert [int(row[0]) for row in rows] == list(range(1, 1_501))
    assert {row[1] for row in rows} == {"F", "M"}
    assert {int(row[2]) for row in rows} == {1, 18, 25, 35, 45, 50, 56}
    assert {int(row[3]) for row in rows} == set(range(21))
    assert all(re.fullmatch(r"\d{5}(-\d{4})?", row[4]) for row in rows)


@pytest.mark.parametrize("attribute", ["gender", "age", "occupation"])
def test_tastes_depend_on_attributes(attribute):
    users = draw_users(plan_sample(ratings=200_000), range(2_000), chunk=0)
    groups = getattr(users, attribute)
    taste = users.tastes[0]
    shuffled = np.random.default_rng(0).permutation(groups)

    def between(labels):
        means = np.stack([taste[labels == value].mean(axis=0) for value in np.unique(labels)])
        return (means**2).sum(axis=1).mean()

    assert between(groups) > 3 * between(shuffled)


def draw(config: SampleConfig):
    users = draw_users(config, range(config.users), 0)
    return draw_events(build_catalogue(config), users, draw_activity(config), config.rng(99))


@pytest.mark.parametrize(
    "config",
    [
        plan_sample(ratings=5_000),
        plan_sample(ratings=1_000, users=100, movies=20),  # every user at the cap
        plan_sample(ratings=6_000, users=20, movies=601),
    ],
)
def test_no_user_rates_a_movie_twice(config):
    drawn = draw(config)
    pairs = set(zip(drawn.user_ids.tolist(), drawn.movie_ids.tolist(), strict=True))
    assert len(pairs) == len(drawn.user_ids) == config.ratings


def test_times_lie_in_the_span_with_ties_and_out_of_order():
    drawn = draw(plan_sample(ratings=30_000))
    assert drawn.event_ts.min() >= FIRST_TS
    assert drawn.event_ts.max() <= LAST_TS
    same_user = np.diff(drawn.user_ids) == 0
    assert (np.diff(drawn.event_ts)[same_user] < 0).any()
    order = np.lexsort((drawn.event_ts, drawn.user_ids))
    ties = (np.diff(drawn.event_ts[order]) == 0) & (np.diff(drawn.user_ids[order]) == 0)
    assert 0.002 < ties.mean() < 0.1
