"""The calculators over HTTP: a JSON API with its OpenAPI description, and the page that uses it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from trainledger import __version__
from trainledger.report.plain_data import error_json
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers

_KINDS = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_files() -> dict[str, bytes]:
    """The files of the page by name, read once: no path of a request is ever opened."""
    return {each.name: each.read_bytes() for each in files("trainledger.web").joinpath("page").iterdir()}


def make_app() -> FastAPI:
    """The application."""
    app = FastAPI(title="trainledger", version=__version__, docs_url=None, redoc_url=None)
    page = page_files()

    @app.exception_handler(InvalidInput)
    def wrong(request: Request, error: InvalidInput) -> JSONResponse:
        return JSONResponse(error_json(error), status_code=422)

    def given(request: Request, *without: str) -> Mapping[str, str]:
        return {name: text for name, text in request.query_params.items() if name not in without}

    @app.get("/calculators.json")
    def listing() -> list[dict[str, Any]]:
        return answers.listing()

    @app.get("/api/{name}")
    def answer(name: str, request: Request) -> dict[str, Any]:
        return answers.answer(name, given(request))

    @app.get("/view/{name}")
    def view(name: str, request: Request, width: int = 960) -> dict[str, Any]:
        return answers.view(name, given(request, "width"), width)

    @app.get("/check/{name}")
    def check(name: str, of: str, guess: str, request: Request) -> dict[str, Any]:
        return answers.check(name, given(request, "of", "guess"), of, guess)

    @app.get("/exercise/{name}")
    def exercise(name: str, seed: int) -> dict[str, Any]:
        return answers.exercise(name, seed)

    @app.get("/{name}")
    @app.get("/")
    def static(name: str = "index.html") -> Response:
        if name not in page:
            return JSONResponse({"error": [{"sentence": f"there is no page {name[:60]!r}"}]}, status_code=404)
        suffix = "." + name.rpartition(".")[2]
        return Response(page[name], media_type=_KINDS.get(suffix, "application/octet-stream"))

    return app
