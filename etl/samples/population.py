"""The users of a sample: attributes, latent taste and how many ratings each gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etl.samples.catalogue import LATENT_DIM
from etl.samples.config import MIN_RATINGS_PER_USER, SampleConfig, max_ratings_per_user

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
