import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.samples.config import DirtRates, SampleConfig
from etl.samples.dirt import format_ratings, share_dirt
from etl.samples.interactions import Events
from tests.etl.samples.logs import classify

USERS, MOVIES = set(range(1, 11)), set(range(1, 51))


def make_events(rows: int = 200) -> Events:
    user = np.repeat(np.arange(1, 11), rows // 10)
    movie = np.tile(np.arange(1, 21), 10)
    stamps = 956_703_932 + np.random.default_rng(0).integers(10**8, size=rows)
    return Events(user, movie, movie % 5 + 1, stamps)


@settings(max_examples=30, deadline=None)
@given(rates=st.tuples(*[st.floats(0, 0.5)] * 3), cuts=st.lists(st.integers(0, 1_000), max_size=5))
def test_shares_add_up_to_the_exact_totals(rates, cuts):
    config = SampleConfig(ratings=1_000, dirt=DirtRates(*rates))
    edges = [0, *sorted(cuts), 1_000]
    shares = [share_dirt(config, low, high - low) for low, high in itertools.pairwise(edges)]
    total = sum((Counter(share.count_kinds()) for share in shares), Counter())
    assert total["duplicate"] == round(1_000 * rates[1])
    assert total["unknown_movie"] + total["unknown_user"] == round(1_000 * rates[2])
    assert total.total() == sum(round(1_000 * rate) for rate in rates)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5])
def test_lines_hold_exactly_the_counted_dirt(rate):
    events = make_events()
    config = SampleConfig(ratings=200, dirt=DirtRates(rate, rate, rate))
    share = share_dirt(config, 0, 200)
    text = format_ratings(events, share, (11, 51), np.random.default_rng(1))
    valid, counts = classify(text.decode("latin-1").split("\n")[:-1], USERS, MOVIES)
    assert counts == share.count_kinds()
    expected = zip(
        events.user_ids.tolist(),
        events.movie_ids.tolist(),
        events.ratings.tolist(),
        events.event_ts.tolist(),
        strict=True,
    )
    assert sorted(valid) == sorted(expected)


def test_duplicates_stay_with_their_user():
    share = share_dirt(SampleConfig(ratings=200, dirt=DirtRates(0, 0.5, 0)), 0, 200)
    text = format_ratings(make_events(), share, (11, 51), np.random.default_rng(1)).decode()
    users = [int(line.split("::")[0]) for line in text.splitlines()]
    assert users == sorted(users)
    assert max(Counter(text.splitlines()).values()) == 2
