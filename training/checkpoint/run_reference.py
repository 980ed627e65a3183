"""What a run says of itself: its config, and the dataset version that it read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.artefacts.dataset import ToleratesShard, read_manifest
from conf.artefacts.run import (
    RUN_CARD_FILE,
    read_json,
)
from conf.errors import (
    InputDataError,
)
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.schema import FeatureSpec, fingerprint
from conf.storage.locations import find_path
from conf.training.train import TrainConfig
from training.reader.feature_columns import check_specs


def manifest_sha256(manifest: Manifest) -> str:
    """Returns the fingerprint of a manifest: schema, shards, vocabularies, all that it states."""
    return fingerprint(manifest.to_json())


@dataclass(frozen=True)
class RunReference:
    """The config and the dataset version that a run card names.

    Attributes:
        run_dir: Directory of the run.
        settings: The resolved config, as it was written.
        version_dir: Directory of the dataset version.
        manifest_sha256: Fingerprint of the manifest that the run read.
        specs: Features that its model was built for; none in the card of an older run.
        mixed: Directory and fingerprint of the versions of `input.mix`; None in the card of an
            older run.
    """

    run_dir: Path
    settings: Any
    version_dir: ReadablePath
    manifest_sha256: str
    specs: tuple[FeatureSpec, ...]
    mixed: tuple[tuple[ReadablePath, str], ...] | None = None

    @classmethod
    def read(cls, run_dir: Path) -> RunReference:
        """Reads the card of a run.

        Raises:
            InputDataError: It is damaged, or names no dataset version.
            UpstreamNotReadyError: There is none.
        """
        card = read_json(run_dir / RUN_CARD_FILE)
        mixed = card.get("mixed")
        try:
            return cls(
                run_dir,
                card.get("config"),
                find_path(card["dataset"]["path"]),
                str(card["dataset"]["manifest_sha256"]),
                tuple(map(FeatureSpec.from_json, (card.get("model") or {}).get("specs", ()))),
                None
                if mixed is None
                else tuple((find_path(p["path"]), str(p["manifest_sha256"])) for p in mixed),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _build_incomplete_error(run_dir, error) from error

    @property
    def config(self) -> TrainConfig:
        """The config of the run.

        Raises:
            InputDataError: The card has none, or one that is not valid.
        """
        try:
            return TrainConfig.model_validate(self.settings)
        except ValueError as error:
            raise _build_incomplete_error(self.run_dir, error) from error

    def read_manifest(self, tolerates: ToleratesShard | None = None) -> Manifest:
        """Reads the version's manifest; arguments and errors as of `read_run_manifest`."""
        return read_run_manifest(self.version_dir, self.manifest_sha256, self.specs, tolerates)


def read_run_manifest(
    version_dir: ReadablePath,
    expected_sha256: str,
    specs: Sequence[FeatureSpec] = (),
    tolerates: ToleratesShard | None = None,
) -> Manifest:
    """Reads the manifest of the dataset version that a run was trained on.

    Args:
        version_dir: Directory of the version.
        expected_sha256: Fingerprint of the manifest that the run read.
        specs: Features that its model was built for.
        tolerates: As for `conf.artefacts.dataset.read_manifest`.

    Raises:
        InputDataError: It is gone, or is not the one that the run read; names the feature that
            the model does not fit, if there is one.
    """
    manifest = read_manifest(version_dir, tolerates)
    found = manifest_sha256(manifest)
    if found != expected_sha256:
        check_specs(manifest, specs)
        raise InputDataError(
            "the dataset version is not the one that this run was trained on",
            received=f"{version_dir}: manifest {found[:12]}",
            allowed=f"manifest {expected_sha256[:12]}",
            fix="restore that version, or train again on the new one",
        )
    return manifest


def _build_incomplete_error(run_dir: Path, error: Exception) -> InputDataError:
    return InputDataError(
        f"{run_dir / RUN_CARD_FILE} is not complete",
        received=repr(error),
        fix="restore the file, or train again without --resume",
    )
