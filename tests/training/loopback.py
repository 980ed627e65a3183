"""Ports of this machine for processes that train together."""

from __future__ import annotations

import socket

# Kept to the end of this process.
_HELD: list[socket.socket] = []


def find_addresses(count: int) -> list[str]:
    """Returns free ports of the loopback device as `host:port`.

    They are bound, so that no other process is given one of them before its own has started, and
    nobody listens on them: who is to have one can bind it too, as servers set `SO_REUSEADDR`.
    """
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
    _HELD.extend(held)
    return [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
