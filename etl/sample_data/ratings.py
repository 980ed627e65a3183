"""The movies of a sample, its users and their ratings: what they watch, when, how they rate it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from etl.sample_data.config import MIN_RATINGS_PER_USER, SampleConfig

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

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
_CATALOGUE_STREAM = 1
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
    rng, movies = config.rng(_CATALOGUE_STREAM), config.size.movies
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
    gender: Int64s  # `[users]`, 0 female, 1 male
    age: Int64s  # `[users]`, number of the age group, 0-6
    occupation: Int64s  # `[users]` in 0-20
    tastes: Float32s  # `[2, users, LATENT_DIM]`, taste at the first and at the last event


class RatingEvents(NamedTuple):
    """Valid ratings of a chunk, grouped by user, not in time order within a user."""

    user_ids: Int64s  # `[rows]`, ascending
    movie_ids: Int64s  # `[rows]`, distinct within a user
    ratings: Int64s  # `[rows]` in 1-5
    event_ts: Int64s  # `[rows]` seconds since the epoch; a few ties within a user


@lru_cache(maxsize=1)
def draw_activity(config: SampleConfig) -> Int64s:
    """Draws how many ratings each user gives: a floor plus a log-normal share.

    Returns:
        `[users]` that sums to the ratings exactly; each between 3 and half the catalogue, at
        least 20 (as in MovieLens) where the mean allows it.
    """
    size, cap, rng = config.size, config.most_per_user, config.rng(_ACTIVITY_STREAM)
    floor = max(MIN_RATINGS_PER_USER, min(20, size.ratings // size.users // 2))
    share = rng.lognormal(0.0, 0.9, size.users)
    spare = size.ratings - floor * size.users
    counts = np.minimum(floor + np.floor(spare * share / share.sum()).astype(np.int64), cap)
    missing = size.ratings - int(counts.sum())
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
    first, fresh = (rng.normal(0.0, 0.9, (count, LATENT_DIM)).astype(np.float32) for _ in range(2))
    last = np.float32(0.4) * first + np.float32(0.917) * fresh  # correlation 0.4, same variance
    tastes = np.stack([shared + first, shared + last])
    return Users(users.start + 1, gender, age, occupation, tastes)


def _draw_effects(rng: np.random.Generator) -> list[Float32s]:
    """What each gender, age and occupation adds to a taste, `[values, LATENT_DIM]` each."""

    def draw(shares: Sequence[float], scale: float) -> Float32s:
        effect = rng.normal(0.0, scale, (len(shares), LATENT_DIM))
        # No taste common to all users: that would only be more popularity.
        return (effect - np.average(effect, axis=0, weights=shares)).astype(np.float32)

    genders, occupations = (1 - _MALE_SHARE, _MALE_SHARE), (1.0,) * _OCCUPATIONS
    return [draw(genders, 0.7), draw(_AGE_SHARES, 0.7), draw(occupations, 0.4)]


def draw_events(
    catalogue: Catalogue, users: Users, activity: Int64s, rng: np.random.Generator
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
    niche = _draw_niches(taste, catalogue.niches, rng)[segment]
    movie = _draw_movies(catalogue, user, niche, rng)
    rating = _draw_ratings(catalogue, user, movie, taste[segment], rng)
    event_ts = _draw_times(user, is_first, opens, rng)
    shuffled = np.argsort(user + rng.random(len(user)), kind="stable")  # within each user
    movie_ids = catalogue.movie_ids[movie[shuffled]]
    return RatingEvents(user + users.first_id, movie_ids, rating[shuffled], event_ts[shuffled])


def _drift_tastes(users: Users, segment_user: Int64s) -> Float32s:
    """Returns `[segments, LATENT_DIM]`: a walk on the arc from first to last taste."""
    count = np.bincount(segment_user)
    step = np.arange(len(segment_user)) - np.repeat(np.cumsum(count) - count, count)
    angle = (np.pi / 2 * step / np.maximum(count[segment_user] - 1, 1)).astype(np.float32)
    first, last = users.tastes[0][segment_user], users.tastes[1][segment_user]
    return np.cos(angle)[:, None] * first + np.sin(angle)[:, None] * last


def _draw_niches(taste: Float32s, niches: Niches, rng: np.random.Generator) -> Int64s:
    logits = np.float32(_TASTE_SHARPNESS) * (taste @ niches.centres.T)
    logits -= logits.max(axis=1, keepdims=True)
    cumulative = np.cumsum(np.exp(logits, out=logits), axis=1, out=logits)
    quantile = rng.random(len(taste), dtype=np.float32) * cumulative[:, -1]
    chosen = (cumulative < quantile[:, None]).sum(axis=1)
    return np.minimum(chosen, len(niches.centres) - 1).astype(np.int64)


def _draw_movies(
    catalogue: Catalogue, user: Int64s, niche: Int64s, rng: np.random.Generator
) -> Int64s:
    """Draws a movie per event so that no user has one twice; a clash is drawn anew.

    A clash first stays in its niche, then tries near niches, then the whole catalogue by
    popularity; whatever still clashes takes unseen movies at random.
    """
    movies, niches = len(catalogue.movie_ids), catalogue.niches
    movie = np.empty(len(user), dtype=np.int64)
    taken = np.empty(0, dtype=np.int64)  # user * movies + movie of the accepted events
    clashing = np.arange(len(user))
    crowd = rng.random(len(user)) < _POPULAR_SHARE
    for attempt in range(_TRIES):
        drawn_niche = niche[clashing]
        if attempt >= _SAME_NICHE_TRIES:
            crowd[:] = False
            pick = rng.integers(NEIGHBOURS, size=len(clashing)) % niches.neighbours.shape[1]
            drawn_niche = niches.neighbours[drawn_niche, pick]
        drawn = _draw_from_niches(niches, drawn_niche, rng)
        by_crowd = crowd[clashing] | (attempt >= _TRIES - 2)
        drawn[by_crowd] = niches.popular_table[rng.integers(QUANTILES, size=int(by_crowd.sum()))]
        keys, first = np.unique(user[clashing] * movies + drawn, return_index=True)
        is_new = ~np.isin(keys, taken, assume_unique=True)
        movie[clashing[first[is_new]]] = drawn[first[is_new]]
        taken = np.append(taken, keys[is_new])
        clashing = np.delete(clashing, first[is_new])
        if not len(clashing):
            return movie
    taken.sort()
    for row in np.unique(user[clashing]).tolist():
        own = clashing[user[clashing] == row]
        low, high = np.searchsorted(taken, (row * movies, (row + 1) * movies))
        unseen = np.setdiff1d(np.arange(movies), taken[low:high] - row * movies)
        movie[own] = rng.choice(unseen, len(own), replace=False)
    return movie


def _draw_from_niches(niches: Niches, niche: Int64s, rng: np.random.Generator) -> Int64s:
    rank = niches.rank_table[rng.integers(QUANTILES, size=len(niche))]
    start = niches.starts[niche]
    return start + np.minimum(rank, niches.starts[niche + 1] - start - 1)


def _draw_ratings(
    catalogue: Catalogue, user: Int64s, movie: Int64s, taste: Float32s, rng: np.random.Generator
) -> Int64s:
    affinity = np.einsum("ij,ij->i", taste, catalogue.vectors[movie])
    mildness = rng.normal(0.0, 0.35, int(user[-1]) + 1)[user]
    noise = rng.standard_normal(len(user), dtype=np.float32) * np.float32(0.85)
    score = 3.15 + 0.27 * affinity + catalogue.quality[movie] + mildness
    return np.clip(np.rint(score + noise), 1, 5).astype(np.int64)


def _draw_times(user: Int64s, is_first: Flags, opens: Flags, rng: np.random.Generator) -> Int64s:
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
