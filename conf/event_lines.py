"""The lines that commands write under `--log-format json`: one JSON object each."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any


def render_event(event: str, fields: Mapping[str, Any], time_s: float | None = None) -> str:
    """Returns one line, without its end.

    Args:
        event: What happened, such as `log` or `error`.
        fields: More of it by name; what JSON does not know is written as text.
        time_s: When it happened, in seconds since 1970; None: now.
    """
    moment = time.time() if time_s is None else time_s
    return json.dumps({"event": event, "time": round(moment, 3), **fields}, default=str)
