"""Small logs in the forms that the presets read, each with a signal to learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from etl.sample_data.logs import draw_chunks, plan_clicks, write_clicks, write_sample
from etl.sample_data.ratings import DirtRates, RatingEvents, plan_sample

_ROWS = 4000
_MOVIES = plan_sample(24_000, users=400, movies=400, dirt=DirtRates(0, 0, 0))
_NEGATIVES = 99


def write_movielens(folder: Path) -> None:
    """`users.dat`, `movies.dat` and `ratings.dat` of `sluice data generate`."""
    write_sample(_MOVIES, folder)


def _draw_events() -> RatingEvents:
    """The same ratings, of each user in the order of time."""
    [chunk] = draw_chunks(_MOVIES)
    events = chunk.events
    order = np.lexsort((events.event_ts, events.user_ids))
    return RatingEvents(*(column[order] for column in events))


def _is_last(events: RatingEvents) -> npt.NDArray[np.bool_]:
    return np.diff(events.user_ids, append=-1) != 0


def _format(events: RatingEvents, chosen: npt.NDArray[np.bool_], separator: str = "\t") -> str:
    rows = zip(*(column[chosen].tolist() for column in events), strict=True)
    return "".join(f"{separator.join(map(str, row))}\n" for row in rows)


def write_ncf(folder: Path) -> None:
    """NCF's split: the last event of each user with 99 items that the user has not met."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    events, lines = _draw_events(), []
    is_last = _is_last(events)
    items = np.unique(events.movie_ids)
    for user, item in zip(events.user_ids[is_last], events.movie_ids[is_last], strict=True):
        unseen = np.setdiff1d(items, events.movie_ids[events.user_ids == user])
        negatives = rng.choice(unseen, _NEGATIVES, replace=False)
        lines.append(f"({user},{item})\t" + "\t".join(map(str, negatives)) + "\n")
    (folder / "ml-1m.train.rating").write_text(_format(events, ~is_last))
    (folder / "ml-1m.test.negative").write_text("".join(lines))


def write_sasrec(folder: Path) -> None:
    """SASRec's form: `user item` in the order of time."""
    folder.mkdir()
    events = _draw_events()
    pairs = zip(events.user_ids.tolist(), events.movie_ids.tolist(), strict=True)
    (folder / "ml-1m.txt").write_text("".join(f"{user} {item}\n" for user, item in pairs))


def write_sequences(folder: Path) -> None:
    """`user<TAB>item` in the order of time, names as text."""
    folder.mkdir()
    events = _draw_events()
    pairs = zip(events.user_ids.tolist(), events.movie_ids.tolist(), strict=True)
    (folder / "log.tsv").write_text("".join(f"u{user}\tfilm {item}\n" for user, item in pairs))


def write_fold(folder: Path) -> None:
    """A fold of MovieLens-100K: `user<TAB>item<TAB>rating<TAB>time`, a fifth of it test."""
    folder.mkdir()
    events = _draw_events()
    is_test = np.random.default_rng(1).random(len(events.user_ids)) < 0.2
    (folder / "u1.base").write_text(_format(events, ~is_test))
    (folder / "u1.test").write_text(_format(events, is_test))


def write_pairs(folder: Path) -> None:
    """Pairs of user and item as text, in no order: `user<TAB>item`, a fifth of them test."""
    folder.mkdir()
    events = _draw_events()
    draw = np.random.default_rng(1)
    users, items = events.user_ids.tolist(), events.movie_ids.tolist()
    lines = sorted({f"u{user}\tfilm {item}\n" for user, item in zip(users, items, strict=True)})
    draw.shuffle(lines)
    is_test = draw.random(len(lines)) < 0.2
    for name, of_test in (("train", False), ("test", True)):
        chosen = (line for line, test in zip(lines, is_test, strict=True) if test == of_test)
        (folder / f"{name}.tsv").write_text("".join(chosen))


def draw_libfm(rows: int, fields: int, size: int, negative: str, seed: int) -> list[str]:
    """Rows `label index:1 …`, one index of each field; fields and their weights are one space.

    Args:
        rows: Number of rows.
        fields: Number of fields, each of 20 values.
        size: Of the index space; the fields are spread over it.
        negative: The label that is not 1.
        seed: Of the rows; the weights are the same for all.
    """
    values = 20
    weights = np.random.default_rng(0).normal(0, 6 / fields, (fields, values)) * np.sqrt(fields)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, values, (rows, fields))
    logits = weights[np.arange(fields), drawn].sum(axis=1)
    labels = rng.random(rows) < 1 / (1 + np.exp(-logits))
    starts = 1 + np.arange(fields) * ((size - 1) // fields)
    return [
        f"{'1' if label else negative} " + " ".join(f"{index}:1" for index in indices)
        for label, indices in zip(labels, (drawn % ((size - 1) // fields)) + starts, strict=True)
    ]


def _write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def write_frappe(folder: Path) -> None:
    """Ten fields in an index space of 5,382; train, validation and test."""
    splits = {"train.made": _ROWS, "validation": _ROWS // 4, "test": _ROWS // 4}
    for seed, (split, rows) in enumerate(splits.items(), 1):
        lines = draw_libfm(rows, 10, 5382, "-1", seed)
        _write_lines(folder / f"frappe.{split}.libfm", lines)


def write_ipinyou(folder: Path) -> None:
    """Sixteen fields in an index space of 133,465; train and test."""
    for seed, (split, rows) in enumerate({"train": _ROWS, "test": _ROWS // 4}.items(), 1):
        _write_lines(folder / f"{split}.fm.txt", draw_libfm(rows, 16, 133_465, "0", seed))


def write_a9a(folder: Path) -> None:
    """Fourteen of 123 binary features."""
    _write_lines(folder / "a9a_123d_train.libsvm", draw_libfm(_ROWS, 14, 124, "-1", 1))


def write_criteo(folder: Path) -> None:
    """A click, 13 counts and 26 categories, of which any may be missing."""
    rng = np.random.default_rng(1)
    counts = rng.geometric(0.05, (_ROWS, 13)) - 1
    categories = rng.integers(0, 12, (_ROWS, 26))
    weights = np.random.default_rng(0).normal(0, 0.5, (26, 12))
    logits = weights[np.arange(26), categories].sum(axis=1) + 0.3 * (np.log1p(counts[:, 0]) - 2.5)
    clicks = rng.random(_ROWS) < 1 / (1 + np.exp(1 - logits))
    is_missing = rng.random((_ROWS, 39)) < 0.05
    lines = []
    for row, click in enumerate(clicks):
        values = [*map(str, counts[row]), *(f"{i:x}c{v:x}" for i, v in enumerate(categories[row]))]
        shown = ("" if gone else v for v, gone in zip(values, is_missing[row], strict=True))
        lines.append("\t".join([str(int(click)), *shown]))
    _write_lines(folder / "train_examples.txt", lines)


def write_diginetica(folder: Path) -> None:
    """Sessions within a category, and the item that came next: the one after the last, mostly."""
    items, categories = 300, 15
    rng = np.random.default_rng(1)
    _write_lines(
        folder / "item_category.tsv", [f"{i}\t{1 + i % categories}" for i in range(1, items + 1)]
    )
    for split, sessions in {"train": _ROWS, "test": _ROWS // 4}.items():
        lines = []
        for _ in range(sessions):
            category, clicks = rng.integers(1, categories + 1), rng.integers(2, 8)
            places = (rng.integers(0, items // categories) + np.arange(clicks + 1)) % (
                items // categories
            )
            own = (category + categories * places - 1) % items + 1
            if rng.random() < 0.2:
                own[-1] = rng.integers(1, items + 1)
            lines.append(" ".join(map(str, own[:-1])) + f"\t{own[-1]}")
        _write_lines(folder / f"{split}.tsv", lines)


def write_click_sessions(folder: Path) -> None:
    """What `sluice data clicks` writes."""
    write_clicks(plan_clicks(sessions=2500, videos=150), folder)


SAMPLES: dict[str, Callable[[Path], None]] = {
    "a9a": write_a9a,
    "clicks": write_click_sessions,
    "clicks_columns": write_click_sessions,
    "criteo": write_criteo,
    "demo": write_movielens,
    "diginetica": write_diginetica,
    "diginetica_columns": write_diginetica,
    "frappe": write_frappe,
    "ipinyou": write_ipinyou,
    "ml_100k_pairs": write_fold,
    "ml_1m": write_movielens,
    "ml_1m_ncf": write_ncf,
    "ml_1m_ratings": write_movielens,
    "ml_1m_sasrec": write_sasrec,
    "ml_1m_sequences": write_movielens,
    "pairs": write_pairs,
    "sequences": write_sequences,
}
"""Writes the log of a preset of a build into a folder, which it makes."""
