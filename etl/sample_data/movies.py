"""The movies of a sample: titles, genres, latent vectors and what ratings draw from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from etl.sample_data.config import SampleConfig

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

_NOUNS = {
    "Action": "Pursuit|Strike Force|Getaway|Fury|Detonator|Impact",
    "Adventure": "Expedition|Voyage|Treasure|Island|Compass|Río Perdido",
    "Animation": "Paper Moon|Inkwell|Little Fox|Clockwork Bird|Crayon|Marionette",
    "Children's": "Puppy|Summer Camp|Treehouse|Bear|Kite|Señor Conejo",
    "Comedy": "Wedding|Roommate|Mix-Up|Neighbour|Fiancée|Holiday",
    "Crime": "Heist|Syndicate|Alibi|Informant|Ledger|Cellblock",
    "Documentary": "Orchestra|Glacier|Election|Archive|Tour|São Paulo",
    "Drama": "Harbour|Letter|Daughter|Été|Inheritance|Crossing",
    "Fantasy": "Dragon|Enchantress|Mirror|Kingdom|Amulet|Märchen",
    "Film-Noir": "Alley|Cigarette|Dame|Streetlight|Double Cross|Blonde",
    "Horror": "Crypt|Haunting|Séance|Cellar|Scarecrow|Bloodline",
    "Musical": "Cabaret|Serenade|Footlights|Encore|Mélodie|Ballroom",
    "Mystery": "Witness|Cipher|Manor|Footprint|Disappearance|Hôtel",
    "Romance": "Promise|Rendezvous|Amélie's Garden|Valentine|Kiss|Letter Home",
    "Sci-Fi": "Orbit|Android|Nebula|Signal|Replica|Station Nine",
    "Thriller": "Hostage|Deadline|Stalker|Conspiracy|Fall|Über-Agent",
    "War": "Battalion|Trench|Armistice|Convoy|Général|Siege",
    "Western": "Gunslinger|Canyon|Sheriff|Stagecoach|El Niño|Ranch",
}
_ADJECTIVES = (
    "Silent|Crimson|Last|Hidden|Broken|Golden|Midnight|Distant|Wild|Forgotten|Electric|Bitter|"
    "Perfect|Lonely|Burning|Naïve|Frozen|Secret|Velvet|Restless|Stolen|Blue|Endless|Gentle|"
    "Déjà Vu|Savage|Invisible|Second|Hollow|Lucky|Paper|Northern|Sleepless|Reluctant|Quiet|Old"
)
GENRES = tuple(_NOUNS)
LATENT_DIM = 8
QUANTILES = 1 << 16  # resolution of the inverse distribution tables
NEIGHBOURS = 4
_STREAM = 1
_MOVIES_PER_NICHE, _MAX_NICHES = 16, 128


class Niches(NamedTuple):
    """Clusters of like movies within the genres, and their inverse distributions."""

    starts: Int64s  # `[niches + 1]`, first movie index of each niche
    centres: Float32s  # `[niches, LATENT_DIM]` unit vectors
    neighbours: Int64s  # `[niches, NEIGHBOURS]`, the most similar other niches
    rank_table: Int64s  # `[QUANTILES]`, quantile -> popularity rank within a niche
    popular_table: Int64s  # `[QUANTILES]`, quantile -> movie index over the whole catalogue


class Catalogue(NamedTuple):
    """Movies, indexed by niche and within a niche by falling popularity."""

    movie_ids: Int64s  # `[movies]`, the id of each index: distinct, with gaps, in random order
    genre_codes: Int64s  # `[movies, 3]` indices into `GENRES`, -1 where there is none
    vectors: Float32s  # `[movies, LATENT_DIM]` latent vectors
    quality: Float32s  # `[movies]`, what the movie adds to any rating
    niches: Niches  # where each niche lies and how popular its movies are


@lru_cache(maxsize=1)
def build_catalogue(config: SampleConfig) -> Catalogue:
    """Builds the catalogue of a sample; the same config gives the same catalogue anywhere."""
    rng, movies = config.rng(_STREAM), config.size.movies
    count = min(max(8, movies // _MOVIES_PER_NICHE), _MAX_NICHES, movies // 2)
    starts = np.arange(count + 1, dtype=np.int64) * movies // count
    niche_of = np.repeat(np.arange(count), np.diff(starts))
    genre_vectors = _unit(rng.normal(size=(len(GENRES), LATENT_DIM)))
    # Every genre leads a niche before any leads two.
    main = rng.permutation(np.arange(count) % len(GENRES)).astype(np.int64)
    second = (main + 1 + rng.integers(len(GENRES) - 1, size=count)) % len(GENRES)
    noise = 0.25 * rng.normal(size=(count, LATENT_DIM))
    centres = _unit(genre_vectors[main] + 0.5 * genre_vectors[second] + noise)
    weight = 1.0 / (np.arange(movies) - starts[niche_of] + 1.0)  # Zipf within a niche
    weight = weight * np.exp(rng.normal(0.0, 0.4, count))[niche_of]
    niches = Niches(
        starts=starts,
        centres=centres.astype(np.float32),
        neighbours=_nearest_niches(centres),
        rank_table=_inverse_table(1.0 / (np.arange(int(np.diff(starts).max())) + 1.0)),
        popular_table=_inverse_table(weight),
    )
    id_space = movies + movies // 50  # gaps, as in MovieLens-1M: 3,883 movies up to id 3,952
    movie_ids = rng.permutation(id_space)[:movies].astype(np.int64) + 1
    genres = _draw_genres(main[niche_of], second[niche_of], rng)
    vectors = (centres[niche_of] + 0.15 * rng.normal(size=(movies, LATENT_DIM))).astype(np.float32)
    quality = rng.normal(0.0, 0.3, movies).astype(np.float32)
    return Catalogue(movie_ids, genres, vectors, quality, niches)


def build_titles(genres: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Draws one distinct title per movie, its noun in keeping with the movie's main genre.

    Args:
        genres: Main genre of each movie, one of `GENRES`.
        rng: Source of the draws.

    Returns:
        Titles with the year of release in brackets; every character is in Latin-1.
    """
    count = len(genres)
    words = _ADJECTIVES.split("|")
    adjectives, nouns = rng.integers(len(words), size=count), rng.integers(6, size=count)
    # Most catalogues are recent: years fall off from 2000 with a mean age of 12 years.
    years = 2000 - np.minimum(rng.exponential(12.0, count), 80.0).astype(np.int64)
    articles = rng.random(count) < 0.35
    seen: dict[str, int] = {}
    titles = []
    for row, genre in enumerate(genres):
        name = f"{words[adjectives[row]]} {_NOUNS[genre].split('|')[nouns[row]]}"
        number = seen[name] = seen.get(name, 0) + 1
        sequel = f" {number}" if number > 1 else ""
        titles.append(f"{name}{sequel}{', The' if articles[row] else ''} ({years[row]})")
    return titles


def _draw_genres(main: Int64s, second: Int64s, rng: np.random.Generator) -> Int64s:
    extra = rng.integers(len(GENRES), size=len(main))
    with_second = rng.random(len(main)) < 0.6
    with_extra = (rng.random(len(main)) < 0.12) & (extra != main) & (extra != second)
    return np.stack([main, np.where(with_second, second, -1), np.where(with_extra, extra, -1)], 1)


def _nearest_niches(centres: npt.NDArray[np.float64]) -> Int64s:
    similarity = centres @ centres.T
    np.fill_diagonal(similarity, -np.inf)
    return np.argsort(-similarity, axis=1, kind="stable")[:, :NEIGHBOURS].astype(np.int64)


def _inverse_table(weight: npt.NDArray[np.floating[Any]]) -> Int64s:
    cumulative = np.cumsum(weight) / weight.sum()
    quantiles = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return np.minimum(np.searchsorted(cumulative, quantiles), len(weight) - 1).astype(np.int64)


def _unit(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
