"""A run on another version of its dataset: the same weights, rows of tables found by token.

What a run would score on rows that were built after it. Ids of the two versions are matched through
their vocabularies; a token that the run does not know reads its row of unknown values, as in the
run's export. Values that the build fits anew (the mean of a normalized column, say) cannot be
taken back, so both versions must compute such features alike.
"""

from __future__ import annotations

from conf.encoders import ColumnEncoding
from conf.errors import ConfigError
from conf.paths import read_manifest, resolve_version
from conf.run import CHECKPOINTS_DIR
from conf.schema import OOV_ID
from conf.training.train import WarmStartConfig
from etl.tfrecord.reading import find_path
from training.checkpoint.checkpoint_files import list_checkpoints
from training.checkpoint.restore import TrainedModel
from training.embedding.key_space import holding_whole_tables
from training.input.split_source import TrainingData
from training.input.vocabularies import EncodedVersion, read_encoded_version
from training.loop.optimizers import Optimizers
from training.loop.warm_start import WarmTarget, transfer_weights
from training.models.registry import build_model


def move_to_version(trained: TrainedModel, dataset: str, which: str = "best") -> TrainedModel:
    """Returns a run's model over the rows and the catalogue of another dataset version.

    Args:
        trained: The run.
        dataset: A version's directory, or the dataset's (its current version).
        which: The run's checkpoint, `best` or `last`.

    Raises:
        ConfigError: It is another dataset, or a version from before the run's own, whose test rows
            the run may have been trained on; or the versions compute a feature in other ways.
        InputDataError: A version or the checkpoint is damaged.
        UpstreamNotReadyError: There is no such version.
    """
    version_dir = resolve_version(find_path(dataset))
    manifest = read_manifest(version_dir, trained.config.input.tolerates)
    if manifest == trained.manifest:
        return trained
    _check_order(trained, manifest.dataset_name, manifest.dataset_version)
    here = read_encoded_version(version_dir, manifest)
    there = read_encoded_version(trained.version_dir, trained.manifest)
    _check_encoders(trained, here, there)
    with holding_whole_tables():
        model = build_model(trained.config.model, manifest, trained.config.seed)
    checkpoint = list_checkpoints(trained.run_dir / CHECKPOINTS_DIR / which)[-1].path
    warm = WarmStartConfig(path=str(checkpoint), moments="reset", mismatched="refuse")
    fit = trained.config.fit.model_copy(update={"warm_start": warm})
    config = trained.config.model_copy(update={"fit": fit})
    target = WarmTarget(
        model, Optimizers(config.optimizer, model, 1), TrainingData(version_dir, manifest)
    )
    try:
        transfer_weights(config, target, new_rows=OOV_ID)
    except ConfigError as error:
        raise ConfigError(
            "weights of the run do not fit this version",
            received=error.received,
            fix="train the run's config again on this version",
        ) from error
    return TrainedModel(trained.run_dir, model, trained.config, manifest, version_dir)


def _check_order(trained: TrainedModel, name: str, version: str) -> None:
    own = trained.manifest
    if name != own.dataset_name:
        raise ConfigError(
            "a run can be measured on versions of its own dataset alone",
            received=f"{name}, and the run was trained on {own.dataset_name}",
            fix="name a version of the run's dataset",
        )
    if version < own.dataset_version:
        raise ConfigError(
            "this version is older than the one that the run was trained on: the run may have "
            "been trained on its held-out rows",
            received=version,
            allowed=f"{own.dataset_version}, or a later version",
            fix="measure both runs on the version of the later one",
        )


def _check_encoders(trained: TrainedModel, here: EncodedVersion, there: EncodedVersion) -> None:
    by_token = trained.model.embedded_features
    changed = [
        name
        for name in trained.model.inputs
        if not _is_matched(name, here, there, by_token=name in by_token)
    ]
    if changed:
        raise ConfigError(
            "the versions compute features in other ways, so the run would read wrong values",
            received=", ".join(changed),
            allowed="features of a vocabulary that are embedded, or computed alike in both",
            fix="fix their values in the build's config, or keep the encoders "
            "(output.partition_overwrite: dynamic); or train the run again on this version",
        )


def _is_matched(name: str, here: EncodedVersion, there: EncodedVersion, *, by_token: bool) -> bool:
    """Whether a feature means the same in both versions, or its ids can be matched by token."""
    try:
        new, old = here.plan.column(name), there.plan.column(name)
    except KeyError:  # A label, or what the build adds: in both or in neither.
        return name in here.manifest.schema and name in there.manifest.schema
    if by_token and new.vocabulary is not None and old.vocabulary is not None:
        return True
    return new == old and _fitted(new, here) == _fitted(old, there)


def _fitted(column: ColumnEncoding, version: EncodedVersion) -> tuple[object, ...]:
    """What the build has fitted for a column: its vocabulary, its table of statistics."""
    vocabularies, tables = version.plan.vocabularies, version.plan.tables
    table = getattr(column.operation, "table", None)
    return (
        *(spec for spec in vocabularies if spec.name == column.vocabulary),
        *(spec for spec in tables if spec.name == table),
    )
