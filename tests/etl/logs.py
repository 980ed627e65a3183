"""Small hand-written logs whose every outcome is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conf.etl import BuildConfig

USERS = ["1::F::a", "2::M::b", "3::F::a", "9::M::never seen"]
ITEMS = ["10::x|y", "11::x", "12::y|z", "13::z", "14::", "15::x", "99::never seen"]
RATINGS = [
    # user 1: out of order in the file; 12 and 13 share a time, the file's order decides.
    "1::11::5::200",
    "1::10::3::100",
    "1::12::4::300",
    "1::13::2::300",
    "1::14::5::400",
    "1::10::3::100",  # exact duplicate
    "1::77::3::150",  # unknown item
    # user 2
    "2::10::4::100",
    "2::12::4::200",
    "2::15::1::300",
    # user 3: too few events to be split
    "3::10::5::50",
    "3::11::5::60",
    # unknown user
    "8::10::5::10",
    "8::11::5::20",
]


def write_logs(folder: Path, ratings: list[str] = RATINGS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("users", USERS), ("items", ITEMS), ("ratings", ratings)):
        (folder / f"{name}.dat").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def build_config(logs: Path, root: Path, **changes: Any) -> BuildConfig:
    columns = [{"name": n, "type": "int64"} for n in ("user", "item", "rating", "ts")]
    data = {
        "name": "small",
        "data_dir": str(logs),
        "sources": {
            "ratings": {"path": "ratings.dat", "separator": "::", "columns": columns},
            "users": {
                "path": "users.dat",
                "separator": "::",
                "key": "user",
                "columns": [
                    {"name": "user", "type": "int64"},
                    {"name": "gender", "type": "string"},
                    {"name": "group", "type": "string"},
                ],
            },
            "items": {
                "path": "items.dat",
                "separator": "::",
                "key": "item",
                "columns": [
                    {"name": "item", "type": "int64"},
                    {"name": "tags", "type": "list<string>", "separator": "|", "nullable": True},
                ],
            },
        },
        "events": {"source": "ratings", "user": "user", "item": "item", "time": "ts"},
        "joins": [
            {"source": "users", "column": "user"},
            {"source": "items", "column": "item"},
        ],
        "history": {"name": "history", "max_len": 3},
        "label": {"column": "rating", "at_least": 4},
        "split": {"strategy": "leave_one_out"},
        "features": [
            {"name": "user", "column": "user", "role": "user"},
            {"name": "gender", "column": "gender", "role": "user"},
            {
                "name": "history",
                "column": "history",
                "role": "user",
                "max_len": 3,
                "encoding": {"kind": "vocabulary", "name": "item"},
            },
            {"name": "item", "column": "item", "role": "item"},
            {"name": "tags", "column": "tags", "role": "item"},
            {
                "name": "rating",
                "column": "rating",
                "role": "context",
                "encoding": {"kind": "identity"},
            },
        ],
        "output": {"root": str(root), "shards": 2, "eval_shards": 1},
    }
    return BuildConfig.model_validate({**data, **changes})
