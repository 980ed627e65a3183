from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from conf.dataset import read_manifest
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.manifest import Manifest
from conf.training import InputConfig
from tests.training.fixtures import TinyConfig, write_tiny_dataset
from training.input import build_train_dataset, find_mixed


def config_of(dataset: Path, weight: float = 0.25, **config) -> InputConfig:
    mix = [{"dataset": str(dataset), "weight": weight}]
    return InputConfig.model_validate({"batch_size": 50, "mix": mix, **config})


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same features; its lists are shorter in the records, and rows are of other users."""
    folder = tmp_path_factory.mktemp("other")
    return write_tiny_dataset(folder, "other", TinyConfig(seed=9, own_group=0.0))


def test_rows_come_in_their_shares(
    other: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    config = config_of(other)
    assert [found.dataset_name for _, found in find_mixed(config, tiny_manifest, ["label"])] == [
        "other"
    ]
    rates = []
    for version, settings in (
        (tiny_version, InputConfig(batch_size=50)),
        (other, InputConfig(batch_size=50)),
        (tiny_version, config),
    ):
        dataset = build_train_dataset(version, read_manifest(version), settings, epoch=0, seed=1)
        rates.append(np.mean([batch["label"].numpy().mean() for batch in dataset]))
    assert rates[0] > rates[1] + 0.3  # labels tell the datasets apart
    assert rates[2] == pytest.approx(0.75 * rates[0] + 0.25 * rates[1], abs=0.05)


def test_each_epoch_draws_the_other_dataset_in_another_order(
    other: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    """By its users, in the order in which their rows come: batches mix them anew in any case."""
    config = config_of(other, weight=0.5, batch_size=780)

    def drawn(epoch: int) -> list[tuple[int, ...]]:
        dataset = build_train_dataset(
            tiny_version, tiny_manifest, config, epoch=epoch, seed=1,
            features=["user_id", "movie_id", "label"],
        )  # fmt: skip
        batch = next(iter(dataset))
        return sorted(zip(*(batch[n].numpy().tolist() for n in batch), strict=True))

    # Half of the rows of each dataset, which half is another one in each epoch.
    common = Counter(drawn(0)) & Counter(drawn(1))
    assert sum(common.values()) < 0.8 * 780


def test_classes_are_balanced_within_each_dataset(
    other: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    config = config_of(other, class_balance={"feature": "label", "shares": {0: 0.5, 1: 0.5}})
    dataset = build_train_dataset(
        tiny_version, tiny_manifest, config, epoch=0, seed=1,
        features=["user_id"],  # the class itself is not delivered
    )  # fmt: skip
    batches = list(dataset)
    assert len(batches) == int(780 // 50 / 0.75)
    assert set(batches[0]) == {"user_id"}


def test_other_features_are_refused(tmp_path: Path, tiny_manifest: Manifest) -> None:
    shorter = write_tiny_dataset(tmp_path, "shorter", TinyConfig(max_len=5))
    with pytest.raises(InputDataError, match=r"'history'[\s\S]*max_len 5[\s\S]*max_len 8"):
        find_mixed(config_of(shorter), tiny_manifest, ["user_id", "history"])
    with pytest.raises(UpstreamNotReadyError):
        find_mixed(config_of(tmp_path / "none"), tiny_manifest, ["label"])
