from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from conf.dataset import read_manifest
from jobs.reporting.catalogue import ItemCatalogue, read_catalogue
from tests.jobs.reporting.fixtures import FakeConfig, write_dataset


def test_counts_fall_and_tokens_follow(finished):
    catalogue = finished.catalogue
    assert (np.diff(catalogue.counts) <= 0).all()
    assert catalogue.tokens[0].as_py() == 1
    assert len(catalogue.tokens) == len(catalogue.counts)


def test_titles_go_with_their_tokens(finished):
    # The catalogue's records are in the order of the ids, and title i belongs to token i.
    assert finished.catalogue.name("1") == "Film 1"
    assert finished.catalogue.name("60") == "Film 60"


def test_an_item_without_a_title_is_shown_by_its_token(tmp_path):
    version = write_dataset(tmp_path, FakeConfig(title=None, users=20, items=9))
    catalogue = read_catalogue(version, read_manifest(version))
    assert catalogue is not None
    assert catalogue.titles == {}
    assert catalogue.name("3") == "3"


def test_share_of_the_top():
    catalogue = ItemCatalogue(np.array([6, 2, 1, 1]), pa.array([1, 2, 3, 4]))
    assert catalogue.share_of_top(0.25) == pytest.approx(0.6)
    assert catalogue.share_of_top(0.01) == pytest.approx(0.6)
    assert catalogue.share_of_top(1.0) == 1.0
    assert ItemCatalogue(np.zeros(2, np.int64), pa.array([1, 2])).share_of_top(0.5) == 0.0
