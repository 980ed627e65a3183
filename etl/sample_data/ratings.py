"""Samples of ratings: their size, the movies, the users, what they watch, when, how they rate it.

Movies form niches within the genres, users prefer niches by a latent taste that depends on their
attributes and drifts, popularity is Zipfian. Each draw has a random stream of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from conf.errors import ConfigError

MIN_MOVIES = 20
_MIN_PER_USER = 3  # leave-one-out needs a test, a validation and a train event


@dataclass(frozen=True)
class DirtRates:
    """Extra lines mixed into the ratings, each as a share of the valid ratings, 0 to 0.5."""

    dirty: float = 0.001  # malformed: field count, non-numeric id, rating outside 1-5, empty line
    duplicate: float = 0.002  # exact copies of valid lines
    unknown: float = 0.002  # a user or movie that is in neither dictionary


@dataclass(frozen=True)
class SampleConfig:
    """Everything the bytes of a sample depend on; `plan_sample` makes one.

    `ratings` are valid and distinct; dirt comes on top. `rows_per_chunk` is how many are generated
    at a time.
    """

    ratings: int
    users: int
    movies: int
    seed: int
    dirt: DirtRates
    rows_per_chunk: int = 250_000

    def rng(self, stream: int, chunk: int = 0) -> np.random.Generator:
        """Returns the generator of one named stream and chunk, independent of all others."""
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(stream, chunk)))


def plan_sample(
    ratings: int = 100_000,
    users: int | None = None,
    movies: int | None = None,
    seed: int = 7,
    dirt: DirtRates = DirtRates(),
) -> SampleConfig:
    """Plans a sample; users and movies that are None scale with the ratings.

    Users grow with exponent 0.85 and movies with 0.5, so that ratings per user and per movie both
    rise with the size, as they do from MovieLens-100K to MovieLens-25M.
    """
    scale = ratings / 100_000
    movies = movies or max(MIN_MOVIES, round(800 * math.sqrt(scale)))
    if not users:  # given movies may be too few for that many ratings a user
        users = max(2, round(1_500 * scale**0.85), -(-ratings // (movies // 2)))
        users = min(users, ratings // _MIN_PER_USER)
    low, high = users * _MIN_PER_USER, users * (movies // 2)
    if not low <= ratings <= high:
        raise ConfigError(
            f"{users} users and {movies} movies cannot hold the ratings",
            received=f"{ratings} ratings",
            allowed=f"{low} to {high} ({_MIN_PER_USER} to half the movies per user)",
            fix="change --users or --movies, or leave both out to scale with --ratings",
        )
    return SampleConfig(ratings, users, movies, seed, dirt)


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
_QUANTILES = 1 << 16  # resolution of the inverse distribution tables
_NEIGHBOURS = 4
_MOVIES_PER_NICHE = 16
_CATALOGUE_STREAM = 1


class Catalogue(NamedTuple):
    """Movies, indexed by niche (a cluster within a genre), in it by falling popularity."""

    movie_ids: np.ndarray  # int64 `[movies]`: distinct, with gaps, in random order
    genre_codes: np.ndarray  # int64 `[movies, 3]` indices into `GENRES`, -1 where there is none
    vectors: np.ndarray  # float32 `[movies, LATENT_DIM]`
    quality: np.ndarray  # float32 `[movies]`, what the movie adds to any rating
    starts: np.ndarray  # int64 `[niches + 1]`, first movie index of each niche
    centres: np.ndarray  # float32 `[niches, LATENT_DIM]` unit vectors
    neighbours: np.ndarray  # int64 `[niches, 4]`, the most similar other niches
    rank_table: np.ndarray  # int64 `[quantiles]`, quantile -> popularity rank within a niche
    popular_table: np.ndarray  # int64 `[quantiles]`, quantile -> movie index over all


@lru_cache(maxsize=1)
def build_catalogue(config: SampleConfig) -> Catalogue:
    """Draws the movies of a sample."""
    rng, movies = config.rng(_CATALOGUE_STREAM), config.movies
    count = min(max(8, movies // _MOVIES_PER_NICHE), 128)
    starts = np.arange(count + 1, dtype=np.int64) * movies // count
    niche_of = np.repeat(np.arange(count), np.diff(starts))
    genre_vectors = _unit(rng.normal(size=(len(GENRES), LATENT_DIM)))
    # Every genre leads a niche before any leads two.
    main = rng.permutation(np.arange(count) % len(GENRES))
    second = (main + 1 + rng.integers(len(GENRES) - 1, size=count)) % len(GENRES)
    noise = 0.25 * rng.normal(size=(count, LATENT_DIM))
    centres = _unit(genre_vectors[main] + 0.5 * genre_vectors[second] + noise)
    weight = 1.0 / (np.arange(movies) - starts[niche_of] + 1.0)  # Zipf within a niche
    weight = weight * np.exp(rng.normal(0.0, 0.4, count))[niche_of]
    id_space = movies + movies // 50  # gaps, as in MovieLens-1M: 3,883 movies up to id 3,952
    return Catalogue(  # The order of its draws decides the bytes.
        movie_ids=rng.permutation(id_space)[:movies] + 1,
        genre_codes=_draw_genres(main[niche_of], second[niche_of], rng),
        vectors=(centres[niche_of] + rng.normal(0, 0.15, (movies, LATENT_DIM))).astype(np.float32),
        quality=rng.normal(0.0, 0.3, movies).astype(np.float32),
        starts=starts,
        centres=centres.astype(np.float32),
        neighbours=_nearest_niches(centres),
        rank_table=_inverse_table(1.0 / (np.arange(int(np.diff(starts).max())) + 1.0)),
        popular_table=_inverse_table(weight),
    )


def build_titles(genres: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Draws a distinct title in Latin-1 for each movie, by its main genre, with a year."""
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


def _draw_genres(main: np.ndarray, second: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    extra = rng.integers(len(GENRES), size=len(main))
    with_second = rng.random(len(main)) < 0.6
    with_extra = (rng.random(len(main)) < 0.12) & (extra != main) & (extra != second)
    return np.stack([main, np.where(with_second, second, -1), np.where(with_extra, extra, -1)], 1)


def _nearest_niches(centres: np.ndarray) -> np.ndarray:
    similarity = centres @ centres.T
    np.fill_diagonal(similarity, -np.inf)
    return np.argsort(-similarity, axis=1, kind="stable")[:, :_NEIGHBOURS]


def _inverse_table(weight: np.ndarray) -> np.ndarray:
    cumulative = np.cumsum(weight) / weight.sum()
    quantiles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    return np.minimum(np.searchsorted(cumulative, quantiles), len(weight) - 1)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


FIRST_TS, LAST_TS = 956_703_932, 1_046_454_590  # seconds; the span of MovieLens-1M
AGE_CODES = (1, 18, 25, 35, 45, 50, 56)
_AGE_SHARES = (0.037, 0.183, 0.347, 0.197, 0.091, 0.082, 0.063)  # MovieLens-1M
_MALE_SHARE, _OCCUPATIONS = 0.717, 21
_ACTIVITY_STREAM, _EFFECT_STREAM, USER_STREAM = 3, 4, 5
_SEGMENT_EVENTS = 8  # mean number of consecutive events in one niche
_POPULAR_SHARE = 0.15  # events that follow the crowd and not the taste
_TASTE_SHARPNESS = 2.2
_SAME_NICHE_TRIES, _TRIES = 2, 8


class Users(NamedTuple):
    """A contiguous range of users."""

    first_id: int  # id of the first user; the others follow
    gender: np.ndarray  # int64 `[users]`, 0 female, 1 male
    age: np.ndarray  # int64 `[users]`, number of the age group, 0-6
    occupation: np.ndarray  # int64 `[users]` in 0-20
    tastes: np.ndarray  # float32 `[2, users, LATENT_DIM]`, at the first and at the last event


class RatingEvents(NamedTuple):
    """Valid ratings of a chunk, grouped by user, not in time order within a user."""

    user_ids: np.ndarray  # int64 `[rows]`, ascending
    movie_ids: np.ndarray  # int64 `[rows]`, distinct within a user
    ratings: np.ndarray  # int64 `[rows]` in 1-5
    event_ts: np.ndarray  # int64 `[rows]` seconds since the epoch; a few ties within a user


def draw_activity(config: SampleConfig) -> np.ndarray:
    """Draws how many ratings each user gives, int64 `[users]`: a floor plus a log-normal share.

    Their sum is exact. A user gives 3 to half the movies, at least 20 where the mean allows it.
    """
    cap, rng = config.movies // 2, config.rng(_ACTIVITY_STREAM)
    floor = max(_MIN_PER_USER, min(20, config.ratings // config.users // 2))
    share = rng.lognormal(0.0, 0.9, config.users)
    spare = config.ratings - floor * config.users
    counts = np.minimum(floor + np.floor(spare * share / share.sum()).astype(np.int64), cap)
    missing = config.ratings - int(counts.sum())
    while missing > 0:  # what rounding and the cap left over goes to users below the cap
        chosen = rng.permutation(np.flatnonzero(counts < cap))[:missing]
        extra = np.minimum(max(1, missing // len(chosen)), cap - counts[chosen])
        counts[chosen] += extra
        missing -= int(extra.sum())
    return counts


def draw_users(config: SampleConfig, users: range, chunk: int) -> Users:
    """Draws the attributes and tastes of one chunk's users (0-based range, ids from 1).

    Half of a taste's variance comes with the attributes. The rest drifts: the last taste
    shares only a part with the first, so recent events tell more than old ones.
    """
    by_gender, by_age, by_occupation = _draw_effects(config.rng(_EFFECT_STREAM))
    rng, count = config.rng(USER_STREAM, chunk), len(users)
    gender = (rng.random(count) < _MALE_SHARE).astype(np.int64)
    age = rng.choice(len(AGE_CODES), count, p=np.array(_AGE_SHARES) / sum(_AGE_SHARES))
    occupation = rng.integers(_OCCUPATIONS, size=count)
    shared = by_gender[gender] + by_age[age] + by_occupation[occupation]
    first, fresh = rng.normal(0.0, 0.9, (2, count, LATENT_DIM)).astype(np.float32)
    last = np.float32(0.4) * first + np.float32(0.917) * fresh  # correlation 0.4, same variance
    tastes = np.stack([shared + first, shared + last])
    return Users(users.start + 1, gender, age, occupation, tastes)


def _draw_effects(rng: np.random.Generator) -> list[np.ndarray]:
    """What each gender, age and occupation adds to a taste, `[values, LATENT_DIM]` each."""

    def draw(shares: Sequence[float], scale: float) -> np.ndarray:
        effect = rng.normal(0.0, scale, (len(shares), LATENT_DIM))
        # No taste common to all users: that would only be more popularity.
        return (effect - np.average(effect, axis=0, weights=shares)).astype(np.float32)

    genders, occupations = (1 - _MALE_SHARE, _MALE_SHARE), (1.0,) * _OCCUPATIONS
    return [draw(genders, 0.7), draw(_AGE_SHARES, 0.7), draw(occupations, 0.4)]


def draw_events(
    catalogue: Catalogue, users: Users, activity: np.ndarray, rng: np.random.Generator
) -> RatingEvents:
    """Draws all events of a range of users, `activity` `[users]` of each.

    A user's events form segments of about eight; each segment stays in one niche, drawn by a
    softmax over the taste of that moment, which drifts from the user's first to the last taste.
    """
    user = np.repeat(np.arange(len(activity)), activity)
    is_first = np.diff(user, prepend=-1) > 0
    opens = is_first | (rng.random(len(user)) < 1.0 / _SEGMENT_EVENTS)
    segment = np.cumsum(opens) - 1
    taste = _drift_tastes(users, user[opens])
    niche = _draw_niches(catalogue.centres, taste, rng)[segment]
    movie = _draw_movies(catalogue, user, niche, rng)
    affinity = np.einsum("ij,ij->i", taste[segment], catalogue.vectors[movie])
    mildness = rng.normal(0.0, 0.35, len(activity))[user]
    noise = rng.standard_normal(len(user), dtype=np.float32) * np.float32(0.85)
    score = 3.15 + 0.27 * affinity + catalogue.quality[movie] + mildness
    rating = np.clip(np.rint(score + noise), 1, 5).astype(np.int64)
    event_ts = _draw_times(user, is_first, opens, rng)
    shuffled = np.argsort(user + rng.random(len(user)), kind="stable")  # within each user
    movie_ids = catalogue.movie_ids[movie[shuffled]]
    return RatingEvents(user + users.first_id, movie_ids, rating[shuffled], event_ts[shuffled])


def _drift_tastes(users: Users, segment_user: np.ndarray) -> np.ndarray:
    """Tastes on the arc from first to last, float32 `[segments, LATENT_DIM]`."""
    count = np.bincount(segment_user)
    step = np.arange(len(segment_user)) - np.repeat(np.cumsum(count) - count, count)
    angle = (np.pi / 2 * step / np.maximum(count[segment_user] - 1, 1)).astype(np.float32)
    first, last = users.tastes[0][segment_user], users.tastes[1][segment_user]
    return np.cos(angle)[:, None] * first + np.sin(angle)[:, None] * last


def _draw_niches(centres: np.ndarray, taste: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    logits = np.float32(_TASTE_SHARPNESS) * (taste @ centres.T)
    logits -= logits.max(axis=1, keepdims=True)
    cumulative = np.cumsum(np.exp(logits, out=logits), axis=1, out=logits)
    quantile = rng.random(len(taste), dtype=np.float32) * cumulative[:, -1]
    chosen = (cumulative < quantile[:, None]).sum(axis=1)
    return np.minimum(chosen, len(centres) - 1)


def _draw_movies(
    catalogue: Catalogue, user: np.ndarray, niche: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Draws a movie per event so that no user has one twice; a clash is drawn anew.

    A clash first stays in its niche, then tries near niches, then the whole catalogue by
    popularity; whatever still clashes takes unseen movies at random.
    """
    movies = len(catalogue.movie_ids)
    movie = np.empty(len(user), dtype=np.int64)
    taken = np.empty(0, dtype=np.int64)  # user * movies + movie of the accepted events
    clashing = np.arange(len(user))
    by_crowd = rng.random(len(user)) < _POPULAR_SHARE
    for attempt in range(_TRIES):
        tried = niche[clashing]
        if attempt >= _SAME_NICHE_TRIES:
            by_crowd[:] = attempt >= _TRIES - 2
            tried = catalogue.neighbours[tried, rng.integers(_NEIGHBOURS, size=len(clashing))]
        rank = catalogue.rank_table[rng.integers(_QUANTILES, size=len(tried))]
        drawn = np.minimum(catalogue.starts[tried] + rank, catalogue.starts[tried + 1] - 1)
        is_popular = by_crowd[clashing]
        quantiles = rng.integers(_QUANTILES, size=int(is_popular.sum()))
        drawn[is_popular] = catalogue.popular_table[quantiles]
        keys, first = np.unique(user[clashing] * movies + drawn, return_index=True)
        is_new = ~np.isin(keys, taken, assume_unique=True)
        movie[clashing[first[is_new]]] = drawn[first[is_new]]
        taken = np.append(taken, keys[is_new])
        clashing = np.delete(clashing, first[is_new])
    seen = np.sort(taken)
    for row in np.unique(user[clashing]).tolist():
        own = clashing[user[clashing] == row]
        low, high = np.searchsorted(seen, (row * movies, (row + 1) * movies))
        unseen = np.setdiff1d(np.arange(movies), seen[low:high] - row * movies)
        movie[own] = rng.choice(unseen, len(own), replace=False)
    return movie


def _draw_times(
    user: np.ndarray, is_first: np.ndarray, opens: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Times never fall within a user: seconds inside a segment (ties occur), days between."""
    segments = np.bincount(user[opens])
    start = FIRST_TS + rng.random(len(segments)) * 0.9 * (LAST_TS - FIRST_TS)
    span = (LAST_TS - start) * rng.uniform(0.02, 0.7, len(segments))
    gap = np.floor(rng.standard_exponential(len(user)) * 45.0)
    between = rng.standard_exponential(int(opens.sum())) * (span / segments)[user[opens]]
    gap[opens] = np.floor(between)
    gap[is_first] = 0.0
    elapsed = np.cumsum(gap)
    elapsed -= elapsed[is_first][user]
    total = elapsed[np.append(is_first[1:], True)]
    room = (LAST_TS - start) * rng.uniform(0.9, 1.0, len(segments))
    shrink = np.minimum(1.0, room / np.maximum(total, 1.0))  # the few that overran the span
    return np.floor(np.floor(start)[user] + elapsed * shrink[user]).astype(np.int64)
