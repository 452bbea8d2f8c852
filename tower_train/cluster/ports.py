"""Free ports of this machine, for processes that are about to be started. No TensorFlow here."""

import contextlib
import random
import socket

_PORTS = range(20_000, 32_000)  # below those that Linux gives to connections, which come and go meanwhile


def free_ports(count: int) -> list[int]:
    """So many ports that nobody uses; chosen at random, so that who else asks now is told others."""
    found, drawn = [], random.SystemRandom()
    while len(found) < count:
        port = drawn.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as each:
            each.bind(("localhost", port))
            found += [port] if port not in found else []
    return found
