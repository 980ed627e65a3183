"""Which presets have their quality measured, on what, and what is published for the same work."""

from __future__ import annotations

import re
from dataclasses import dataclass

from conf.metrics import is_minimised


@dataclass(frozen=True)
class Metric:
    """A figure of a run's `metrics.json`.

    Attributes:
        title: Name of the column.
        key: Of the model's figures.
        protocol: Of a retrieval model: which way of ranking; None: the headline, or the only task.
    """

    title: str
    key: str
    protocol: str | None = None


@dataclass(frozen=True)
class Published:
    """A row of a paper or a public table.

    Attributes:
        model: What was trained.
        figures: One for each metric of the experiment; None where none is given.
        source: Where it stands.
    """

    model: str
    figures: tuple[float | None, ...]
    source: str


@dataclass(frozen=True)
class Experiment:
    """A preset of training and how its result is read.

    Attributes:
        preset: Name of the preset of training; its dataset names that of the build.
        data: Folder of `SLUICE_DATA`; None for the generated click sessions.
        protocol: What is held out and what is ranked, in words.
        metrics: What is read of each run.
        published: Rows of the same work.
        chosen_by: What decided settings and epoch, in words.
        settings: Of `--set`, where the preset is measured with others than its own.
    """

    preset: str
    data: str | None
    protocol: str
    metrics: tuple[Metric, ...]
    chosen_by: str
    published: tuple[Published, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its runs and its record: the preset and what is set, `ml_1m_hstu_model_blocks_4`."""
        return re.sub(r"\W+", "_", "_".join((self.preset, *self.settings)))

    @property
    def best_published(self) -> tuple[Published, ...]:
        """The published rows that no other one is ahead of in every metric, by the first metric."""
        signs = [-1.0 if is_minimised(metric.key) else 1.0 for metric in self.metrics]

        def is_ahead(one: Published, other: Published) -> bool:
            pairs = zip(signs, one.figures, other.figures, strict=True)
            return all(a is not None and (b is None or s * a > s * b) for s, a, b in pairs)

        best = [p for p in self.published if not any(is_ahead(q, p) for q in self.published)]
        return tuple(sorted(best, key=lambda row: -signs[0] * (row.figures[0] or 0.0)))

    @property
    def command(self) -> str:
        """That trains it."""
        return " ".join(("sluice train", self.preset, *(f"--set {s}" for s in self.settings)))


def _ranks(*keys: str, protocol: str | None = None) -> tuple[Metric, ...]:
    titles = {"hit_rate": "HR", "ndcg": "NDCG", "recall": "Recall"}
    parts = [key.partition("@") for key in keys]
    return tuple(
        Metric(f"{titles[name]}@{k}", key, protocol)
        for key, (name, _, k) in zip(keys, parts, strict=True)
    )


_AUC = (Metric("AUC", "auc"), Metric("log loss", "log_loss"))
_TOP_10 = ("hit_rate@10", "ndcg@10")
_ML_1M_RAW = (
    "MovieLens-1M, ties of time in the order of the file: last item out, all items ranked but "
    "those that the user has met"
)
_BEST_EPOCH = "The best epoch of all validation users by NDCG@10, patience 10."
_LAST_EPOCH = "The last epoch of a fixed plan."
_BARS = "BARS leaderboard (reczoo/BARS), single best runs"
_SEQUENCES_SOURCE = "antklen/sasrec-bert4rec-recsys23"
_RECTOOLS = "MobileTeleSystems/RecTools, tutorial"
_DEEPMATCH = "DeepMatch, example notebooks"

EXPERIMENTS = (
    Experiment(
        "ml_1m_dssm",
        "ml-1m",
        "MovieLens-1M: last item out, the whole catalogue ranked, seen items kept.",
        _ranks("hit_rate@50", protocol="full_all"),
        f"{_LAST_EPOCH} Some 25 variants of the towers were compared on one seed with the test "
        "figure in view; these seeds were not among them.",
        (
            Published("DSSM", (0.3555,), _DEEPMATCH),
            Published("ComiRec", (0.4364,), _DEEPMATCH),
            Published("SDM", (0.4752,), _DEEPMATCH),
        ),
    ),
    Experiment(
        "ml_1m_sequences",
        "ml-1m",
        "MovieLens-1M: last item out, the whole catalogue ranked, seen items kept.",
        _ranks("hit_rate@50", protocol="full_all"),
        "The best epoch of all validation users by NDCG@50, patience 10.",
        (Published("SDM", (0.4752,), _DEEPMATCH),),
    ),
    Experiment(
        "ml_1m_mf",
        "ml-1m",
        "MovieLens-1M: last item out, the whole catalogue ranked, seen items kept.",
        _ranks("hit_rate@50", protocol="full_all"),
        _LAST_EPOCH,
    ),
    *(
        Experiment(
            "ml_1m_hstu",
            "ml-1m",
            f"{_ML_1M_RAW}; the time of the request is known.",
            _ranks(*_TOP_10, protocol="full_unseen"),
            _BEST_EPOCH,
            (
                Published("HSTU, 2 blocks", (0.3227, 0.1879), _RECTOOLS),
                Published("HSTU, 8 blocks", (0.3642, 0.2164), _RECTOOLS),
            ),
            settings,
        )
        for settings in ((), ("model.blocks=4",))
    ),
    Experiment(
        "ml_1m_ligr",
        "ml-1m",
        f"{_ML_1M_RAW}.",
        _ranks(*_TOP_10, protocol="full_unseen"),
        _BEST_EPOCH,
        (
            Published("SASRec", (0.2877, 0.1622), _RECTOOLS),
            Published("eSASRec", (0.3133, 0.1772), "blondered/transformer_benchmark"),
        ),
    ),
    Experiment(
        "ml_1m_sasrec",
        "ml-1m-sasrec",
        "SASRec's file (6,040 users, 3,416 items): last item out, all items ranked but those that "
        "the user has met.",
        _ranks(*_TOP_10, protocol="full_unseen"),
        _BEST_EPOCH,
        (
            Published("SASRec, one negative a position", (0.2500, 0.1341), _SEQUENCES_SOURCE),
            Published("SASRec, softmax, epoch 63", (0.3152, 0.1821), _SEQUENCES_SOURCE),
            Published("SASRec, 3,000 shared negatives", (0.3159, 0.1857), _SEQUENCES_SOURCE),
        ),
    ),
    Experiment(
        "ml_1m_ncf_mf",
        "ml-1m-ncf",
        "NCF's split of MovieLens-1M: last item out, ranked among the 99 given negatives.",
        _ranks(*_TOP_10, protocol="sampled_given"),
        f"{_LAST_EPOCH} That rule and the dimension were set after test figures had been seen.",
        (Published("matrix factorization", (0.7294, 0.4523), "Rendle et al. 2020"),),
    ),
    Experiment(
        "ml_1m_ratings",
        "ml-1m",
        "MovieLens-1M's ratings, a tenth of them out by a hash.",
        (Metric("RMSE", "rmse"), Metric("MAE", "mae")),
        "The best epoch by validation RMSE.",
    ),
    Experiment(
        "ml_100k_pairs",
        "ml-100k",
        "MovieLens-100K, first fold, pairs without times: each user's held-out items, all items "
        "ranked but those of train.",
        _ranks("recall@20", "ndcg@20", protocol="full_unseen_per_user"),
        f"{_LAST_EPOCH} Rate and temperature were chosen on pairs split off from train.",
    ),
    Experiment(
        "frappe",
        "frappe/nfm",
        "Frappe, NFM's split, training negatives drawn anew.",
        _AUC,
        "The best epoch by validation AUC; settings by validation too. Probabilities are fitted to "
        "the validation rows at the end (isotonic), which those of published rows are not.",
        (
            Published("DeepFM", (0.9842, 0.1482), _BARS),
            Published("FinalMLP", (0.9861, 0.1484), _BARS),
            Published("FinalNet", (0.9857, 0.1311), _BARS),
        ),
    ),
    Experiment(
        "a9a",
        "a9a",
        "a9a, the given test file.",
        _AUC,
        "The best epoch by validation AUC.",
    ),
    Experiment(
        "criteo",
        "criteo-10k",
        "Criteo's public sample of 10,000 rows, 1,025 of them test.",
        _AUC,
        f"{_LAST_EPOCH} Of ten epochs the second had the best validation AUC with each seed.",
    ),
    Experiment(
        "ipinyou",
        "ipinyou-deepctr",
        "iPinYou's public sample of 26,773 rows; its test part has 50 clicks, so AUC is known to "
        "0.04.",
        _AUC,
        f"{_LAST_EPOCH} Of nine settings of more epochs none was better by more than chance.",
    ),
    Experiment(
        "diginetica",
        "diginetica-coder",
        "Diginetica's sessions: is this the next item? Negatives of the same category.",
        _AUC,
        "The best epoch by validation log loss; later ones have a higher AUC and a log loss above "
        "a constant's.",
    ),
    *(
        Experiment(
            preset,
            "diginetica-coder",
            "Diginetica's sessions, 823 categories as columns, all ranked.",
            _ranks(*_TOP_10),
            f"The best epoch by validation; of {tried} settings the best one on validation.",
        )
        for preset, tried in (("diginetica_columns", "ten"), ("diginetica_columns_dssm", "two"))
    ),
    *(
        Experiment(
            preset,
            None,
            "Generated sessions (20,000), all 18 columns ranked.",
            _ranks("ndcg@5"),
            "The best epoch by validation; of two variants the better one on validation.",
        )
        for preset in ("clicks_columns", "clicks_columns_dssm")
    ),
    Experiment(
        "clicks",
        None,
        "Generated sessions (20,000): does the next click hit this video, against drawn negatives?",
        _AUC,
        "The best epoch by validation AUC.",
    ),
)
BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}
