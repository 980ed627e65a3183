import numpy as np

from etl.samples.titles import GENRES, build_titles


def test_titles_are_distinct_latin1_with_a_year():
    genres = [GENRES[i % 18] for i in range(5_000)]
    titles = build_titles(genres, np.random.default_rng(0))
    names = [title.rpartition(" (")[0].removesuffix(", The") for title in titles]
    assert len(set(names)) == len(names)
    assert all(1919 <= int(title[-5:-1]) <= 2000 and title[-1] == ")" for title in titles)
    assert not any("::" in title or "|" in title for title in titles)
    encoded = "".join(titles).encode("latin-1")
    assert any(byte > 127 for byte in encoded)
