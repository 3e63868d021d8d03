"""The calculators over HTTP: a JSON API with its OpenAPI description, and the page that uses it."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Hashable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware

from trainledger import __version__
from trainledger.report.chart import Chart
from trainledger.report.show import png
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.web import answers, openapi, preview
from trainledger.web.calculator import Calculator, Progress
from trainledger.web.calculators import CALCULATORS
from trainledger.web.field import LONGEST, read_query
from trainledger.web.guard import refusal

Calculators = Mapping[str, Calculator]
Endpoint = Callable[[Request], Awaitable[Response]]
KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}
MOST_WAITING = 64  # questions at once
MOST_FIELDS = 200  # of a query
_JSON = "application/json"


def page_files() -> dict[str, bytes]:
    """The files of the page by name, read once: no path of a request is ever opened."""
    found = files("trainledger.web").joinpath("page").iterdir()
    return {each.name: each.read_bytes() for each in found if each.is_file()}


def make_app(calculators: Calculators = CALCULATORS, *, with_token: bool = False) -> FastAPI:
    """The application, to be served behind `guard.Guard`; ``with_token`` only says so in its description."""
    app = FastAPI(
        title="trainledger",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        summary="What a training run costs: the calculators of the page and the command line.",
        responses=openapi.refusals(with_token=with_token),
    )
    desk, draws = Desk(calculators), png(Chart("", ()).svg()) is not None
    app.state.jobs = desk.jobs
    listing = encoded(answers.listing(calculators))
    page = page_files() | {
        "config.json": encoded({"worker": False, "version": __version__, "lesson": answers.lesson(calculators)})
    }
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=4)

    async def calculators_json() -> Response:
        return Response(listing, media_type=_JSON)

    async def index(request: Request) -> Response:  # without `name`, which the address of the page may have
        query = dict(request.query_params)
        calculator = calculators.get(query.get("calculator", ""))
        html = page["index.html"] if calculator is None else preview.headed(page["index.html"], calculator)
        shown = calculator or calculators.get("optimal")  # with whose figure the lesson begins
        if draws and shown is not None:
            fields = urlencode(preview.fields_of(shown, query) if calculator else {})
            html = preview.illustrated(html, f"{request.base_url}figure/{shown.name}?{fields}".removesuffix("?"))
        return _file(request, "index.html", html)

    async def static(name: str, request: Request) -> Response:
        if name not in page:
            raise HTTPException(404)
        return _file(request, name, page[name])

    async def wrong(request: Request, error: Exception) -> Response:
        return _missing(request, calculators) if getattr(error, "status_code", 0) == 404 else _failed(error)

    app.add_api_route(
        "/calculators.json",
        calculators_json,
        response_class=Response,
        operation_id="calculators",
        summary="all calculators with their fields, presets and slider stops",
        responses={200: {"model": list[openapi.Listed], "description": "the calculators"}},
    )
    for way in openapi.WAYS:
        for calculator in calculators.values():
            app.add_api_route(
                f"/{way}/{calculator.name}",
                desk.endpoint(way, calculator),
                response_class=Response,
                operation_id=f"{way}_{calculator.name}",
                tags=[way],
                **openapi.operation(way, calculator),
            )
    app.add_api_route("/", index, include_in_schema=False)
    app.add_api_route("/{name}", static, include_in_schema=False)
    app.add_exception_handler(HTTPException, wrong)
    if with_token:  # `guard.Guard` asks for it
        described = app.openapi()
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"token": []}]
    return app


def _file(request: Request, name: str, content: bytes) -> Response:
    """A file of the page, for which a browser asks again each time and which is sent once."""
    tag = f'W/"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"etag": tag, "cache-control": "private, no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, 200, headers, KINDS.get(name.rpartition(".")[2], "application/octet-stream"))


def warm_up(calculators: Calculators) -> None:
    """Answer the default question of each quick calculator, so that the first one that is asked imports nothing.

    What is there by then stays, so the garbage collector need not look at it again in each answer.
    """
    for calculator in calculators.values():
        if not calculator.patient:
            with suppress(InvalidInput):
                encoded(answers.view(calculator.name, {}, calculators=calculators))
    gc.collect()
    gc.freeze()


class Desk:
    """Takes questions: quick ones in turn, in a thread; those that may take seconds as jobs."""

    def __init__(self, calculators: Calculators) -> None:
        self.calculators = calculators
        self.jobs = Jobs()
        self.turn = asyncio.Semaphore(1)
        self.waiting = 0

    def endpoint(self, way: str, calculator: Calculator) -> Endpoint:
        """The function that answers one way to ask one calculator."""

        async def asked(request: Request) -> Response:
            try:
                given = _given(request)
                work = _work(way, calculator.name, given, self.calculators)
                if calculator.patient and way in openapi.ASKED:
                    read_query(calculator.fields, given, any_of_run=calculator.any_of_run)  # wrong fields do not wait
                    reply = partial(answers.ask, calculator.name, given, calculators=self.calculators)
                    key = calculator.name, frozenset(given.items())
                    found = await self.jobs.ask(key, reply, request.is_disconnected)
                    while way == "figure" and isinstance(found, Working):  # who shows links asks once
                        found = await self.jobs.ask(key, reply, request.is_disconnected)
                    if not isinstance(found, Working):
                        found = await run_in_threadpool(work)
                else:
                    found = await self._in_turn(request, work)
                if found is None:
                    rule = "has no figure to this question, or no font to draw it with"
                    raise InvalidInput([Problem("calculator", calculator.name, rule)])
            except InvalidInput as error:
                return Response(refusal(*error.placed()), 422, media_type=_JSON)
            except Exception as error:
                return _failed(error)
            if isinstance(found, Response):
                return found
            if isinstance(found, Working):
                said = {"what": found.what, "done": found.done, "of": found.of}
                return Response(encoded({"working": said}), 202, media_type=_JSON)
            return Response(found, media_type="image/png" if way == "figure" else _JSON)

        return asked

    async def _in_turn(self, request: Request, work: Callable[[], bytes | None]) -> bytes | Response | None:
        """One question at a time; one whose asker is gone is dropped when its turn comes."""
        if self.waiting >= MOST_WAITING:
            problem = Problem("", None, f"{MOST_WAITING} questions wait already; ask again in a second")
            return Response(refusal(problem), 429, {"retry-after": "1"}, _JSON)
        self.waiting += 1
        try:
            async with self.turn:
                if await request.is_disconnected():
                    return Response(status_code=204)
                return await run_in_threadpool(work)
        finally:
            self.waiting -= 1


def _work(way: str, name: str, given: dict[str, str], calculators: Calculators) -> Callable[[], bytes | None]:
    """What answers a query, as JSON; raises `InvalidInput` for a parameter of the way itself."""
    own = {each: given.pop(each, None) for each in openapi.WAYS[way][1]}
    if way == "view":
        width = _whole("width", own["width"] or "960", openapi.NARROWEST, openapi.WIDEST)
        held, pinned = own["held"] or "", own["pinned"] or ""
        return lambda: encoded(answers.view(name, given, width, calculators=calculators, held=held, pinned=pinned))
    if way == "figure":
        return lambda: preview.figure(name, given, calculators)
    if way in ("check", "exercise"):
        if given:
            raise InvalidInput([Problem(next(iter(given))[:60], None, "is no field of an exercise", "seed")])
        seed = _whole("seed", own["seed"], 0, openapi.LAST_SEED)
        if way == "exercise":
            return lambda: encoded(answers.exercise(name, seed, calculators))
        guess, misses = own["guess"], _whole("misses", own["misses"], 0, openapi.LAST_SEED)
        if guess is None or len(guess) > LONGEST:
            raise InvalidInput([Problem("guess", guess, f"must be given, in at most {LONGEST} characters")])
        return lambda: encoded(answers.check(name, seed, guess, misses, calculators))
    return lambda: encoded(answers.answer(name, given, calculators=calculators))


def encoded(value: Any) -> bytes:
    """A value as JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _given(request: Request) -> dict[str, str]:
    """The query's texts by name; raises `InvalidInput` where a name comes twice or there are too many."""
    pairs = request.query_params.multi_items()
    if len(pairs) > MOST_FIELDS:
        raise InvalidInput([Problem("query", None, f"must have at most {MOST_FIELDS} fields")])
    given = dict(pairs)
    if len(given) < len(pairs):
        twice = next(name for name in given if sum(name == each for each, _ in pairs) > 1)
        raise InvalidInput([Problem(twice[:60], None, "is given more than once")])
    return given


def _whole(name: str, text: str | None, least: int, most: int) -> int:
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most):
        raise InvalidInput([Problem(name, text, f"must be a whole number of {least:,} to {most:,}")])
    return int(text)


def _missing(request: Request, calculators: Calculators) -> Response:
    """A sentence that names the nearest calculator, or page."""
    path = request.url.path
    way, _, name = path.lstrip("/").partition("/")
    if way in openapi.WAYS:
        rule = f"is no calculator; there are: {', '.join(calculators)}"
        problem = Problem("calculator", name[:60], rule, nearest_text(name, calculators))
    else:
        problem = Problem("page", path[:60], "is not here")
    return Response(refusal(problem), 404, media_type=_JSON)


def _failed(error: Exception) -> Response:
    """A sentence for who asked; the traceback, which is an error of ours, to standard error."""
    traceback.print_exception(error, file=sys.stderr)
    problem = Problem("", None, "the question met an error of trainledger; the server's terminal says more")
    return Response(refusal(problem), 500, media_type=_JSON)


Work = Callable[[Progress], Any]
FIRST_WAIT_SECONDS = 0.8  # of a request, before it is answered with how far the work is
FORGOTTEN_SECONDS = 10.0  # since anybody asked, until the work is cancelled
KEPT_SECONDS = 60.0  # an answer that is there
_LOOK_SECONDS = 0.01  # between two looks at whether it is there
MOST_AT_ONCE = 2
MOST_KEPT = 32  # answers that are there, worked on, or wait


@frozen
class Working:
    """How far an answer is."""

    what: str
    done: int = 0
    of: int = 0


class Cancelled(KeyboardInterrupt):
    """Ends a search from within its progress, as Ctrl-C does."""


class _Job:
    """The work of one key. The event loop writes ``asked`` and ``cancelled``, the thread ``working``."""

    def __init__(self, work: Work, threads: ThreadPoolExecutor) -> None:
        self.work = work
        self.asked = time.monotonic()
        self.working = Working("waits until another answer is there")
        self.cancelled = False
        self.future: Future[Any] = threads.submit(self.run)

    def run(self) -> Any:
        """The answer; raises `Cancelled`, also where a search that was cancelled gives what it has so far."""
        self.progress("", 0, 0)
        answer = self.work(self.progress)
        if self.cancelled:
            raise Cancelled
        return answer

    def cancel(self) -> None:
        """End the work where it says next how far it is, or before it begins."""
        self.cancelled = True
        self.future.cancel()

    def progress(self, what: str, done: int, of: int) -> None:
        if self.cancelled or time.monotonic() - self.asked > FORGOTTEN_SECONDS:
            self.cancelled = True
            raise Cancelled
        self.working = Working(what, done, of)


class Jobs:
    """Work by its key, ``MOST_AT_ONCE`` at a time. Called from one event loop only."""

    def __init__(self, wait_seconds: float = FIRST_WAIT_SECONDS) -> None:
        self.wait_seconds = wait_seconds
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, "answer")
        self._jobs: dict[Hashable, _Job] = {}

    async def ask(self, key: Hashable, work: Work, gone: Callable[[], Awaitable[bool]]) -> Any:
        """The answer of the work of this key, or `Working` where it takes longer than a request waits.

        Asked again with the same key within ``FORGOTTEN_SECONDS``, the same work goes on; where who asks is ``gone``
        before that, it is cancelled. Raises what the work raises.
        """
        self._forget()
        job = self._jobs.get(key)
        if job is None or job.cancelled:
            if len(self._jobs) >= MOST_KEPT:
                return Working("waits until other answers are there")
            job = self._jobs[key] = _Job(work, self._threads)
        job.asked = time.monotonic()
        until = job.asked + self.wait_seconds
        while not job.future.done() and (now := time.monotonic()) < until:
            job.asked = now
            if await gone():
                job.cancel()
                break
            await asyncio.sleep(_LOOK_SECONDS)
        if not job.future.done():
            return job.working
        try:
            return job.future.result()
        except (Cancelled, CancelledError):  # by somebody else who asked for it
            return Working("begins again")

    def close(self) -> None:
        """Cancel all work."""
        for job in self._jobs.values():
            job.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        """Drop what was cancelled, what nobody has asked for, and the oldest answers beyond the most that are kept."""
        now = time.monotonic()
        for key, job in list(self._jobs.items()):
            age = now - job.asked
            if job.future.done() and (job.cancelled or age > KEPT_SECONDS):
                del self._jobs[key]
            elif not job.future.done() and age > FORGOTTEN_SECONDS:
                job.cancel()
        done = [key for key, job in self._jobs.items() if job.future.done()]
        for key in done[: max(0, len(self._jobs) - MOST_KEPT + 1)]:
            del self._jobs[key]
