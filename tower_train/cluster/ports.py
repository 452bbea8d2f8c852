"""Free ports of this machine, for processes that are about to be started. No TensorFlow here."""

import contextlib
import random
import socket

_PORTS = range(20_000, 32_000)  # below those that Linux gives to connections, which come and go


def free_ports(count: int) -> list[int]:
    """So many ports that nobody uses; chosen at random, so that others who ask now get other ones."""
    free, random_numbers = [], random.SystemRandom()
    while len(free) < count:
        port = random_numbers.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as each:
            each.bind(("localhost", port))
            free += [port] if port not in free else []
    return free
