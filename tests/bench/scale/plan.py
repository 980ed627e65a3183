"""What the model says for a demand: cost of a million events, machines, and what is full first.

Prices and machines are assumptions, public list prices in their order of magnitude; nothing of
them was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tests.bench.scale import quantities as q
from tests.bench.scale.exchange import BITS, exchange_bytes
from tests.bench.scale.model import (
    KEY_BYTES,
    NUMBER_BYTES,
    Line,
    index_bytes,
    row_bytes,
)
from tests.bench.scale.records import Records, ScaleRecord

HOUR_S, DAY_S, MONTH_H = 3600.0, 86_400.0, 730.0
MILLION, GB = 1e6, 1e9
MOST_ROWS_WITH_RULES = 2**32
"""A table with rules counts its rows in 32 bits."""


@dataclass(frozen=True)
class Prices:
    """What is paid, in dollars: an assumption.

    Attributes:
        vcpu_hour: For a virtual core, an hour.
        gb_hour: For a gigabyte of memory, an hour.
        disk_gb_month: For a gigabyte on disk, a month.
        network_gb: For a gigabyte sent between machines.
    """

    vcpu_hour: float = 0.04
    gb_hour: float = 0.005
    disk_gb_month: float = 0.03
    network_gb: float = 0.01


@dataclass(frozen=True)
class Machine:
    """A machine to rent: an assumption. A virtual core is taken for one of those measured on.

    Attributes:
        cores: Virtual cores.
        memory_gb: Memory.
        link_gbit_s: Speed of its network, each way.
        usable: Share of each that a plan may use.
    """

    cores: int = 32
    memory_gb: float = 256.0
    link_gbit_s: float = 25.0
    usable: float = 0.6

    @property
    def room(self) -> float:
        """Bytes of memory that a plan may use."""
        return self.memory_gb * GB * self.usable


@dataclass(frozen=True)
class Demand:
    """What is asked for.

    Attributes:
        events_per_day: That are built, and trained on once.
        keys: Of all tables, and tokens of all vocabularies, together.
        dim: Numbers of a row.
        state: Numbers that the optimizer keeps for each: 2 of Adam.
        batch: Rows of a global batch.
        items: That lists are chosen from.
        candidates: That a request to score has.
        requests_per_day: Half of them score candidates, half want a list.
        peak: Requests of the busiest second, of those of a mean one.
        build_hours: That the build of a day may take.
        train_hours: That the training of a day may take.
        days_kept: Of logs and versions.
        checkpoints: That are kept.
    """

    events_per_day: float = 1e9
    keys: float = 1e9
    dim: int = 32
    state: int = 2
    batch: int = 65_536
    items: float = 1e6
    candidates: float = 500.0
    requests_per_day: float = 1e8
    peak: float = 3.0
    build_hours: float = 4.0
    train_hours: float = 12.0
    days_kept: float = 7.0
    checkpoints: int = 3


@dataclass(frozen=True)
class Constants:
    """The model's constants, each the line of some records.

    Attributes:
        build_cpu_s: By events.
        log_bytes: By events.
        version_bytes: By events.
        shuffle_bytes: By events.
        build_gb_per_core: Memory of a core's share of the JVM, and of its Python worker.
        train_cpu_s: By events.
        table_step_cpu_s: By keys.
        shared_step_cpu_s: By workers.
        distinct_per_row: Distinct table rows of a row of a large batch.
        rank_cpu_s: By candidates.
        lists_cpu_s: By items.
        lists_bytes: By items.
        vocabulary_memory: By tokens.
    """

    build_cpu_s: Line
    log_bytes: Line
    version_bytes: Line
    shuffle_bytes: Line
    build_gb_per_core: float
    train_cpu_s: Line
    table_step_cpu_s: Line
    shared_step_cpu_s: Line
    distinct_per_row: float
    rank_cpu_s: Line
    lists_cpu_s: Line
    lists_bytes: Line
    vocabulary_memory: Line


BUILD_CORES = 2
"""Of the Spark that builds were measured with."""


def derive_constants(records: Records) -> Constants:
    """Reads the constants off the records.

    Raises:
        LookupError: A series has no record.
    """
    build, traffic = _largest(records, "build"), _largest(records, "traffic-fixed")
    jvm, worker = build.figures["jvm_peak_bytes"], build.figures["worker_peak_bytes"]
    return Constants(
        build_cpu_s=q.BUILD_CPU.line(records),
        log_bytes=q.LOG_BYTES.line(records),
        version_bytes=q.VERSION_BYTES.line(records),
        shuffle_bytes=q.SHUFFLE_BYTES.line(records),
        build_gb_per_core=(jvm / BUILD_CORES + worker) / GB,
        train_cpu_s=q.TRAIN_CPU.line(records),
        table_step_cpu_s=q.WIDE_STEP.line(records),
        shared_step_cpu_s=q.SHARED_STEP.line(records),
        distinct_per_row=traffic.figures["distinct"] / traffic.figures["batch"],
        rank_cpu_s=q.RANK_CPU.line(records),
        lists_cpu_s=q.LISTS_CPU.line(records),
        lists_bytes=q.LISTS_MEMORY.line(records),
        vocabulary_memory=q.VOCABULARY_MEMORY.line(records),
    )


def _largest(records: Records, series: str) -> ScaleRecord:
    if not (found := records.get(series)):
        raise LookupError(f"no record of {series}: measure it first")
    return found[-1]


@dataclass(frozen=True)
class Cost:
    """What a part takes for a million events; of serving, for a million requests.

    Attributes:
        part: Its name.
        cpu_s: CPU seconds.
        memory_gb_h: Gigabytes of memory times hours.
        disk_gb: That stay on disk.
        disk_days: How long they stay.
        network_gb: Sent between machines.
    """

    part: str
    cpu_s: float
    memory_gb_h: float
    disk_gb: float
    disk_days: float
    network_gb: float

    def price(self, prices: Prices) -> float:
        """Dollars."""
        months = self.disk_days * 24 / MONTH_H
        return (
            self.cpu_s / HOUR_S * prices.vcpu_hour
            + self.memory_gb_h * prices.gb_hour
            + self.disk_gb * months * prices.disk_gb_month
            + self.network_gb * prices.network_gb
        )


@dataclass(frozen=True)
class Plan:
    """What the model says for a demand on machines of one kind.

    Attributes:
        constants: Of the model.
        demand: What is asked for.
        machine: What is rented.
    """

    constants: Constants
    demand: Demand = Demand()
    machine: Machine = Machine()

    @property
    def build_cpu_s(self) -> float:
        """CPU seconds of a day's build."""
        return self.constants.build_cpu_s.at(self.demand.events_per_day)

    @property
    def build_machines(self) -> int:
        """Machines that build a day in time."""
        return self._count(self.build_cpu_s, self.demand.build_hours)

    @property
    def table_bytes(self) -> float:
        """Bytes of all rows with the optimizer's state."""
        return self.demand.keys * row_bytes(self.demand.dim, self.demand.state)

    @property
    def shared_memory_machines(self) -> int | None:
        """Workers that hold the table; None: the index, which each has, leaves no room."""
        left = self.machine.room - index_bytes(self.demand.keys)
        return math.ceil(self.table_bytes / left) if left > 0 else None

    def train_cpu_s(self, workers: int) -> float:
        """CPU seconds of a day's training by so many workers, all together.

        The epoch that was measured, times how much slower a step is on a table of this size than
        on one of its size, times what sharing adds.
        """
        c, events = self.constants, self.demand.events_per_day
        step, shared = c.table_step_cpu_s, c.shared_step_cpu_s
        growth = step.at(self.demand.keys) / step.at(MILLION)
        return c.train_cpu_s.at(events) * growth * shared.at(workers) / shared.at(1)

    @property
    def train_machines(self) -> int | None:
        """Workers that hold the table and train a day in time; None: no number of them does."""
        if (workers := self.shared_memory_machines) is None:
            return None
        while self._count(self.train_cpu_s(workers), self.demand.train_hours) > workers:
            more = workers + 1
            if self.train_cpu_s(more) / more >= self.train_cpu_s(workers) / workers:
                return None
            workers = more
        return workers

    def step_bytes(self, workers: int) -> float:
        """Bytes that a worker sends in a step."""
        rows = self.demand.batch * self.constants.distinct_per_row * (workers - 1) / workers
        return exchange_bytes(rows, self.demand.dim)

    def link_share(self, workers: int) -> float:
        """Share of a worker's link that a training in time takes."""
        steps_s = self.demand.events_per_day / self.demand.batch
        sent = self.step_bytes(workers) * steps_s * BITS / (self.demand.train_hours * HOUR_S)
        return sent / (self.machine.link_gbit_s * 1e9)

    @property
    def request_cpu_s(self) -> float:
        """CPU seconds of a mean request."""
        c = self.constants
        return (c.rank_cpu_s.at(self.demand.candidates) + c.lists_cpu_s.at(self.demand.items)) / 2

    @property
    def served_bytes(self) -> float:
        """Bytes that each server holds: rows without state, their index, and items."""
        rows = self.demand.keys * self.demand.dim * NUMBER_BYTES + index_bytes(self.demand.keys)
        return rows + self.constants.lists_bytes.at(self.demand.items)

    @property
    def serve_machines(self) -> int:
        """Machines that answer the busiest second; each must hold `served_bytes`."""
        busiest = self.demand.requests_per_day / DAY_S * self.demand.peak * self.request_cpu_s
        return math.ceil(busiest / (self.machine.cores * self.machine.usable))

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of a checkpoint's table: rows, state, keys."""
        return self.table_bytes + self.demand.keys * KEY_BYTES

    def _count(self, cpu_s: float, hours: float) -> int:
        return math.ceil(cpu_s / (hours * HOUR_S * self.machine.cores * self.machine.usable))

    def list_costs(self) -> list[Cost]:
        """What a million events cost: build, train, table; and a million requests."""
        c, d = self.constants, self.demand
        millions = d.events_per_day / MILLION
        workers = self.train_machines or 1
        build_s, train_s = self.build_cpu_s / millions, self.train_cpu_s(workers) / millions
        kept = (c.log_bytes.at(d.events_per_day) + c.version_bytes.at(d.events_per_day)) / GB
        sent = self.step_bytes(workers) * workers * MILLION / d.batch / GB
        held = (self.table_bytes + workers * index_bytes(d.keys)) / GB
        serve_s = MILLION * self.request_cpu_s
        machine_s = self.machine.cores * self.machine.usable
        return [
            Cost("build", build_s, build_s / HOUR_S * c.build_gb_per_core, kept / millions,
                 d.days_kept, c.shuffle_bytes.at(d.events_per_day) / GB / millions),
            Cost("train", train_s, 0.0, 0.0, 0.0, sent),
            Cost("table", 0.0, held * d.train_hours / millions,
                 d.checkpoints * self.checkpoint_bytes / GB / millions, 1.0, 0.0),
            Cost("serve", serve_s, serve_s / machine_s / HOUR_S * self.served_bytes / GB,
                 0.0, 0.0, 0.0),
        ]  # fmt: skip

    def list_limits(self) -> list[Limit]:
        """What is full at how many keys on one machine, the first to be full first."""
        d, vocabulary = self.demand, self.constants.vocabulary_memory
        row = row_bytes(d.dim, d.state)
        sizes: list[tuple[str, str, str, Callable[[float], float]]] = [
            ("build", "vocabularies, in the Python worker of each core",
             "`spark.sluice.vocabularyBytes` bounds it",
             lambda keys: self.machine.cores * vocabulary.at(keys)),
            ("train", "rows, state and index in one process", "`shard: workers` splits it",
             lambda keys: keys * row + index_bytes(keys)),
            ("export, serve", "rows and index in one process", "nothing splits it",
             lambda keys: keys * d.dim * NUMBER_BYTES + index_bytes(keys)),
            ("train", "the index of keys on each worker", "nothing splits it", index_bytes),
        ]  # fmt: skip
        room = self.machine.room
        found = [
            Limit(part, what, of(d.keys), find_limit(of, room), relief)
            for part, what, relief, of in sizes
        ]
        return sorted(found, key=lambda limit: limit.full_at)


@dataclass(frozen=True)
class Limit:
    """Something that one machine must hold.

    Attributes:
        part: Of the flow.
        what: What is held.
        bytes: At the demand's keys.
        full_at: Keys that fit in a machine.
        relief: What helps.
    """

    part: str
    what: str
    bytes: float
    full_at: float
    relief: str


def find_limit(bytes_of: Callable[[float], float], room: float) -> float:
    """Returns the most that fits, to a thousandth.

    Args:
        bytes_of: Bytes of so many; never falls.
        room: Bytes that there are.
    """
    low, high = 1.0, 2.0
    while bytes_of(high) <= room:
        low, high = high, 2 * high
    while high - low > low / 1000:
        middle = (low + high) / 2
        low, high = (middle, high) if bytes_of(middle) <= room else (low, middle)
    return low
