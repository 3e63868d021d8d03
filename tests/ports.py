"""Ports for the stores and servers of tests."""

import random
import socket
from contextlib import ExitStack

# Below those that the system gives to sockets that ask for any: gloo's listen on some of them, and one of those would
# be met in a store's place if it were chosen now and listened on a minute later.
_FIRST, _LAST = 10_000, 32_000


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    found: list[int] = []
    draw = random.SystemRandom()
    with ExitStack() as stack:
        while len(found) < count:
            port = draw.randint(_FIRST, _LAST)
            one = stack.enter_context(socket.socket())
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found
