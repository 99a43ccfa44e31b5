"""Ports for services that take a number and choose none themselves."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a port that nobody uses, for a service that binds it later.

    It is below those that the kernel gives to whoever asks for any, and above those of
    Ray's workers, so nobody is likely to get it in between. Tests beside this one draw
    from thousands.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
