import pytest

from conf.errors import ConfigError
from etl.samples.config import DirtRates, SampleConfig


def test_size_scales_with_ratings():
    assert SampleConfig(ratings=100_000).size == (100_000, 1_500, 800)
    small, large = SampleConfig(ratings=100_000).size, SampleConfig(ratings=100_000_000).size
    assert large.ratings / large.users > small.ratings / small.users
    assert large.ratings / large.movies > small.ratings / small.movies
    assert 100_000 < large.users < 1_000_000


@pytest.mark.parametrize("ratings", [100, 333, 5_000, 1_000_000, 1_000_000_000])
@pytest.mark.parametrize("movies", [None, 20, 500])
def test_scaled_users_can_hold_the_ratings(ratings, movies):
    size = SampleConfig(ratings=ratings, movies=movies).size
    assert 3 * size.users <= size.ratings <= size.users * (size.movies // 2)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"ratings": 10}, "ratings"),
        ({"ratings": 2_000_000_000}, "ratings"),
        ({"seed": -1}, "seed"),
        ({"movies": 3}, "movies"),
        ({"ratings": 1_000, "users": 900}, "cannot hold"),
        ({"ratings": 100_000, "users": 10, "movies": 50}, "cannot hold"),
    ],
)
def test_refuses_what_cannot_be_generated(options, word):
    with pytest.raises(ConfigError, match=word) as caught:
        SampleConfig(**options)
    assert caught.value.allowed is not None
    assert caught.value.fix is not None


@pytest.mark.parametrize("rate", [-0.1, 0.51, float("nan")])
def test_refuses_rates_out_of_range(rate):
    with pytest.raises(ConfigError, match="unknown"):
        DirtRates(unknown=rate)
