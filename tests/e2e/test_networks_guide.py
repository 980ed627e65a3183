"""The guide's way from a CSV log to a SavedModel, run as it stands there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "networks.md"
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
SLUICE = Path(sys.executable).parent / "sluice"


def write_log(path: Path, rows: int = 4000) -> None:
    """Writes impressions; every fourth item is clicked six times as often."""
    rng = np.random.default_rng(5)
    lines = ["time,user,item,device,price,click"]
    for row in range(rows):
        user, item = int(rng.integers(60)), int(rng.integers(40))
        clicked = rng.random() < (0.6 if item % 4 == 0 else 0.1)
        device = ("phone", "desk")[row % 2]
        lines.append(f"{1_767_225_600 + row},u{user},i{item},{device},{5 + item / 2},{clicked:d}")
    path.parent.mkdir()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_forty_lines_lead_from_a_log_to_a_saved_model(tmp_path: Path) -> None:
    if not SLUICE.exists():
        pytest.skip("the command is not installed beside this Python")
    blocks = [(kind, text) for kind, text in FENCE.findall(GUIDE.read_text("utf-8"))]
    by_kind = {kind: [t for k, t in blocks if k == kind] for kind in ("yaml", "python", "sh")}
    files = dict(zip(("shop.yaml", "train.yaml"), by_kind["yaml"], strict=True))
    own = {**files, "nets.py": by_kind["python"][0]}
    lines = [line for text in own.values() for line in text.splitlines() if line.strip()]
    assert len(lines) <= 45
    for name, text in own.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    write_log(tmp_path / "data" / "log.csv")
    (commands,) = by_kind["sh"]
    for line in commands.splitlines():
        command = [str(SLUICE), *shlex.split(line)[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    (metrics,) = tmp_path.glob("work/runs/shop/runs/*/metrics.json")
    found = json.loads(metrics.read_text("utf-8"))["tasks"]["label"]
    assert found["auc"] > 0.6
    done = subprocess.run(
        [sys.executable, "-c", by_kind["python"][1]],
        cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert all(name in done.stdout for name in ("clicked", "device", "price"))
    done = subprocess.run([SLUICE, "report", "--run", "work/runs/shop"], cwd=tmp_path)
    assert done.returncode == 0
    assert (
        "Task label, binary."
        in next(tmp_path.glob("work/runs/shop/runs/*/report.html")).read_text()
    )
