import numpy as np
import pytest

from etl.samples.catalogue import build_catalogue, format_movies
from etl.samples.config import SampleConfig
from etl.samples.titles import GENRES

CONFIG = SampleConfig(ratings=20_000)


def test_movies_file_has_every_movie_once_in_order_with_known_genres():
    lines = format_movies(build_catalogue(CONFIG), CONFIG).decode("latin-1").splitlines()
    fields = [line.split("::") for line in lines]
    ids = [int(row[0]) for row in fields]
    assert ids == sorted(set(ids))
    assert len(ids) == CONFIG.size.movies
    assert max(ids) > len(ids)  # the ids have gaps
    for _, _, genres in fields:
        names = genres.split("|")
        assert set(names) <= set(GENRES)
        assert len(set(names)) == len(names)
    assert {name for row in fields for name in row[2].split("|")} == set(GENRES)


@pytest.mark.parametrize("movies", [20, 21, 50, 3_000])
def test_niches_cover_the_catalogue(movies):
    catalogue = build_catalogue(SampleConfig(ratings=2_000, movies=movies))
    niches = catalogue.niches
    assert niches.starts[0] == 0
    assert niches.starts[-1] == movies
    assert (np.diff(niches.starts) >= 1).all()
    assert niches.popular_table.max() < movies
    assert (niches.neighbours != np.arange(len(niches.centres))[:, None]).all()


def test_movies_are_closest_to_their_own_niche():
    catalogue = build_catalogue(CONFIG)
    own = np.repeat(np.arange(len(catalogue.niches.centres)), np.diff(catalogue.niches.starts))
    unit = catalogue.vectors / np.linalg.norm(catalogue.vectors, axis=1, keepdims=True)
    nearest = (unit @ catalogue.niches.centres.T).argmax(axis=1)
    assert (nearest == own).mean() > 0.5  # chance is 1 in 22
