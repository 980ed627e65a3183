"""The cost model by hand, the simulated exchange against the real one, the page against both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from conf.encoders import VocabularySpec
from etl.encoders.token_lookup import TokenEncoder
from tests.bench.scale import __main__ as command
from tests.bench.scale import quantities, tables
from tests.bench.scale.exchange import (
    exchange_bytes,
    find_network_bound,
    lookup_bytes,
    ring_bytes,
    simulate,
)
from tests.bench.scale.model import (
    INDEX_LOAD,
    SLOT_BYTES,
    VOCABULARY_LOAD,
    Line,
    Quantity,
    by_decade,
    by_share,
    by_size,
    check,
    count_slots,
    fit_line,
    index_bytes,
    row_bytes,
    table_law,
)
from tests.bench.scale.page import PAGE, TABLES, fill_page
from tests.bench.scale.plan import Constants, Cost, Demand, Machine, Plan, Prices, find_limit
from tests.bench.scale.records import Records, ScaleRecord, group, read_records, write_record
from tests.bench.scale.spark_build import PeakDisk, read_event_log
from training.embedding.key_index import KeyIndex

M = 1_000_000


def record(series: str, size: int, **figures: float) -> ScaleRecord:
    return ScaleRecord(
        series, size, figures, "command", "c" * 40, "a processor", 2, 0.5, "2026-11-26"
    )


# --- the model


@pytest.mark.parametrize(
    ("law", "points", "asked", "wanted"),
    [
        (by_size, [(1, 50.0), (10, 230.0)], 100, 30 + 20 * 100),
        (by_size, [(10, 230.0)], 100, 2300),  # one record: nothing is fixed
        (by_decade, [(1e6, 10.0), (1e7, 15.0)], 1e9, 25.0),
        (by_share, [(1, 120.0), (2, 70.0)], 4, 45.0),
        (table_law(8, 0), [(1000, 2 * (32_000 + 40_768)), (2000, 2 * (64_000 + 81_536))], 4000,
         2 * (128_000 + 163_072)),
    ],
)  # fmt: skip
def test_a_line_goes_through_its_records(law, points, asked, wanted):
    line = fit_line(points, law)
    assert [line.at(size) for size, _ in points] == pytest.approx([value for _, value in points])
    assert line.at(asked) == pytest.approx(wanted)


def test_a_size_is_predicted_from_the_two_below_it():
    quantity = Quantity("build", "cpu_s", "CPU", "s")
    records = group(
        [record("build", 100, cpu_s=220.0), record("build", 1, cpu_s=3.0),
         record("build", 10, cpu_s=21.0), record("build", 1000, other=1.0)]
    )  # fmt: skip
    found = check(quantity, records)
    assert [one.size for one in found] == [1, 10, 100]
    assert [one.predicted for one in found] == [None, None, pytest.approx(201.0)]
    assert found[-1].error == pytest.approx(201 / 220 - 1)
    # Beyond all records speaks the line through the two largest.
    assert quantity.line(records).at(1000) == pytest.approx(220 + 900 * 199 / 90)
    with pytest.raises(LookupError, match="no record of train"):
        Quantity("train", "cpu_s", "CPU", "s").line(records)


def test_bytes_that_are_counted_by_hand_are_those_of_the_code():
    assert row_bytes(32, 2) == 32 * 3 * 4
    for keys in (500, 3000, 40_000):
        index = KeyIndex()
        index.set_keys(np.arange(1, keys + 1) * 977)
        slots = count_slots(keys + 2, INDEX_LOAD)
        assert index.bytes == slots * SLOT_BYTES + int(slots * INDEX_LOAD) * 8
        spec = VocabularySpec("v", "int64", "", keys + 2, "")
        encoder = TokenEncoder.of(spec, pa.table({"token": pa.array(np.arange(keys))}))
        assert encoder._slots.nbytes == count_slots(keys, VOCABULARY_LOAD) * SLOT_BYTES
    assert index_bytes(10 * M) == 2**24 * 16 + 80 * M


# --- what workers send


def test_bytes_of_three_ways_by_hand():
    # 100 rows of 3 numbers, and gradients of 4: 7 numbers of 4 bytes.
    assert exchange_bytes(100, 3) == 2800
    # Two matrices of 100 rows; of 4 workers each sends 2 x 3/4 of them.
    assert ring_bytes(100, 3, 4) == 1.5 * 2800
    assert lookup_bytes(40, 3, 4) == 0.75 * 40 * 28


def test_the_simulation_counts_the_blocks_of_the_real_plan():
    rng = np.random.default_rng(1)
    batches = [rng.integers(2, 5000, [64, 20]) for _ in range(3)]
    for workers in (1, 2, 4, 8):
        found = simulate(iter(batches), workers, 3)
        distinct = [np.unique(batch) for batch in batches]
        most = [np.bincount((rows - 2) % workers).max() for rows in distinct]
        assert found.distinct == pytest.approx(np.mean([len(rows) for rows in distinct]))
        assert found.batch == 64
        least = (workers - 1) * np.mean(most)
        assert least <= found.sent_rows <= least * 17 / 16  # blocks are padded
        assert found.exchange_bytes == exchange_bytes(found.sent_rows, 3)
        parts = [np.unique(part).size for batch in batches for part in np.split(batch, workers)]
        assert found.lookup_bytes == pytest.approx(lookup_bytes(np.mean(parts), 3, workers))


def test_the_simulation_equals_what_real_workers_counted():
    records = read_records()["exchange"]
    assert [one.size for one in records] == [1, 2, 4]
    for one in records:
        real, workers = one.figures, one.size
        if workers == 1:
            assert real["sent_rows"] == 0
            continue
        found = tables.count_traffic(
            workers, int(real["batch"]), tables.SHARED_KEYS, tables.SHARED_DIM,
            int(real["batches"]),
        )  # fmt: skip
        assert found.distinct == real["distinct"]
        assert found.sent_rows == real["sent_rows"]
        # The kernel saw these bytes, and dense weights and messages beside them.
        seen = real["loopback_bytes"] / workers
        assert found.exchange_bytes < seen < 1.25 * found.exchange_bytes


def test_the_network_is_the_bound_once_computing_is_divided_enough():
    # A batch of 8 CPU-seconds; a matrix of 1.25 GB takes 1 s at 10 Gbit/s: of 9 workers each
    # computes 8/9 s and sends for 8/9 s.
    assert find_network_bound(1.25e9, 8.0, 1, 10.0) == 10
    assert find_network_bound(1.25e9, 8.0, 4, 10.0) == 4
    assert find_network_bound(1.25e9, 8.0, 1, 0.1) == 2
    assert find_network_bound(1.25e9, 8.0, 1, 100.0) == 82


# --- the plan


def constants(**changed: object) -> Constants:
    given: dict[str, object] = {
        "build_cpu_s": Line(100.0, 25e-6), "log_bytes": Line(0.0, 30.0),
        "version_bytes": Line(0.0, 70.0), "shuffle_bytes": Line(0.0, 50.0),
        "build_gb_per_core": 1.5, "train_cpu_s": Line(50.0, 20e-6),
        "table_step_cpu_s": Line(0.02, 0.01, by_decade), "shared_step_cpu_s": Line(0.05, 0.05),
        "distinct_per_row": 10.0, "rank_cpu_s": Line(0.001, 1e-6),
        "lists_cpu_s": Line(0.001, 1e-8), "lists_bytes": Line(5e8, 300.0),
        "vocabulary_memory": Line(0.0, 50.0),
    }  # fmt: skip
    return Constants(**{**given, **changed})  # type: ignore[arg-type]


def test_machines_by_hand():
    demand = Demand(keys=100e6, dim=8, state=1, build_hours=1.0, train_hours=2.0)
    plan = Plan(constants(), demand, Machine(cores=10, memory_gb=16.0, usable=0.5))
    assert plan.build_cpu_s == 25_100
    assert plan.build_machines == 2  # 18,000 CPU-seconds each
    assert plan.table_bytes == 100e6 * 8 * 2 * 4
    # Of 8 GB a worker has 2^28 slots of 16 bytes and 0.8 GB of keys: 2.9 GB are left for rows.
    assert index_bytes(100e6) == 2**28 * 16 + 0.8e9
    assert plan.shared_memory_machines == 3
    # An epoch is 20,050 CPU-seconds; a step 0.1 for 0.08 s; 2 workers 0.15 for 0.1 s.
    assert plan.train_cpu_s(2) == pytest.approx(20_050 * 1.25 * 1.5)
    assert plan.train_machines == 3  # 50,125 CPU-seconds of 108,000
    assert plan.step_bytes(2) == 65_536 * 10 / 2 * 17 * 4
    steps_s = 1e9 / 65_536 / 7200
    assert plan.link_share(2) == pytest.approx(plan.step_bytes(2) * 8 * steps_s / 25e9)
    assert plan.request_cpu_s == pytest.approx((0.0015 + 0.011) / 2)
    assert plan.served_bytes == pytest.approx(100e6 * 32 + index_bytes(100e6) + 5e8 + 3e8)
    assert plan.serve_machines == 5  # 3,472 requests a second of 6.25 ms on 5 cores
    assert plan.checkpoint_bytes == 100e6 * (64 + 8)


def test_no_number_of_workers_helps_where_each_is_full_or_sharing_costs_what_it_brings():
    full = Plan(constants(), Demand(keys=1e9), Machine(memory_gb=64.0))
    assert full.shared_memory_machines is None
    assert full.train_machines is None
    useless = constants(shared_step_cpu_s=Line(0.0, 1.0))
    late = Plan(useless, Demand(keys=1e6, train_hours=0.01), Machine())
    assert late.shared_memory_machines == 1
    assert late.train_machines is None


def test_costs_by_hand():
    prices = Prices(vcpu_hour=0.1, gb_hour=0.01, disk_gb_month=0.73, network_gb=0.2)
    cost = Cost("build", 3600.0, 2.0, 10.0, 3.0, 0.5)
    # 72 hours of a month of 730.
    assert cost.price(prices) == pytest.approx(0.1 + 0.02 + 10 * 0.072 + 0.1)
    build, train, table, serve = Plan(constants(), Demand(keys=1e6)).list_costs()
    assert build.cpu_s == pytest.approx(25.1)
    assert build.disk_gb == pytest.approx(0.1)
    assert build.network_gb == pytest.approx(0.05)
    assert train.cpu_s == pytest.approx(20.05)
    assert train.network_gb == 0  # one worker holds a million keys and is in time
    held = (1e6 * 384 + index_bytes(1e6)) / 1e9
    assert table.memory_gb_h == pytest.approx(held * 12 / 1000)
    assert serve.cpu_s == pytest.approx(1e6 * (0.0015 + 0.011) / 2)


def test_what_is_full_first_comes_first():
    limits = Plan(constants(), Demand(), Machine()).list_limits()
    assert [limit.full_at for limit in limits] == sorted(limit.full_at for limit in limits)
    assert limits[0].part == "build"
    # 32 workers of 50 bytes a token in 153.6 GB.
    assert limits[0].full_at == pytest.approx(153.6e9 / 32 / 50, rel=2e-3)
    assert find_limit(lambda keys: 10 * keys, 1000.0) == pytest.approx(100, rel=2e-3)


# --- records, page, command line


def test_records_are_read_as_they_were_written(tmp_path):
    one, two = record("build", 10, cpu_s=1.5), record("build", 2, cpu_s=0.5)
    assert write_record(one, tmp_path).name == "build-10.json"
    write_record(two, tmp_path)
    assert read_records(tmp_path) == {"build": (two, one)}


def test_the_page_is_made_from_the_records():
    text = PAGE.read_text(encoding="utf-8")
    assert text == fill_page(text, read_records()), "run `python -m tests.bench.scale page`"
    assert all(f"<!-- table: {name} -->" in text for name in TABLES)


def test_a_table_shows_what_the_model_says():
    records = group([record("build", size, cpu_s=cpu) for size, cpu in
                     ((M, 50.0), (10 * M, 230.0), (100 * M, 2500.0))])  # fmt: skip
    text = fill_page("a\n<!-- table: checks -->\nold\n<!-- end -->\nb\n", records)
    assert "| build: CPU time | 100,000,000 events | 2,500 s | 2,030 s | -19% |" in text
    assert "old" not in text
    assert text.startswith("a\n")
    assert text.endswith("<!-- end -->\nb\n")
    constant = TABLES["constants"](records)
    assert "| -22.2 s | 25.2 s a million | 10,000,000 events and 100,000,000 events |" in constant
    assert "No record yet of train" in TABLES["machines"](records)
    missing = TABLES["missing"](records)
    assert "| `train` | 1,000,000, 10,000,000, 100,000,000 events |" in missing
    assert "`python -m tests.bench.scale measure table --dim 8 --optimizer sgd --size N`" in missing
    assert "`build`" not in missing


def test_records_of_the_checkout_have_figures_that_the_page_shows():
    records = read_records()
    for quantity in quantities.QUANTITIES:
        for one in records.get(quantity.series, ()):
            assert np.isfinite(one.figures[quantity.figure]), one.name
    for ones in records.values():
        assert all(len(one.commit) == 40 and "--size" in one.command for one in ones)


def test_stages_of_a_log_of_spark_are_summed(tmp_path):
    def stage(**counters: int) -> str:
        named = {"shuffled": "internal.metrics.shuffle.write.bytesWritten",
                 "spilled": "internal.metrics.diskBytesSpilled", "other": "x"}  # fmt: skip
        accumulables = [{"Name": named[name], "Value": n} for name, n in counters.items()]
        return json.dumps(
            {"Event": "SparkListenerStageCompleted", "Stage Info": {"Accumulables": accumulables}}
        )

    log = tmp_path / "log"
    lines = [stage(shuffled=5, other=9), '{"Event": "SparkListenerTaskEnd"}',
             stage(shuffled=7, spilled=2)]  # fmt: skip
    log.write_text("\n".join(lines), encoding="utf-8")
    assert read_event_log(log) == {"shuffle_bytes": 12, "spill_bytes": 2}


def test_the_most_on_a_disk_is_seen(tmp_path):
    with PeakDisk(tmp_path) as disk:
        (tmp_path / "a").write_bytes(b"x" * 1000)
    assert disk.bytes == 1000


def test_a_vocabulary_takes_what_its_slots_take():
    found = tables.measure_vocabulary(300_000)
    counted = count_slots(300_000, VOCABULARY_LOAD) * SLOT_BYTES
    assert counted < found["memory_bytes"] < 3 * counted


def test_a_table_that_does_not_fit_is_refused():
    with pytest.raises(MemoryError, match="GB are free"):
        tables.measure_table(10**12, 32, "adam")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["measure", "etl"], "no part etl; there are build, train"),
        (["measure", "table", "--size", "0"], "--size must be 1 or more"),
        (["measure", "table", "--dim", "16"], "say by --size what sizes of table-16-sgd"),
        (["plan", "kyes=5"], "'kyes=5': there are vcpu_hour"),
        (["plan", "keys=many"], "give a number, such as keys=100"),
        (["plan", "keys=-1"], "give a number above 0"),
    ],
)
def test_wrong_words_are_refused(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale", *words])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def full_records() -> Records:
    """Two or more records of each series, every figure a thousandth of its size and one more."""
    more = ("distinct", "batch", "sent_rows", "loopback_bytes", "exchange_bytes", "ring_bytes",
            "lookup_bytes")  # fmt: skip
    names = {quantity.figure for quantity in quantities.QUANTITIES} | set(more)
    return group(
        record(series, size, **dict.fromkeys(names, 1 + size / 1000))
        for series, sizes in quantities.SIZES.items()
        for size in sizes
    )


def test_every_table_is_made_of_records():
    records = full_records()
    for name, render in TABLES.items():
        assert "No record yet" not in render(records), name
    assert TABLES["missing"](records) == "Every size that this page wants was measured."
    rows = TABLES["checks"](records).splitlines()[2:]
    predicted = [row for row in rows if row.split("|")[4].strip()]
    assert len(predicted) == len(quantities.QUANTITIES)  # of three sizes the third
    assert len(TABLES["bounds"](records).splitlines()) == 2 + 2 * 4


def test_a_plan_for_another_demand(monkeypatch, capsys):
    monkeypatch.setattr(command, "read_records", full_records)
    prices, machine, demand = command.read_settings(["keys=1e8", "cores=8", "gb_hour=0.5"])
    assert (demand.keys, machine.cores, prices.gb_hour) == (1e8, 8, 0.5)
    assert isinstance(machine.cores, int)
    monkeypatch.setattr(sys, "argv", ["scale", "plan", "keys=1e6"])
    assert command.main() == 0
    assert "| build: machines |" in capsys.readouterr().out
    monkeypatch.setattr(command, "read_records", dict)
    with pytest.raises(SystemExit):
        command.main()
    assert "measure it first" in capsys.readouterr().err


def test_a_record_names_the_command_that_repeats_it():
    given = command.build_parser().parse_args(["measure", "table", "--optimizer", "adam"])
    assert command.describe_command("table", 7, given) == (
        "python -m tests.bench.scale measure table --size 7 --dim 8 --optimizer adam"
    )
    assert command.PARTS["table"].name(given) == "table-8-adam"
    given = command.build_parser().parse_args(["measure", "traffic", "--growing"])
    assert command.describe_command("traffic", 8, given).endswith("--size 8 --growing")


def test_one_command_measures_every_series_of_the_page():
    runs = command.list_runs(command.build_parser().parse_args(["measure", "--work", "w"]))
    found = {(command.PARTS[name].name(given), size) for name, size, given in runs}
    assert found == {
        (series, size)
        for series, sizes in quantities.SIZES.items()
        for size in sizes
        if size <= command.LARGEST_UNASKED
    }
    assert all(given.work == Path("w") for _, _, given in runs)
    few = command.build_parser().parse_args(["measure", "rank", "train", "--size", "7"])
    assert [(name, size) for name, size, _ in command.list_runs(few)] == [("rank", 7), ("train", 7)]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_build_and_a_training_are_measured(tmp_path: Path):
    given = command.build_parser().parse_args(["measure"])
    given.work = tmp_path
    built = command.measure_record("build", 20_000, given, "c" * 40).figures
    assert built["version_bytes"] > 20_000 * 30
    assert built["shuffle_bytes"] > 0
    assert built["disk_peak_bytes"] > built["version_bytes"]
    assert built["cpu_s"] > 5
    trained = command.measure_record("train", 20_000, given, "c" * 40).figures
    assert trained["examples"] >= 8 * 2048
    assert trained["run_bytes"] > 0
