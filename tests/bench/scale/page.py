"""The tables of docs/scale.md, made from the records.

The page's words are written by hand and hold no figure of a record. Its tables stand between two
comments, `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from tests.bench.scale import quantities as q
from tests.bench.scale.exchange import exchange_bytes, find_network_bound
from tests.bench.scale.model import UNITS, Check, Quantity, check
from tests.bench.scale.plan import (
    MILLION,
    Demand,
    Limit,
    Machine,
    Plan,
    Prices,
    derive_constants,
)
from tests.bench.scale.records import Records
from tests.docs_site.markdown import render_table

PAGE = Path(__file__).parents[3] / "docs" / "scale.md"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
LINKS_GBIT_S = (1.0, 10.0, 25.0, 100.0)
LINK_CORES = (2, 8, 32)


def fill_page(text: str, records: Records) -> str:
    """Returns the page with its tables made anew.

    Args:
        text: The page as it is.
        records: All records.

    Raises:
        KeyError: The page names a table that there is not.
    """

    def fill(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]](records)}\n\n{found[3]}"

    return _TABLE.sub(fill, text)


def render_records(records: Records) -> str:
    """Every record: what, where, when, by which command."""
    rows = [
        [
            f"`{one.series}`", _count(one.size, one.series), f"`{one.commit[:8]}`", one.processor,
            str(one.cores), f"{one.load:.1f}", one.measured_on, f"`{one.command}`",
        ]
        for ones in records.values()
        for one in ones
    ]  # fmt: skip
    header = ["series", "size", "commit", "machine", "cores", "load", "day", "command"]
    return render_table(header, rows)


def render_checks(records: Records) -> str:
    """Every quantity at every size, beside what the two sizes below it say."""
    rows = [
        [quantity.title, _count(one.size, quantity.series), *_render_check(quantity, one)]
        for quantity in q.QUANTITIES
        for one in check(quantity, records)
    ]
    return render_table(["", "size", "measured", "predicted", "error"], rows)


def _render_check(quantity: Quantity, one: Check) -> list[str]:
    predicted = "" if one.predicted is None else _amount(one.predicted, quantity.unit)
    error = "" if one.error is None else f"{one.error:+.0%}"
    return [_amount(one.measured, quantity.unit), predicted, error]


def render_constants(records: Records) -> str:
    """The line of each quantity, and the records that it goes through."""
    rows = []
    for quantity in q.QUANTITIES:
        points = quantity.points(records)
        if not points:
            continue
        line = quantity.line(records)
        sizes = " and ".join(_count(size, quantity.series) for size, _ in points[-2:])
        counted = q.UNIT_OF_SIZE[quantity.series]
        is_few = counted in ("workers", "candidates")
        scale, unit = (1.0, f" a {counted[:-1]}") if is_few else (MILLION, " a million")
        slope = {
            "by_size": f"{_amount(line.slope * scale, quantity.unit)}{unit}",
            "by_decade": f"{_amount(line.slope, quantity.unit)} each factor of ten",
            "by_share": f"{_amount(line.slope, quantity.unit)} over the number of workers",
        }.get(quantity.law.__name__, f"{line.slope:.2f} of the bytes counted by hand")
        rows.append([quantity.title, _amount(line.fixed, quantity.unit), slope, sizes])
    return render_table(["", "fixed", "and", "from"], rows)


def render_exchange(records: Records) -> str:
    """Counted bytes of the real exchange, of its simulation, and of the kernel."""
    rows = []
    for one in records.get("exchange", ()):
        figures, workers = one.figures, one.size
        counted = exchange_bytes(figures["sent_rows"], SHARED_DIM)
        rows.append([
            str(workers), f"{figures['distinct']:,.0f}" if workers > 1 else "",
            _amount(counted, "MB") if workers > 1 else "0 MB",
            _amount(figures["loopback_bytes"] / workers, "MB"),
            f"{1e3 * figures['step_cpu_s']:.0f} ms",
        ])  # fmt: skip
    header = [
        "workers", "distinct rows of a batch", "counted: sent by a worker in a step",
        "seen by the kernel, all that a worker sends", "CPU of a step, all workers",
    ]  # fmt: skip
    return render_table(header, rows)


SHARED_DIM = 32
"""Numbers of a row of the tables that workers share in records."""


def render_traffic(records: Records) -> str:
    """What a worker sends in a step: one batch for all, and batches that grow with the workers."""
    ways = "exchange_bytes", "ring_bytes", "lookup_bytes"
    rows = [
        [
            words, str(one.size), f"{one.figures['batch']:,.0f}", f"{one.figures['distinct']:,.0f}",
            *(_amount(one.figures[way], "MB") for way in ways),
        ]
        for name, words in (("traffic-fixed", "one for all"), ("traffic-growing", "it grows"))
        for one in records.get(name, ())
    ]  # fmt: skip
    header = ["batch", "workers", "its rows", "distinct table rows", "Sluice's exchange",
              "all-reduce, ring", "all-to-all by lookup"]  # fmt: skip
    return render_table(header, rows)


def render_bounds(records: Records) -> str:
    """From how many workers on the network takes longer than computing, by link and cores."""
    traffic, shared = records.get("traffic-fixed", ()), records.get("exchange", ())
    if not traffic or not shared:
        return "No record yet."
    alone = shared[0].figures
    cpu_s = alone["step_cpu_s"] / alone["batch"] * traffic[0].figures["batch"]
    rows, most = [], traffic[-1]
    for name, key in (("Sluice's exchange", "exchange_bytes"), ("all-reduce, ring", "ring_bytes")):
        matrix = most.figures[key] * most.size / (most.size - 1)
        for gbit_s in LINKS_GBIT_S:
            found = [find_network_bound(matrix, cpu_s, cores, gbit_s) for cores in LINK_CORES]
            rows.append([name, f"{gbit_s:g} Gbit/s", *map(str, found)])
    return render_table(["", "link", *(f"{cores} cores a worker" for cores in LINK_CORES)], rows)


def render_assumptions(_: Records) -> str:
    """What was not measured: prices, machines, the demand."""
    rows = [
        [f"{type(given).__name__.lower()}: {field.name.replace('_', ' ')}",
         f"{getattr(given, field.name):,g}" if getattr(given, field.name) < MILLION
         else f"{getattr(given, field.name):,.0f}"]
        for given in (Prices(), Machine(), Demand())
        for field in fields(given)
    ]  # fmt: skip
    return render_table(["assumed", ""], rows)


def _plan(records: Records) -> Plan:
    return Plan(derive_constants(records))


def render_costs(records: Records) -> str:
    """What a million events, or requests, cost."""
    return _needs_all(records, lambda: describe_costs(_plan(records), Prices()))


def describe_costs(plan: Plan, prices: Prices) -> str:
    """Returns the table of costs of a plan."""
    rows = [
        [
            cost.part, f"{cost.cpu_s:,.1f}", f"{cost.memory_gb_h:,.2f}", f"{cost.disk_gb:,.2f}",
            f"{cost.network_gb:,.2f}", f"{100 * cost.price(prices):,.2f}",
        ]
        for cost in plan.list_costs()
    ]  # fmt: skip
    header = ["a million", "CPU s", "GB of memory for an hour", "GB on disk", "GB sent", "US cents"]
    return render_table(header, rows)


def render_machines(records: Records) -> str:
    """How many machines the demand takes."""
    return _needs_all(records, lambda: describe_machines(_plan(records)))


def describe_machines(plan: Plan) -> str:
    """Returns the table of machines of a plan."""
    train, holding = plan.train_machines, plan.shared_memory_machines
    never = "none: each holds the index of all keys, and it does not fit"
    sent = "" if train is None else f"{plan.step_bytes(train) / 1e6:,.0f} MB a step and worker"
    rows = [
        ["build: CPU of a day", f"{plan.build_cpu_s / 3600:,.1f} core-hours"],
        ["build: machines", str(plan.build_machines)],
        ["train: rows, state", _amount(plan.table_bytes, "GB")],
        ["train: machines to hold them", never if holding is None else str(holding)],
        ["train: CPU of a day, by these", "" if holding is None else
         f"{plan.train_cpu_s(holding) / 3600:,.1f} core-hours"],
        ["train: machines to hold them and to end in time",
         "no number of them" if train is None else str(train)],
        ["train: sent", sent],
        ["train: share of a link", "" if train is None else f"{plan.link_share(train):.1%}"],
        ["train: a checkpoint", _amount(plan.checkpoint_bytes, "GB")],
        ["serve: held by each server", _amount(plan.served_bytes, "GB")],
        ["serve: CPU of a mean request", _amount(plan.request_cpu_s, "ms")],
        ["serve: machines", str(plan.serve_machines)],
    ]  # fmt: skip
    return render_table(["", ""], rows)


def render_limits(records: Records) -> str:
    """What one machine must hold, and when it is full."""
    return _needs_all(records, lambda: describe_limits(_plan(records)))


def describe_limits(plan: Plan) -> str:
    """Returns the table of limits of a plan, the first to be full first."""

    def row(limit: Limit) -> list[str]:
        verdict = "fits" if limit.bytes <= plan.machine.room else "**does not fit**"
        return [limit.part, limit.what, _amount(limit.bytes, "GB"), verdict,
                f"{limit.full_at / MILLION:,.0f} M keys", limit.relief]  # fmt: skip

    header = ["part", "what one machine holds", "at the demand's keys", "", "full at", ""]
    return render_table(header, map(row, plan.list_limits()))


def render_missing(records: Records) -> str:
    """Sizes that a record is wanted of and that have none, with the command that makes one."""
    found = []
    for series, sizes in q.SIZES.items():
        known = {one.size for one in records.get(series, ())}
        if lacking := [size for size in sizes if size not in known]:
            words = f"`python -m tests.bench.scale measure {q.COMMANDS[series]} --size N`"
            shown = ", ".join(f"{size:,}" for size in lacking)
            found.append([f"`{series}`", f"{shown} {q.UNIT_OF_SIZE[series]}", words])
    if not found:
        return "Every size that this page wants was measured."
    return render_table(["series", "no record of", "command"], found)


def _needs_all(records: Records, render: Callable[[], str]) -> str:
    lacking = [name for name in q.SIZES if name not in records]
    return f"No record yet of {', '.join(lacking)}." if lacking else render()


def _count(size: float, series: str) -> str:
    unit = q.UNIT_OF_SIZE.get(series, "")
    return f"{size:,.0f} {unit if size != 1 else unit.removesuffix('s')}".strip()


def _amount(value: float, unit: str) -> str:
    shown = value / UNITS[unit]
    digits = 0 if abs(shown) >= 100 else 1 if abs(shown) >= 10 else 2 if abs(shown) >= 1 else 3
    return f"{shown:,.{digits}f} {unit}"


TABLES: dict[str, Callable[[Records], str]] = {
    "records": render_records,
    "checks": render_checks,
    "constants": render_constants,
    "exchange": render_exchange,
    "traffic": render_traffic,
    "bounds": render_bounds,
    "assumptions": render_assumptions,
    "costs": render_costs,
    "machines": render_machines,
    "limits": render_limits,
    "missing": render_missing,
}
