"""Who may ask the server, and what a browser may do with its answers.

Every request passes here first: other web pages of the reader's browser must not reach the server (DNS rebinding,
cross-site requests), and over a network only who holds the token may.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from html import escape
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, urlencode

from trainledger.answers.pages.plain_data import error_json
from trainledger.spec.problem import InvalidInput, Problem

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LONGEST_QUERY = 2**19  # bytes; two pasted files of 20,000 characters, twelve bytes each where percent-encoded
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(?::\d+)?")
_JSON, _HTML = "application/json", "text/html; charset=utf-8"


def refusal(*problems: Problem) -> bytes:
    """What is wrong, as the command line's ``--json`` says it.

    >>> refusal(Problem("Host", "a", "is no address"))[:57]
    b'{"error": [{"field": "Host", "value": "a", "rule": "is no'
    """
    return json.dumps(error_json(InvalidInput(list(problems)))).encode()


class Guard:
    """The application behind checks of the method, the length, the host and the token.

    A Host header must be an IP address or one of ``names``: a page elsewhere can point a name of its own at this
    machine, but the browser then sends that name. With a ``token``, a request has it as a Bearer token, in the cookie,
    or, in the first link, in the query; a link that has it is answered with the cookie. ``cookie`` is its name.
    """

    def __init__(self, app: App, *, names: Collection[str] = (), token: str = "", cookie: str = "trainledger") -> None:
        self.app = app
        self.names = {"localhost", *(name.lower() for name in names)}
        self.token = token
        self.cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it with a sentence."""
        if scope["type"] != "http":
            return  # neither web sockets nor a lifespan
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._refused(scope, headers)
        if refused is not None:
            await _refuse(send, headers, *refused)
        elif self.token and scope["path"] == "/" and self._is_token(_query(scope).get("token", "")):
            await _send(send, 200, _HTML, *self._welcome(scope))
        elif self.token and not self._is_known(headers):
            rule = "is needed: open the link that trainledger serve printed, or send it as a Bearer token"
            await _refuse(send, headers, 401, Problem("token", None, rule), {"www-authenticate": "Bearer"})
        else:
            framed = scope["path"] == "/" and "embed" in _query(scope)
            await self.app(scope, receive, _with_headers(send, framed=framed))

    def _refused(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, Problem, Mapping[str, str]] | None:
        """The status, problem and headers of a request that is refused whoever asks; None where it may go on."""
        if scope["method"] != "GET":
            problem = Problem("method", scope["method"][:20], "is refused: nothing here is changed by a request", "GET")
            return 405, problem, {"allow": "GET"}
        if not self._is_host(headers.get("host", "")):
            rule = "is not an address of this server; open the link that trainledger serve printed"
            return 403, Problem("Host", headers.get("host", "")[:100], rule), {}
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            problem = Problem("Sec-Fetch-Site", "cross-site", "is refused: another web page may not ask this server")
            return 403, problem, {}
        if len(scope["query_string"]) > LONGEST_QUERY:
            problem = Problem("query", None, f"must have at most {LONGEST_QUERY:,} bytes")
            return 422, problem, {}
        return None

    def _is_host(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].strip("[]")
        try:
            ip_address(name)
        except ValueError:
            return name.lower().removesuffix(".") in self.names
        return True

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def _is_known(self, headers: Mapping[str, str]) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._is_token(given.strip())
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        return self.cookie in cookies and self._is_token(cookies[self.cookie].value)

    def _welcome(self, scope: Scope) -> tuple[bytes, Mapping[str, str]]:
        """A page that sets the cookie and goes on to the address without the token, and its headers.

        Not a redirect: after a click in a mail, a browser keeps a strict cookie from the redirected request.
        """
        query = {name: text for name, text in _query(scope).items() if name != "token"}
        to = escape(f"./?{urlencode(query)}" if query else "./")
        page = f'<!doctype html><meta http-equiv="refresh" content="0;url={to}"><a href="{to}">trainledger</a>'
        return page.encode(), {"set-cookie": f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"}


def _query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))


def _with_headers(send: Send, *, framed: bool) -> Send:
    """What an application sends, with the headers of every answer; a page that is ``framed`` may stand in any other."""
    headers = _HEADERS | ({"content-security-policy": POLICY.replace("; frame-ancestors 'none'", "")} if framed else {})

    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = [(name, value) for name, value in message.get("headers", ())]
            more = {name.encode(): value.encode() for name, value in headers.items()}
            message["headers"] = [*own, *(each for each in more.items() if each[0] not in dict(own))]
        await send(message)

    return sent


async def _refuse(
    send: Send, headers: Mapping[str, str], status: int, problem: Problem, more: Mapping[str, str]
) -> None:
    """The sentence of a problem: a page for a person's browser, JSON for everybody else."""
    if "text/html" in headers.get("accept", ""):
        head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>trainledger</title>'
        await _send(send, status, _HTML, f"{head}<p>{escape(str(problem))}</p>".encode(), more)
    else:
        await _send(send, status, _JSON, refusal(problem), more)


async def _send(send: Send, status: int, kind: str, body: bytes, more: Mapping[str, str]) -> None:
    headers = {**_HEADERS, "content-type": kind, "content-length": str(len(body)), **more}
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
