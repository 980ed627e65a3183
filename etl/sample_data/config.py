"""What a generated sample contains: size, seed and how much dirt is mixed in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from conf.errors import ConfigError

MIN_MOVIES = 20
MIN_RATINGS_PER_USER = 3  # leave-one-out needs a test, a validation and a train event


class SampleSize(NamedTuple):
    """The resolved size of a sample; all three are exact counts."""

    ratings: int
    users: int
    movies: int


@dataclass(frozen=True)
class DirtRates:
    """Extra lines mixed into the ratings, each as a share of the valid ratings, 0 to 0.5."""

    dirty: float = 0.001  # malformed: field count, non-numeric id, rating outside 1-5, empty line
    duplicate: float = 0.002  # exact copies of valid lines
    unknown: float = 0.002  # a user or movie that is in neither dictionary


@dataclass(frozen=True)
class SampleConfig:
    """Everything the bytes of a sample depend on.

    `ratings` are valid and distinct; dirt comes on top. Users and movies that are None scale with
    them. `rows_per_chunk` is how many are generated at a time.
    """

    ratings: int = 100_000
    users: int | None = None
    movies: int | None = None
    seed: int = 7
    dirt: DirtRates = field(default_factory=DirtRates)
    rows_per_chunk: int = 250_000

    def __post_init__(self) -> None:
        low, high = (self.size.users * n for n in (MIN_RATINGS_PER_USER, self.most_per_user))
        if not low <= self.ratings <= high:
            raise ConfigError(
                f"{self.size.users} users and {self.size.movies} movies cannot hold the ratings",
                received=f"{self.ratings} ratings",
                allowed=f"{low} to {high} ({MIN_RATINGS_PER_USER} to half the movies per user)",
                fix="change --users or --movies, or leave both out to scale with --ratings",
            )

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
            users = max(users, -(-self.ratings // (movies // 2)))
            users = min(users, self.ratings // MIN_RATINGS_PER_USER)
        return SampleSize(self.ratings, users, movies)

    @property
    def most_per_user(self) -> int:
        """The most ratings that one user gives: half of the movies."""
        return self.size.movies // 2

    def rng(self, stream: int, chunk: int = 0) -> np.random.Generator:
        """Returns the generator of one named stream and chunk, independent of all others."""
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(stream, chunk)))
