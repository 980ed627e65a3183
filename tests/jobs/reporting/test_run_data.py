from __future__ import annotations

import gzip
import shutil

import numpy as np
import pyarrow as pa
import pytest

from conf.artefacts.dataset import read_manifest
from conf.artefacts.run import HISTORY_FILE, METRICS_FILE, RECOMMENDATIONS_FILE, RUN_CARD_FILE
from conf.errors import InputDataError, UpstreamNotReadyError
from jobs.reporting.run_data import SAMPLE_USERS, ItemCatalogue, read_catalogue, read_run
from tests.jobs.reporting.fixtures import FakeConfig, write_dataset


def test_reads_every_part(finished):
    assert finished.gaps == {}
    assert len(finished.epochs) == 8
    assert finished.manifest is not None
    assert finished.metrics is not None
    assert len(finished.lists) == SAMPLE_USERS
    assert finished.model_name == "DSSM"


def test_a_history_that_is_an_empty_list_is_no_gap(run_copy):
    (run_copy / HISTORY_FILE).write_text("[]")
    data = read_run(run_copy)
    assert (data.epochs, dict(data.gaps)) == ((), {})


@pytest.mark.parametrize(
    ("file", "part"),
    [(HISTORY_FILE, "history"), (METRICS_FILE, "metrics"), (RECOMMENDATIONS_FILE, "lists")],
)
def test_a_damaged_part_is_a_gap(run_copy, file, part):
    (run_copy / file).write_bytes(b"\x00 not what it was {")
    data = read_run(run_copy)
    assert list(data.gaps) == [part]


def test_missing_parts_are_gaps_that_name_the_command(run_copy):
    for file in (HISTORY_FILE, METRICS_FILE, RECOMMENDATIONS_FILE):
        (run_copy / file).unlink()
    gaps = read_run(run_copy).gaps
    assert "sluice evaluate" in gaps["metrics"]
    assert "sluice predict" in gaps["lists"]


def test_a_truncated_list_file_is_a_gap(run_copy):
    file = run_copy / RECOMMENDATIONS_FILE
    file.write_bytes(file.read_bytes()[:40])
    assert "lists" in read_run(run_copy).gaps


def test_one_endless_line_does_not_fill_the_memory(run_copy):
    with gzip.open(run_copy / RECOMMENDATIONS_FILE, "wt") as handle:
        handle.write('{"user": "' + "x" * 3_000_000 + '"}')
    assert "lists" in read_run(run_copy).gaps


def test_a_dataset_that_is_gone_is_a_gap(run_copy, edit, tmp_path):
    edit(run_copy / RUN_CARD_FILE, dataset={"path": str(tmp_path / "gone")})
    data = read_run(run_copy)
    assert data.manifest is None
    assert "gone" in data.gaps["dataset"]


def test_a_card_without_a_dataset_falls_back_to_the_config(run_copy, edit, finished):
    edit(run_copy / RUN_CARD_FILE, dataset=None)
    data = read_run(run_copy)
    assert data.version == finished.version


def test_damaged_vocabularies_are_a_gap_and_the_rest_is_kept(run_copy, edit, finished, tmp_path):
    version = shutil.copytree(finished.version, tmp_path / "version")
    file = version / "encoders" / "movie_id.parquet"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    edit(run_copy / RUN_CARD_FILE, dataset={"path": str(version)})
    found = read_run(run_copy)
    assert list(found.gaps) == ["catalogue"]
    assert found.manifest is not None


def test_no_card_no_run(tmp_path):
    with pytest.raises(UpstreamNotReadyError):
        read_run(tmp_path)


def test_a_damaged_card_is_refused(run_copy):
    (run_copy / RUN_CARD_FILE).write_text("[]")
    with pytest.raises(InputDataError):
        read_run(run_copy)


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
