"""What a generated sample contains: size, seed and how much dirt is mixed in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from conf.errors import ConfigError

MAX_RATINGS = 1_000_000_000
MAX_DIRT_RATE = 0.5
MIN_MOVIES = 20
MIN_RATINGS_PER_USER = 3  # leave-one-out needs a test, a validation and a train event


class SampleSize(NamedTuple):
    """The resolved size of a sample; all three are exact counts."""

    ratings: int
    users: int
    movies: int


@dataclass(frozen=True)
class DirtRates:
    """Extra lines mixed into the ratings, each as a share of the valid ratings.

    Args:
        dirty: Malformed lines (field count, non-numeric id, rating outside 1-5, empty line).
        duplicate: Exact copies of valid lines.
        unknown: Well-formed lines whose user or movie is in neither dictionary.

    Raises:
        ConfigError: A rate is not within [0, 0.5].
    """

    dirty: float = 0.001
    duplicate: float = 0.002
    unknown: float = 0.002

    def __post_init__(self) -> None:
        for name in ("dirty", "duplicate", "unknown"):
            rate = getattr(self, name)
            if not 0.0 <= rate <= MAX_DIRT_RATE:
                raise ConfigError(
                    f"the {name} rate is out of range",
                    received=rate,
                    allowed=f"0 to {MAX_DIRT_RATE}",
                    fix=f"pass a smaller --{name}-rate",
                )


@dataclass(frozen=True)
class SampleConfig:
    """Everything the bytes of a sample depend on.

    Args:
        ratings: Number of valid, distinct ratings; dirt comes on top. Up to 10^9.
        users: Number of users; None scales it with the ratings (1,500 at 100 k, 75 k at 10 M).
        movies: Number of movies; None scales it with the ratings (800 at 100 k, 8 k at 10 M).
        seed: Seed of every random stream, >= 0.
        dirt: Shares of dirty, duplicate and unknown-id lines.
        rows_per_chunk: Ratings generated at a time; bounds the memory of a worker.

    Raises:
        ConfigError: A value is out of range, or users and movies cannot hold the ratings.
    """

    ratings: int = 100_000
    users: int | None = None
    movies: int | None = None
    seed: int = 7
    dirt: DirtRates = field(default_factory=DirtRates)
    rows_per_chunk: int = 250_000

    def __post_init__(self) -> None:
        _require_range("ratings", self.ratings, 100, MAX_RATINGS)
        _require_range("seed", self.seed, 0, 2**63 - 1)
        _require_range("rows_per_chunk", self.rows_per_chunk, 1_000, 10_000_000)
        if self.users is not None:
            _require_range("users", self.users, 2, 100_000_000)
        if self.movies is not None:
            _require_range("movies", self.movies, MIN_MOVIES, 1_000_000)
        _require_capacity(self.size)

    @property
    def size(self) -> SampleSize:
        """The exact counts, with users and movies scaled from the ratings where not given.

        Users grow with exponent 0.85 and movies with 0.5, so that ratings per user and per
        movie both rise with the size, as they do from MovieLens-100K to MovieLens-25M.
        """
        scale = self.ratings / 100_000
        movies = self.movies or max(MIN_MOVIES, round(800 * math.sqrt(scale)))
        users = self.users or max(2, round(1_500 * scale**0.85))
        if self.users is None:  # given movies may be too few for that many ratings a user
            users = max(users, -(-self.ratings // max_ratings_per_user(movies)))
            users = min(users, self.ratings // MIN_RATINGS_PER_USER)
        return SampleSize(self.ratings, users, movies)

    def rng(self, stream: int, chunk: int = 0) -> np.random.Generator:
        """Returns the generator of one named stream and chunk, independent of all others."""
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(stream, chunk)))


def max_ratings_per_user(movies: int) -> int:
    """Returns the most ratings one user gives: half the catalogue."""
    return movies // 2


def _require_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(
            f"{name} is out of range",
            received=value,
            allowed=f"{low} to {high}",
            fix=f"pass --{name.replace('_', '-')} within these bounds",
        )


def _require_capacity(size: SampleSize) -> None:
    low = size.users * MIN_RATINGS_PER_USER
    high = size.users * max_ratings_per_user(size.movies)
    if not low <= size.ratings <= high:
        raise ConfigError(
            f"{size.users} users and {size.movies} movies cannot hold that many ratings",
            received=f"{size.ratings} ratings",
            allowed=f"{low} to {high} ({MIN_RATINGS_PER_USER} to half the catalogue per user)",
            fix="change --users or --movies, or leave both out to scale with --ratings",
        )
