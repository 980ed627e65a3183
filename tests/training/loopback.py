"""Ports of this machine for processes that train together."""

from __future__ import annotations

import socket


def find_addresses(count: int) -> list[str]:
    """Returns free ports of the loopback device as `host:port`."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    finally:
        for one in held:
            one.close()
