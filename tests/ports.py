"""Ports for programs that must be told one."""

from __future__ import annotations

import itertools
import os
import socket

# Below those that the kernel hands out by itself, of which another server may get one before its program has it.
FIRST, COUNT = 20_000, 12_000
_next = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """A port of the loopback that nothing listens on; another at every call."""
    while True:
        port = FIRST + next(_next) % COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
