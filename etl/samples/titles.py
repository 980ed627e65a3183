"""Movie titles in the manner of MovieLens: `Silent Harbour, The (1987)`, Latin-1, accents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GENRES = (
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
)

_NOUNS: dict[str, tuple[str, ...]] = {
    "Action": ("Pursuit", "Strike Force", "Getaway", "Fury", "Detonator", "Impact"),
    "Adventure": ("Expedition", "Voyage", "Treasure", "Island", "Compass", "Río Perdido"),
    "Animation": ("Paper Moon", "Inkwell", "Little Fox", "Clockwork Bird", "Crayon", "Marionette"),
    "Children's": ("Puppy", "Summer Camp", "Treehouse", "Bear", "Kite", "Señor Conejo"),
    "Comedy": ("Wedding", "Roommate", "Mix-Up", "Neighbour", "Fiancée", "Holiday"),
    "Crime": ("Heist", "Syndicate", "Alibi", "Informant", "Ledger", "Cellblock"),
    "Documentary": ("Orchestra", "Glacier", "Election", "Archive", "Tour", "São Paulo"),
    "Drama": ("Harbour", "Letter", "Daughter", "Été", "Inheritance", "Crossing"),
    "Fantasy": ("Dragon", "Enchantress", "Mirror", "Kingdom", "Amulet", "Märchen"),
    "Film-Noir": ("Alley", "Cigarette", "Dame", "Streetlight", "Double Cross", "Blonde"),
    "Horror": ("Crypt", "Haunting", "Séance", "Cellar", "Scarecrow", "Bloodline"),
    "Musical": ("Cabaret", "Serenade", "Footlights", "Encore", "Mélodie", "Ballroom"),
    "Mystery": ("Witness", "Cipher", "Manor", "Footprint", "Disappearance", "Hôtel"),
    "Romance": ("Promise", "Rendezvous", "Amélie's Garden", "Valentine", "Kiss", "Letter Home"),
    "Sci-Fi": ("Orbit", "Android", "Nebula", "Signal", "Replica", "Station Nine"),
    "Thriller": ("Hostage", "Deadline", "Stalker", "Conspiracy", "Fall", "Über-Agent"),
    "War": ("Battalion", "Trench", "Armistice", "Convoy", "Général", "Siege"),
    "Western": ("Gunslinger", "Canyon", "Sheriff", "Stagecoach", "El Niño", "Ranch"),
}
_ADJECTIVES = (
    "Silent",
    "Crimson",
    "Last",
    "Hidden",
    "Broken",
    "Golden",
    "Midnight",
    "Distant",
    "Wild",
    "Forgotten",
    "Electric",
    "Bitter",
    "Perfect",
    "Lonely",
    "Burning",
    "Naïve",
    "Frozen",
    "Secret",
    "Velvet",
    "Restless",
    "Stolen",
    "Blue",
    "Endless",
    "Gentle",
    "Déjà Vu",
    "Savage",
    "Invisible",
    "Second",
    "Hollow",
    "Lucky",
    "Paper",
    "Northern",
    "Sleepless",
    "Reluctant",
    "Quiet",
    "Old",
)


def build_titles(genres: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Draws one distinct title per movie, its noun in keeping with the movie's main genre.

    Args:
        genres: Main genre of each movie, one of `GENRES`.
        rng: Source of the draws.

    Returns:
        Titles with the year of release in brackets; every character is in Latin-1.
    """
    count = len(genres)
    adjectives = rng.integers(len(_ADJECTIVES), size=count).tolist()
    nouns = rng.integers(6, size=count).tolist()
    # Most catalogues are recent: years fall off from 2000 with a mean age of 12 years.
    years = (2000 - np.minimum(rng.exponential(12.0, count), 80.0).astype(np.int64)).tolist()
    articles = (rng.random(count) < 0.35).tolist()
    seen: dict[str, int] = {}
    titles = []
    for genre, adjective, noun, year, article in zip(
        genres, adjectives, nouns, years, articles, strict=True
    ):
        name = f"{_ADJECTIVES[adjective]} {_NOUNS[genre][noun]}"
        number = seen[name] = seen.get(name, 0) + 1
        sequel = f" {number}" if number > 1 else ""
        titles.append(f"{name}{sequel}{', The' if article else ''} ({year})")
    return titles
