"""The calculators as a page, from this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from trainledger.answers.question import count, question, text
from trainledger.cli.arguments import Outcome
from trainledger.cli.asking import say
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.web.calculators import CALCULATORS
from trainledger.web.calculators.runs import runs_in
from trainledger.web.export import export as written


@question(plots=False)
def serve(
    *,
    host: Annotated[str, text("an address that others can reach; the link then has a token")] = "127.0.0.1",
    port: Annotated[int, count("port of the page; 0 takes a free one", least=0, most=65535)] = 8000,
    runs: Annotated[str, text("the directory whose runs the page shows", metavar="DIR")] = "runs",
    export: Annotated[str | None, text("write the page for any web server instead", metavar="DIR")] = None,
    pyodide: Annotated[str | None, text("Pyodide's npm package (node_modules/pyodide)", metavar="DIR")] = None,
    wheel: Annotated[Sequence[str], text("a package for Pyodide, such as numpy; may be repeated", several=True)] = (),
    as_json: bool = False,
) -> Outcome:
    """Serve the calculators as a page on this machine, until Ctrl-C. With --json the address is a line of JSON.

    --export writes the page as static files instead, for a web server that knows no Python.
    """
    if export is not None:
        site = written(Path(export), None if pyodide is None else Path(pyodide), [Path(file) for file in wheel])
        return Outcome(site.document())
    if alone := [name for name, given in (("pyodide", pyodide), ("wheel", wheel)) if given]:
        raise InvalidInput([Problem(f"--{name}", None, "goes with --export") for name in alone])
    import trainledger.web.listening as listening
    from trainledger.web.server import make_app, warm_up

    found, address = listening.listen(host, port)
    calculators = {**CALCULATORS, "runs": runs_in(Path(runs))}
    app = make_app(calculators, with_token=bool(address.token))
    if as_json:
        named = {"url": address.url, "host": address.host, "port": address.port, "token": address.token}
        print(json.dumps(named), flush=True)
    else:
        say(address.url)
        say(
            "Only this machine can connect."
            if not address.token
            else "Anyone with this link can connect; it is not encrypted."
        )
        say("Ctrl-C ends the server.")
    listening.serve(app, found, address, beside=lambda: warm_up(calculators))
    return Outcome(None)
