"""Evaluation of a user's whole held-out set, against a model of dictionaries and plain loops."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.artefacts.dataset import read_manifest
from tests.training.evaluation.measured import (
    build_measured,
    configure,
    measure_by_hand,
    read_ids,
)
from tests.training.tiny_dataset import TinyConfig, _draw_log, write_tiny_dataset
from training.checkpoint.restore import TrainedModel
from training.evaluation.evaluate import evaluate_split
from training.evaluation.item_index import MISSING, ItemIndex, Pairs, build_item_index, rank_top_k
from training.evaluation.metrics import RankMeasures, measure
from training.evaluation.systems import RandomSystem, read_popularity
from training.evaluation.users import UserReader, find_first_rows, rank_in_lists, read_held_out

KS = (1, 3, 10)
CONFIG = TinyConfig(users=30, items=500, events_per_user=18, leave_out=3, own_group=0.3)
_configure = partial(configure, ks=KS, batch_size=7)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    version = write_tiny_dataset(tmp_path_factory.mktemp("several"), config=CONFIG)
    return build_measured(version)


def _rank_by_hand(trained: TrainedModel, later: int, *, masks: bool) -> dict[int, list[int]]:
    items, users, genders = (read_ids(trained, n) for n in ("movie_id", "user_id", "gender"))
    index = build_item_index(trained.model, trained.version_dir, trained.manifest, 64)
    raw = {number: item for item, number in items.items()}
    lists = {}
    for user, events in _draw_log(CONFIG).events.items():
        known = events[: len(events) - later]
        recent = [items.get(item, 1) for item in known[::-1]][: CONFIG.max_len]
        vector = trained.model.embed_users(
            {
                "user_id": np.array([users[user]]),
                "gender": np.array([genders["FM"[user % 2]]]),
                "history": np.array([recent + [0] * (CONFIG.max_len - len(recent))]),
            }
        ).numpy()[0]
        scores = dict(zip(index.ids.tolist(), (index.vectors @ vector).tolist(), strict=True))
        best = [raw[i] for i in sorted(scores, key=lambda i: -scores[i])]
        lists[user] = [i for i in best if not masks or i not in set(known)]
    return lists


def _relevant(trained: TrainedModel, start: int, stop: int | None) -> dict[int, list]:
    known = read_ids(trained, "movie_id")
    found = {}
    for user, events in _draw_log(CONFIG).events.items():
        held_out = events[start:stop]
        unknown = [("unknown", n) for n, item in enumerate(held_out) if item not in known]
        found[user] = [*{item for item in held_out if item in known}, *unknown]
    return found


@pytest.mark.parametrize(
    ("split", "later", "part"), [("test", 3, (-3, None)), ("validation", 6, (-6, -3))]
)
@pytest.mark.parametrize("masks", [True, False])
def test_a_users_whole_set_is_measured_as_in_the_text_books(
    trained: TrainedModel, split: str, later: int, part: tuple, masks: bool
) -> None:
    report = evaluate_split(_configure(trained, per="user", mask_seen=masks), split)
    ranked, relevant = _rank_by_hand(trained, later, masks=masks), _relevant(trained, *part)
    [protocol] = report["protocols"]
    name = "full_unseen_per_user" if masks else "full_all_per_user"
    assert (report["headline"], protocol["name"], protocol["per"]) == (name, name, "user")
    assert report["rows"] == report["users"] == protocol["rows"] == CONFIG.users
    by_hand = [
        {m: v for k in KS for m, v in measure_by_hand(ranked[u], relevant[u], k).items()}
        for u in relevant
    ]
    expected = {name: float(np.mean([row[name] for row in by_hand])) for name in by_hand[0]}
    assert protocol["systems"]["model"] == pytest.approx(expected, abs=1e-12)
    unknown = [[item for item in items if isinstance(item, tuple)] for items in relevant.values()]
    assert protocol["outside_catalogue"] == sum(map(len, unknown)) > 0
    assert protocol["relevant"] == sum(map(len, relevant.values()))
    lost = [len(u) == len(items) for u, items in zip(unknown, relevant.values(), strict=True)]
    assert protocol["users_outside_catalogue"] == sum(lost)
    assert sum(lost) > 0  # Such a user counts, as a miss.
    found = [item for user, items in relevant.items() for item in items if item in ranked[user]]
    left_out = protocol["relevant"] - protocol["outside_catalogue"] - len(found)
    assert protocol["left_out_as_seen"] == left_out
    assert (left_out > 0) == masks
    shown = {item for user in ranked for item in ranked[user][:3]}
    size = len(read_ids(trained, "movie_id"))
    assert report["beyond_accuracy"]["coverage@3"] == pytest.approx(len(shown) / size)


def test_popularity_and_chance_are_ranked_by_the_same_rules(trained: TrainedModel) -> None:
    found = evaluate_split(_configure(trained, per="user"), "test")["protocols"][0]["systems"]
    index = build_item_index(trained.model, trained.version_dir, trained.manifest, 64)
    ids = read_ids(trained, "movie_id")
    counts = dict(zip(index.ids.tolist(), read_popularity(trained, index.ids), strict=True))
    relevant, events = _relevant(trained, -3, None), _draw_log(CONFIG).events
    for k in KS:
        rows = []
        for user, own in relevant.items():
            unseen = [item for item in ids if item not in events[user][:-3]]
            # Of items that tie the relevant ones come last.
            unseen.sort(key=lambda item, own=own: (-counts[ids[item]], item in own))
            rows.append(measure_by_hand(unseen, own, k))
        for name in rows[0]:
            assert found["popularity"][name] == pytest.approx(np.mean([r[name] for r in rows]))
    held_out = read_held_out(_configure(trained), "test", index, None)
    batches = list(UserReader(_configure(trained), "test", index, (), held_out).read())
    chance = RandomSystem(len(index), 5)
    several = [
        measure(chance.rank_users(batch, 10)[0], RankMeasures((10,)), "user")["precision@10"]
        for _ in range(500)
        for batch in batches
    ]
    left = {u: set(ids) - set(events[u][:-3]) for u in relevant}
    reachable = [len(left[u] & set(items)) / len(left[u]) for u, items in relevant.items()]
    assert np.mean(np.concatenate(several)) == pytest.approx(np.mean(reachable), rel=0.1)


def test_both_kinds_of_rows_by_default_and_the_first_is_the_headline(trained: TrainedModel) -> None:
    report = evaluate_split(_configure(trained, sampled_negatives=None), "test")
    names = ["full_unseen", "full_all", "full_unseen_per_user"]
    assert [protocol["name"] for protocol in report["protocols"]] == names
    assert (report["headline"], report["rows"]) == ("full_unseen", 90)
    assert [protocol["rows"] for protocol in report["protocols"]] == [90, 90, 30]
    both = _configure(trained, sampled_negatives=None, per=["user", "event"])
    found = evaluate_split(both, "test")
    assert found["headline"] == "full_unseen_per_user"
    assert found["labels"] == report["labels"] is not None
    assert found["protocols"] == report["protocols"]
    events = evaluate_split(_configure(trained, per="event", sampled_negatives=None), "test")
    assert events == report | {"protocols": report["protocols"][:2]}


def test_slices_add_up_and_are_cut_by_train_counts(trained: TrainedModel) -> None:
    slices = ["item_frequency", "gender", "user_frequency"]
    report = evaluate_split(_configure(trained, slices=slices, per="event"), "test")
    headline = report["protocols"][0]["systems"]
    assert list(report["slices"]) == slices
    for groups in report["slices"].values():
        assert sum(group["rows"] for group in groups) == 90
        for system in ("model", "popularity"):
            for metric, whole in headline[system].items():
                total = sum(g["rows"] * g["systems"][system][metric] for g in groups)
                assert total / 90 == pytest.approx(whole)
    counts = pq.read_table(Path(str(trained.version_dir)) / "encoders" / "movie_id.parquet")
    train = dict(zip(counts["token"].to_pylist(), counts["count"].to_pylist(), strict=True))
    held_out = [item for events in _draw_log(CONFIG).events.values() for item in events[-3:]]
    times = [train.get(item, 0) for item in held_out]
    bands = Counter("0" if n == 0 else "1-9" if n < 10 else "10-99" for n in times)
    found = {group["value"]: group["rows"] for group in report["slices"]["item_frequency"]}
    assert found == bands
    genders = {group["value"]: group["rows"] for group in report["slices"]["gender"]}
    assert genders == {"F": 45, "M": 45}
    users = evaluate_split(_configure(trained, slices=["gender"], per="user"), "test")
    assert {group["rows"] for group in users["slices"]["gender"]} == {15}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=9, max_size=9), min_size=1, max_size=4),
    st.data(),
)
def test_ties_count_against_relevant_items_and_among_themselves_once(
    values: list[list[int]], data: st.DataObject
) -> None:
    scores, k = np.array(values, np.float32), 4
    chosen = [data.draw(st.sets(st.integers(0, 8), max_size=5)) for _ in values]
    pairs = [(row, column) for row, own in enumerate(chosen) for column in sorted(own)]
    cells = np.array(pairs, np.int64).reshape(-1, 2)
    index = ItemIndex(np.arange(2, 11), scores.T.copy())
    lists = rank_top_k(np.eye(len(scores), dtype=np.float32), index, k + 1)
    columns = np.where(lists.ids == 0, MISSING, lists.ids - 2)
    ranks = rank_in_lists(lists.scores, columns, Pairs(cells[:, 0], cells[:, 1]), k)
    for row, own in enumerate(chosen):
        order = sorted(range(9), key=lambda c: (-scores[row, c], c in own, c))
        expected = sorted(order.index(c) + 1.0 for c in own)
        found = sorted(r for r in ranks[row] if not np.isnan(r))
        last = scores[row, order[k - 1]] == scores[row, order[k]]
        for want, got in zip(expected, found, strict=True):
            at_the_end = last and scores[row, order[int(want) - 1]] == scores[row, order[k]]
            assert got == (want if want <= k and not at_the_end else np.inf)


def test_the_first_record_of_a_user_is_found_by_its_number(tmp_path: Path) -> None:
    version = write_tiny_dataset(tmp_path, config=replace(CONFIG, timed=True))
    manifest = read_manifest(version)
    by_seen = find_first_rows(version, manifest, "test", 16)
    keys = replace(manifest.keys, seen=None, event_number="time")
    by_number = find_first_rows(version, replace(manifest, keys=keys), "test", 16)
    np.testing.assert_array_equal(by_number.rows, by_seen.rows)
    assert len(by_seen.rows) < manifest.split("test").rows
