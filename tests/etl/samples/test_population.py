import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.samples.config import SampleConfig
from etl.samples.population import build_effects, draw_activity, draw_users, format_users


@settings(max_examples=40, deadline=None)
@given(data=st.data(), movies=st.integers(20, 400), users=st.integers(2, 200))
def test_activity_sums_exactly_within_bounds(data, movies, users):
    ratings = data.draw(st.integers(max(100, 3 * users), max(100, users * (movies // 2))))
    if ratings > users * (movies // 2):
        return
    activity = draw_activity(SampleConfig(ratings=ratings, users=users, movies=movies))
    assert len(activity) == users
    assert activity.sum() == ratings
    assert activity.min() >= 3
    assert activity.max() <= movies // 2


def test_activity_has_the_floor_and_the_long_tail_of_movielens():
    activity = draw_activity(SampleConfig())
    assert activity.min() >= 20
    assert activity.max() > 4 * np.median(activity)


def test_user_lines_keep_to_the_domains_of_movielens():
    config = SampleConfig()
    users = draw_users(config, build_effects(config), range(10, 1_000), chunk=0)
    rows = [line.split("::") for line in format_users(users, config, 0).decode().splitlines()]
    assert [int(row[0]) for row in rows] == list(range(11, 1_001))
    assert {row[1] for row in rows} == {"F", "M"}
    assert {int(row[2]) for row in rows} == {1, 18, 25, 35, 45, 50, 56}
    assert {int(row[3]) for row in rows} == set(range(21))
    assert all(re.fullmatch(r"\d{5}(-\d{4})?", row[4]) for row in rows)


@pytest.mark.parametrize("attribute", ["gender", "age", "occupation"])
def test_tastes_depend_on_attributes(attribute):
    config = SampleConfig(ratings=200_000)
    users = draw_users(config, build_effects(config), range(2_000), chunk=0)
    groups = getattr(users, attribute)
    taste = users.tastes[0]
    shuffled = np.random.default_rng(0).permutation(groups)

    def between(labels):
        means = np.stack([taste[labels == value].mean(axis=0) for value in np.unique(labels)])
        return (means**2).sum(axis=1).mean()

    assert between(groups) > 3 * between(shuffled)
