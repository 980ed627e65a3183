"""Ranked lists of items, by a model of either kind.

    {"user": <raw token>, "items": [<raw token>, …], "scores": [<float>, …]}

One object per row, items best first; `result_files.py` writes it. Where rows have no user, `row` is
the row's number, from 1; rows of a file may bring an `id`. Scores are dot products, or of a ranking
model what it predicts of its task. The same run gives the same bytes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from conf.artefacts.run import RECOMMENDATIONS_FILE
from conf.schema import PAD_ID
from conf.storage.atomic_output import atomic_file
from training.checkpoint.restore import TrainedModel
from training.evaluation.item_index import ItemIds, TopK
from training.prediction.rankers import NamedRows, build_ranker
from training.prediction.result_files import ResultWriter, check_format
from training.prediction.rows_to_rank import ListSource, check_mask, read_lists
from training.raw_inputs.files import RawFile

_log = logging.getLogger("sluice.training.predict")


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
        ConfigError: Seen items shall be left out, but the data set does not carry them; or the
            file's name does not say how it is written.
        InputDataError: A record, row or vocabulary is damaged, or a vector is not finite.
    """
    target = target or trained.run_dir / RECOMMENDATIONS_FILE
    check_format(target)
    source = (source or ListSource()).resolve(trained)
    mask_seen = check_mask(trained, source, mask_seen, has_pool=candidates is not None)
    ranker = build_ranker(trained, task, candidates)
    rows = read_lists(trained, ranker, source, mask_seen, has_pool=candidates is not None)
    total = written = 0
    with atomic_file(target) as unfinished, ResultWriter(unfinished, target.name) as writer:
        for batch in rows:
            ranked = ranker.rank(batch, k)
            lists = build_lists(batch, ranked, ranker.items, ranker.tokens)
            if batch.numbers is not None:
                lists |= {"row": batch.numbers.filter(pa.array(batch.are_named))}
            writer.write(lists)
            total, written = total + len(batch), written + len(lists[batch.key])
    if left_out := total - written:
        _log.warning(
            "%s of %s lists are of users outside the vocabulary and not written",
            f"{left_out:,}", f"{total:,}",
        )  # fmt: skip
    return target, PredictionCounts(written, left_out)


def build_lists(
    rows: NamedRows, found: TopK, items: ItemIds, tokens: pa.Array
) -> dict[str, pa.Array]:
    """Builds the lists of rows, without those of users whose name is not known.

    Args:
        rows: What names the lists.
        found: The lists.
        items: What is ranked.
        tokens: Their raw values, `[items]`.

    Returns:
        What names the lists, by `rows.key`, and `items` and `scores`, best first.
    """
    kept = rows.are_named
    lengths = np.count_nonzero(found.ids != PAD_ID, axis=1)[kept]
    inside = np.arange(found.ids.shape[1]) < lengths[:, np.newaxis]
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    columns = items.columns_of(found.ids[kept][inside]).astype(np.int32)
    entries = pa.DictionaryArray.from_arrays(pa.array(columns), tokens)
    return {
        rows.key: rows.names.filter(pa.array(kept)),
        "items": pa.ListArray.from_arrays(ends, entries),
        "scores": pa.ListArray.from_arrays(ends, pa.array(found.scores[kept][inside])),
    }
