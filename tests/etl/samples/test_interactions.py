import numpy as np
import pytest

from etl.samples.catalogue import build_catalogue
from etl.samples.config import SampleConfig
from etl.samples.interactions import FIRST_TS, LAST_TS, draw_events
from etl.samples.population import build_effects, draw_activity, draw_users


def draw(config: SampleConfig):
    users = draw_users(config, build_effects(config), range(config.size.users), 0)
    activity = draw_activity(config)
    events = draw_events(build_catalogue(config), users, activity, config.rng(99))
    return events, activity


@pytest.fixture(scope="module")
def events():
    return draw(SampleConfig(ratings=30_000))


def test_every_user_gets_its_events_grouped_by_user(events):
    drawn, activity = events
    np.testing.assert_array_equal(np.bincount(drawn.user_ids)[1:], activity)
    assert (np.diff(drawn.user_ids) >= 0).all()


@pytest.mark.parametrize(
    "config",
    [
        SampleConfig(ratings=5_000),
        SampleConfig(ratings=1_000, users=100, movies=20),  # every user at the cap
        SampleConfig(ratings=6_000, users=20, movies=601),
    ],
)
def test_no_user_rates_a_movie_twice(config):
    drawn, activity = draw(config)
    pairs = set(zip(drawn.user_ids.tolist(), drawn.movie_ids.tolist(), strict=True))
    assert len(pairs) == len(drawn.user_ids) == activity.sum() == config.ratings


def test_times_lie_in_the_span_with_ties_and_out_of_order(events):
    drawn, _ = events
    assert drawn.event_ts.min() >= FIRST_TS
    assert drawn.event_ts.max() <= LAST_TS
    same_user = np.diff(drawn.user_ids) == 0
    assert (np.diff(drawn.event_ts)[same_user] < 0).any()
    order = np.lexsort((drawn.event_ts, drawn.user_ids))
    ties = (np.diff(drawn.event_ts[order]) == 0) & (np.diff(drawn.user_ids[order]) == 0)
    assert 0.002 < ties.mean() < 0.1


def test_ratings_use_all_stars_and_lean_to_four(events):
    shares = np.bincount(events[0].ratings, minlength=6) / len(events[0].ratings)
    assert shares[0] == 0
    assert (shares[1:] > 0.01).all()
    assert shares.argmax() in (3, 4)


def test_ratings_rise_with_affinity():
    config = SampleConfig(ratings=30_000)
    users = draw_users(config, build_effects(config), range(config.size.users), 0)
    catalogue = build_catalogue(config)
    drawn = draw_events(catalogue, users, draw_activity(config), config.rng(99))
    index = np.empty(catalogue.movie_ids.max() + 1, dtype=np.int64)
    index[catalogue.movie_ids] = np.arange(len(catalogue.movie_ids))
    taste = users.tastes.mean(axis=0)[drawn.user_ids - 1]
    affinity = (taste * catalogue.vectors[index[drawn.movie_ids]]).sum(axis=1)
    assert np.corrcoef(affinity, drawn.ratings)[0, 1] > 0.2


def test_popularity_is_skewed(events):
    counts = np.sort(np.bincount(events[0].movie_ids))[::-1]
    assert counts[: len(counts) // 5].sum() > 0.35 * counts.sum()
