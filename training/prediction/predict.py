"""Ranked lists of items as gzip'ed JSON lines, by a model of either kind.

    {"user": <raw token>, "items": [<raw token>, …], "scores": [<float>, …]}

One object per row, items best first. Where rows have no user, `row` is the row's number, from 1;
rows of a file may bring an `id`. Scores are dot products, or of a ranking model what it predicts of
its task. The same run gives the same bytes.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from conf.atomic_output import atomic_file
from conf.run import RECOMMENDATIONS_FILE
from conf.schema import PAD_ID
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import ItemIds, TopK
from training.prediction.list_rows import ListSource, check_mask, read_lists
from training.prediction.rankers import NamedRows, build_ranker
from training.prediction.raw_rows import RawFile


@dataclass(frozen=True)
class PredictionCounts:
    """Users of a file of recommendations.

    Attributes:
        users: Users with a list.
        users_outside_vocabulary: Users left out, as their raw token is not known.
    """

    users: int
    users_outside_vocabulary: int


def write_recommendations(
    trained: TrainedModel,
    k: int,
    mask_seen: bool,
    source: ListSource | None = None,
    *,
    task: str | None = None,
    candidates: RawFile | None = None,
    target: Path | None = None,
) -> tuple[Path, PredictionCounts]:
    """Writes ranked lists; an earlier file is replaced when the new one is complete.

    Args:
        trained: The run's model.
        k: Length of a list; shorter where fewer items are left.
        mask_seen: Whether items that the user has met are left out. Rows that belong to no user,
            and those of a file, have met none.
        source: Rows that get lists; None: those of the split that `choose_split` names. Rows that
            hold candidates have these ranked, the row's own item among them; others the whole
            catalogue.
        task: Task of a ranking model whose score ranks; None: the first.
        candidates: File of the items that are ranked for every row instead.
        target: File to write; None: `recommendations.json.gz` of the run.

    Returns:
        The file, and what is in it.

    Raises:
        ConfigError: Seen items shall be left out, but the data set does not carry them.
        InputDataError: A record, row or vocabulary is damaged, or a vector is not finite.
    """
    source = (source or ListSource()).resolve(trained)
    mask_seen = check_mask(trained, source, mask_seen, has_pool=candidates is not None)
    ranker = build_ranker(trained, task, candidates)
    rows = read_lists(trained, ranker, source, mask_seen, has_pool=candidates is not None)
    target = target or trained.run_dir / RECOMMENDATIONS_FILE
    total = written = 0
    with atomic_file(target) as unfinished, open_lists(unfinished) as out:
        for batch in rows:
            found = ranker.rank(batch, k)
            lines = format_lists(batch, found, ranker.items, ranker.tokens)
            out.write("".join(lines).encode())
            total, written = total + len(batch), written + len(lines)
    return target, PredictionCounts(written, total - written)


@contextmanager
def open_lists(path: Path) -> Iterator[gzip.GzipFile]:
    """Opens a file of lists for writing: no name and no time in it, so the same give the same."""
    with (
        path.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=6, mtime=0) as out,
    ):
        yield out


def format_lists(
    rows: NamedRows, found: TopK, items: ItemIds, tokens: NDArray[np.object_]
) -> list[str]:
    """Returns one JSON line per row whose name is known.

    Args:
        rows: What names the lists.
        found: The lists.
        items: What is ranked.
        tokens: Their raw values as JSON text, `[items]` of objects.
    """
    lengths = np.count_nonzero(found.ids != PAD_ID, axis=1)
    columns = items.columns_of(found.ids)
    # Arrow writes the shortest decimal that reads back as the same float32.
    scores = pa.array(found.scores.ravel()).cast(pa.string()).to_numpy(zero_copy_only=False)
    scores = scores.reshape(found.scores.shape)
    return [
        f'{{"{rows.key}": {name}, "items": [{", ".join(tokens[columns[row, :length]])}], '
        f'"scores": [{", ".join(scores[row, :length])}]}}\n'
        for row, (name, length) in enumerate(zip(rows.names, lengths, strict=True))
        if name is not None
    ]
