"""Where the server listens, and its life: a free port, the link that is printed, and an end at Ctrl-C."""

from __future__ import annotations

import errno
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from threading import Thread

import uvicorn
from fastapi import FastAPI

from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.web.guard import Guard

_SWITCH_SECONDS = 0.001  # between threads of Python: a search leaves room for quick questions
_TRIED = 50  # ports after one that is in use
_LONGEST_LINE = 2**20  # bytes of a request's line and headers; `guard.LONGEST_QUERY` is refused with a sentence


@frozen
class Address:
    """Where a server listens, the link to its page, and the token that it asks for; none on a loopback address."""

    host: str
    port: int
    url: str
    token: str


def listen(host: str, port: int) -> tuple[socket.socket, Address]:
    """A socket that listens, and its address; raises `InvalidInput` where the host or the port cannot be had.

    Port 0 takes a free one.
    """
    family, address = _resolved(host)
    try:
        made = socket.create_server((address, port), family=family)
    except OSError as error:
        raise InvalidInput([_why_not(host, port, family, address, error)]) from None
    # asyncio sends small answers at once only where a socket says that it is TCP, which `create_server` leaves out.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, made.detach())
    port = found.getsockname()[1]
    alone = ip_address(address).is_loopback
    token = "" if alone else secrets.token_urlsafe(24)
    name = address if alone else socket.gethostname() if ip_address(address).is_unspecified else host
    link = f"http://{f'[{name}]' if ':' in name else name}:{port}/"
    return found, Address(host, port, f"{link}?token={token}" if token else link, token)


def server(app: FastAPI, address: Address) -> uvicorn.Server:
    """The server of an application behind its guard, to be run on the socket of this address."""
    names = (address.host, socket.gethostname(), socket.getfqdn()) if address.token else ()
    guarded = Guard(app, names=names, token=address.token, cookie=f"trainledger-{address.port}")
    config = uvicorn.Config(
        guarded, log_level="warning", access_log=False, lifespan="off", ws="none", http="h11", interface="asgi3",
        proxy_headers=False, server_header=False, timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=_LONGEST_LINE,
    )  # fmt: skip
    return uvicorn.Server(config)


def serve(app: FastAPI, found: socket.socket, address: Address, beside: Callable[[], None] = lambda: None) -> None:
    """Serve an application until Ctrl-C; ``beside`` runs in a thread while the first questions come."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    Thread(target=beside, daemon=True).start()
    with suppress(KeyboardInterrupt):
        server(app, address).run(sockets=[found])
    app.state.jobs.close()


def _resolved(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        rule = "is no address of this machine"
        raise InvalidInput([Problem("--host", host, rule, "0.0.0.0 for all addresses of this machine")]) from None
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, str(address[0])


def _why_not(host: str, port: int, family: socket.AddressFamily, address: str, error: OSError) -> Problem:
    if error.errno == errno.EADDRNOTAVAIL:
        return Problem("--host", host, "is no address of this machine", "0.0.0.0 for all addresses of this machine")
    if error.errno == errno.EACCES:
        return Problem("--port", port, "is only for the system's administrator", 8000)
    return Problem("--port", port, f"cannot be had: {error.strerror or error}", _free(family, address, port))


def _free(family: socket.AddressFamily, address: str, port: int) -> int | None:
    """The next free port."""
    for other in range(port + 1, min(port + _TRIED, 2**16)):
        with suppress(OSError), socket.create_server((address, other), family=family):
            return other
    return None
