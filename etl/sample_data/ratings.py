"""The users of a sample and their ratings: what they watch, when, and how they rate it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etl.sample_data.config import MIN_RATINGS_PER_USER, SampleConfig, max_ratings_per_user
from etl.sample_data.movies import LATENT_DIM, NEIGHBOURS, QUANTILES, Catalogue, Niches

AGE_CODES = (1, 18, 25, 35, 45, 50, 56)
OCCUPATIONS = 21
_AGE_SHARES = (0.037, 0.183, 0.347, 0.197, 0.091, 0.082, 0.063)  # MovieLens-1M
_MALE_SHARE = 0.717
_ACTIVITY_STREAM, _EFFECT_STREAM, _USER_STREAM = 3, 4, 5


@dataclass(frozen=True, eq=False)
class AttributeEffects:
    """Latent taste that comes with each attribute value, `[values, LATENT_DIM]` float32."""

    gender: npt.NDArray[np.float32]
    age: npt.NDArray[np.float32]
    occupation: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Users:
    """A contiguous range of users.

    Args:
        first_id: Id of the first user; the others follow.
        gender: `[users]` int64, 0 female, 1 male.
        age: `[users]` int64 index into `AGE_CODES`.
        occupation: `[users]` int64 in 0-20.
        tastes: `[2, users, LATENT_DIM]` float32, taste at the first and at the last event.
    """

    first_id: int
    gender: npt.NDArray[np.int64]
    age: npt.NDArray[np.int64]
    occupation: npt.NDArray[np.int64]
    tastes: npt.NDArray[np.float32]


def draw_activity(config: SampleConfig) -> npt.NDArray[np.int64]:
    """Draws how many ratings each user gives: a floor plus a log-normal share.

    Returns:
        `[users]` int64 that sums to the ratings exactly; each between 3 and half the catalogue,
        at least 20 (as in MovieLens) where the mean allows it.
    """
    size = config.size
    rng = config.rng(_ACTIVITY_STREAM)
    floor = max(MIN_RATINGS_PER_USER, min(20, size.ratings // size.users // 2))
    cap = max_ratings_per_user(size.movies)
    share = rng.lognormal(0.0, 0.9, size.users)
    spare = size.ratings - floor * size.users
    counts = np.minimum(floor + np.floor(spare * share / share.sum()).astype(np.int64), cap)
    missing = size.ratings - int(counts.sum())
    while missing > 0:  # what rounding and the cap left over goes to users below the cap
        open_users = rng.permutation(np.flatnonzero(counts < cap))
        chosen = open_users[:missing]
        extra = np.minimum(max(1, missing // len(chosen)), cap - counts[chosen])
        counts[chosen] += extra
        missing -= int(extra.sum())
    return counts


def build_effects(config: SampleConfig) -> AttributeEffects:
    """Draws what each attribute value adds to a user's taste."""
    rng = config.rng(_EFFECT_STREAM)

    def draw(shares: Sequence[float], scale: float) -> npt.NDArray[np.float32]:
        effect = rng.normal(0.0, scale, (len(shares), LATENT_DIM))
        # No taste common to all users: that would only be more popularity.
        return (effect - np.average(effect, axis=0, weights=shares)).astype(np.float32)

    return AttributeEffects(
        draw((1 - _MALE_SHARE, _MALE_SHARE), 0.7),
        draw(_AGE_SHARES, 0.7),
        draw((1.0,) * OCCUPATIONS, 0.4),
    )


def draw_users(config: SampleConfig, effects: AttributeEffects, users: range, chunk: int) -> Users:
    """Draws the attributes and tastes of one chunk's users (0-based range, ids from 1).

    Half of a taste's variance comes with the attributes. The rest drifts: the last taste
    shares only a part with the first, so recent events tell more than old ones.
    """
    rng = config.rng(_USER_STREAM, chunk)
    count = len(users)
    gender = (rng.random(count) < _MALE_SHARE).astype(np.int64)
    age = rng.choice(len(AGE_CODES), count, p=np.array(_AGE_SHARES) / sum(_AGE_SHARES))
    occupation = rng.integers(OCCUPATIONS, size=count)
    shared = effects.gender[gender] + effects.age[age] + effects.occupation[occupation]
    first = rng.normal(0.0, 0.9, (count, LATENT_DIM)).astype(np.float32)
    fresh = rng.normal(0.0, 0.9, (count, LATENT_DIM)).astype(np.float32)
    last = np.float32(0.4) * first + np.float32(0.917) * fresh  # correlation 0.4, same variance
    return Users(
        users.start + 1, gender, age, occupation, np.stack([shared + first, shared + last])
    )


def format_users(users: Users, config: SampleConfig, chunk: int) -> bytes:
    """Renders lines of `users.dat`: `UserID::Gender::Age::Occupation::Zip`."""
    rng = config.rng(_USER_STREAM, chunk).spawn(1)[0]
    zips = rng.integers(1_000, 100_000, size=len(users.gender)).tolist()
    extensions = rng.integers(1, 10_000, size=len(zips)).tolist()
    extended = (rng.random(len(zips)) < 0.01).tolist()  # MovieLens has a few ZIP+4 codes
    rows = zip(
        users.gender.tolist(),
        users.age.tolist(),
        users.occupation.tolist(),
        zips,
        extensions,
        extended,
        strict=True,
    )
    return "".join(
        f"{user_id}::{'FM'[gender]}::{AGE_CODES[age]}::{occupation}::{code:05d}"
        f"{f'-{extension:04d}' if extend else ''}\n"
        for user_id, (gender, age, occupation, code, extension, extend) in enumerate(
            rows, users.first_id
        )
    ).encode("latin-1")


Int64s = npt.NDArray[np.int64]

FIRST_TS, LAST_TS = 956_703_932, 1_046_454_590  # seconds; the span of MovieLens-1M
_SEGMENT_EVENTS = 8  # mean number of consecutive events in one niche
_POPULAR_SHARE = 0.15  # events that follow the crowd and not the taste
_TASTE_SHARPNESS = 2.2
_SAME_NICHE_TRIES, _TRIES = 2, 8
_MEAN_RATING, _AFFINITY_WEIGHT = 3.15, 0.27


@dataclass(frozen=True, eq=False)
class RatingEvents:
    """Valid ratings of a chunk, grouped by user, not in time order within a user.

    Args:
        user_ids: `[rows]` int64, ascending.
        movie_ids: `[rows]` int64, distinct within a user.
        ratings: `[rows]` int64 in 1-5.
        event_ts: `[rows]` int64 seconds since the epoch; a few ties within a user.
    """

    user_ids: Int64s
    movie_ids: Int64s
    ratings: Int64s
    event_ts: Int64s


def draw_events(
    catalogue: Catalogue, users: Users, activity: Int64s, rng: np.random.Generator
) -> RatingEvents:
    """Draws all events of a range of users.

    A user's events form segments of about eight; each segment stays in one niche, drawn by a
    softmax over the taste of that moment, which drifts from the user's first to the last taste.

    Args:
        catalogue: The movies.
        users: The users of the chunk.
        activity: `[users]` int64, number of events of each user.
        rng: The chunk's stream.

    Returns:
        Exactly `activity.sum()` events.
    """
    user = np.repeat(np.arange(len(activity)), activity)
    is_first = np.zeros(len(user), dtype=bool)
    is_first[np.cumsum(activity) - activity] = True
    opens = is_first | (rng.random(len(user)) < 1.0 / _SEGMENT_EVENTS)
    segment = np.cumsum(opens) - 1
    segment_user = user[opens]
    taste = _drift_tastes(users, segment_user)
    niche = _draw_niches(taste, catalogue.niches, rng)[segment]
    movie = _draw_movies(catalogue, user, niche, rng)
    rating = _draw_ratings(catalogue, user, movie, taste[segment], rng)
    event_ts = _draw_times(user, is_first, opens, np.bincount(segment_user), rng)
    shuffled = np.argsort(user + rng.random(len(user)), kind="stable")  # within each user
    return RatingEvents(
        user + users.first_id,
        catalogue.movie_ids[movie[shuffled]],
        rating[shuffled],
        event_ts[shuffled],
    )


def _drift_tastes(users: Users, segment_user: Int64s) -> npt.NDArray[np.float32]:
    """Returns `[segments, LATENT_DIM]`: a walk on the arc from first to last taste."""
    count = np.bincount(segment_user)
    step = np.arange(len(segment_user)) - np.repeat(np.cumsum(count) - count, count)
    angle = (np.pi / 2 * step / np.maximum(count[segment_user] - 1, 1)).astype(np.float32)
    first, last = users.tastes[0][segment_user], users.tastes[1][segment_user]
    return np.cos(angle)[:, None] * first + np.sin(angle)[:, None] * last


def _draw_niches(
    taste: npt.NDArray[np.float32], niches: Niches, rng: np.random.Generator
) -> Int64s:
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
    movies = len(catalogue.movie_ids)
    movie = np.empty(len(user), dtype=np.int64)
    taken: list[Int64s] = []  # per attempt: sorted user * movies + movie of accepted events
    open_slots = np.arange(len(user))
    crowd = rng.random(len(user)) < _POPULAR_SHARE
    for attempt in range(_TRIES):
        if attempt == _SAME_NICHE_TRIES:
            crowd = np.zeros(len(user), dtype=bool)
        drawn_niche = niche[open_slots]
        if attempt >= _SAME_NICHE_TRIES:
            pick = rng.integers(NEIGHBOURS, size=len(open_slots))
            pick %= catalogue.niches.neighbours.shape[1]
            drawn_niche = catalogue.niches.neighbours[drawn_niche, pick]
        drawn = _draw_from_niches(catalogue.niches, drawn_niche, rng)
        by_crowd = crowd[open_slots] | (attempt >= _TRIES - 2)
        quantiles = rng.integers(QUANTILES, size=int(by_crowd.sum()))
        drawn[by_crowd] = catalogue.niches.popular_table[quantiles]
        keys, accepted = _first_of_each(user[open_slots] * movies + drawn, taken)
        movie[open_slots[accepted]] = drawn[accepted]
        taken.append(keys)
        open_slots = np.delete(open_slots, accepted)
        if not len(open_slots):
            return movie
    _fill_unseen(movie, open_slots, user, np.sort(np.concatenate(taken)), movies, rng)
    return movie


def _draw_from_niches(niches: Niches, niche: Int64s, rng: np.random.Generator) -> Int64s:
    rank = niches.rank_table[rng.integers(QUANTILES, size=len(niche))]
    start = niches.starts[niche]
    return start + np.minimum(rank, niches.starts[niche + 1] - start - 1)


def _first_of_each(keys: Int64s, taken: list[Int64s]) -> tuple[Int64s, Int64s]:
    """Returns the distinct keys not yet taken and the position of the first of each."""
    # The position rides in the low bits: one plain sort, the fastest that numpy has.
    bits = max(1, (len(keys) - 1).bit_length())
    packed = np.sort((keys << bits) | np.arange(len(keys)))
    key, position = packed >> bits, packed & ((1 << bits) - 1)
    keep = np.ones(len(key), dtype=bool)
    keep[1:] = key[1:] != key[:-1]
    for earlier in taken:
        if len(earlier):
            found = np.minimum(np.searchsorted(earlier, key), len(earlier) - 1)
            keep &= earlier[found] != key
    return key[keep], position[keep]


def _fill_unseen(
    movie: Int64s,
    slots: Int64s,
    user: Int64s,
    taken: Int64s,
    movies: int,
    rng: np.random.Generator,
) -> None:
    for row in np.unique(user[slots]).tolist():
        own = slots[user[slots] == row]
        low, high = np.searchsorted(taken, (row * movies, (row + 1) * movies))
        unseen = np.ones(movies, dtype=bool)
        unseen[taken[low:high] - row * movies] = False
        movie[own] = rng.choice(np.flatnonzero(unseen), len(own), replace=False)


def _draw_ratings(
    catalogue: Catalogue,
    user: Int64s,
    movie: Int64s,
    taste: npt.NDArray[np.float32],
    rng: np.random.Generator,
) -> Int64s:
    affinity = np.einsum("ij,ij->i", taste, catalogue.vectors[movie])
    mildness = rng.normal(0.0, 0.35, int(user[-1]) + 1)[user]
    noise = rng.standard_normal(len(user), dtype=np.float32) * np.float32(0.85)
    score = _MEAN_RATING + _AFFINITY_WEIGHT * affinity + catalogue.quality[movie] + mildness
    return np.clip(np.rint(score + noise), 1, 5).astype(np.int64)


def _draw_times(
    user: Int64s,
    is_first: npt.NDArray[np.bool_],
    opens: npt.NDArray[np.bool_],
    segments: Int64s,
    rng: np.random.Generator,
) -> Int64s:
    """Times never fall within a user: seconds inside a segment (ties occur), days between."""
    start = FIRST_TS + rng.random(len(segments)) * 0.9 * (LAST_TS - FIRST_TS)
    span = (LAST_TS - start) * rng.uniform(0.02, 0.7, len(segments))
    gap = np.floor(rng.standard_exponential(len(user)) * 45.0)
    gap[opens] = np.floor(
        rng.standard_exponential(int(opens.sum())) * (span / segments)[user[opens]]
    )
    gap[is_first] = 0.0
    elapsed = np.cumsum(gap)
    elapsed -= elapsed[is_first][user]
    total = elapsed[np.append(is_first[1:], True)]
    room = (LAST_TS - start) * rng.uniform(0.9, 1.0, len(segments))
    shrink = np.minimum(1.0, room / np.maximum(total, 1.0))  # the few that overran the span
    return np.floor(np.floor(start)[user] + elapsed * shrink[user]).astype(np.int64)
