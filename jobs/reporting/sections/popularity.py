"""How unequal the items are: the curve that every recommender is pulled along by."""

from __future__ import annotations

from jobs.reporting.blocks import (
    Beside,
    Column,
    Facts,
    Figure,
    Section,
    Table,
    build_table,
    missing,
)
from jobs.reporting.catalogue import ItemCatalogue
from jobs.reporting.numbers import format_count, format_share
from jobs.reporting.plots import plot_popularity
from jobs.reporting.run_data import RunData

_TOP = 10


def build_popularity(data: RunData) -> Section:
    """Rank curve beside the most frequent items."""
    lead = "How often each item occurs in the train split, from the item vocabulary."
    catalogue = data.catalogue
    if catalogue is None or not len(catalogue.counts):
        reason = data.gaps.get("catalogue") or data.gaps.get("dataset")
        text = reason or "The item vocabulary of this dataset version is empty."
        return Section("popularity", "Item popularity", lead, (missing(text),))
    label = (
        f"Line chart, both axes logarithmic: occurrences of {format_count(len(catalogue.counts))} "
        f"items by rank, from {format_count(catalogue.counts[0])} "
        f"down to {format_count(catalogue.counts[-1])}."
    )
    plot = Figure(plot_popularity(catalogue.counts, label), "Both axes are logarithmic.")
    return Section(
        "popularity", "Item popularity", lead, (_concentration(catalogue),
                                                Beside((plot, _top_items(catalogue)))),
    )  # fmt: skip


def _concentration(catalogue: ItemCatalogue) -> Facts:
    return Facts(
        (
            ("Items", format_count(len(catalogue.counts))),
            ("Occurrences", format_count(int(catalogue.counts.sum()))),
            ("Held by the top 1%", format_share(catalogue.share_of_top(0.01))),
            ("Held by the top 10%", format_share(catalogue.share_of_top(0.1))),
        )
    )


def _top_items(catalogue: ItemCatalogue) -> Table:
    total = int(catalogue.counts.sum()) or 1
    rows = []
    for token, count in zip(
        catalogue.tokens[:_TOP].to_pylist(), catalogue.counts[:_TOP].tolist(), strict=True
    ):
        rows.append([catalogue.name(str(token)), format_count(count), format_share(count / total)])
    columns = (Column("Item", numeric=False), Column("Occurrences"), Column("Share"))
    return build_table("The most frequent items.", columns, rows)
