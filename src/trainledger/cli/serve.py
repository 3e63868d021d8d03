"""The calculators as a page, from this machine."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from trainledger.cli.arguments import DONE, Outcome, count, group, option, takes
from trainledger.cli.asking import lines, say
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.web.calculators import CALCULATORS
from trainledger.web.calculators.runs import runs_in
from trainledger.web.export import export


@takes(
    option("--host HOST", "an address that others can reach; the link then has a token", default="127.0.0.1"),
    count("--port N", "port of the page (8000); 0 takes a free one", default=8000, least=0, most=65535),
    option("--runs DIR", "the directory whose runs the page shows (runs)", type=Path, default=Path("runs")),
    group(
        "static files, whose Python answers in the browser",
        option("--export DIR", "write the page for any web server instead", type=Path),
        option("--pyodide DIR", "Pyodide's npm package (node_modules/pyodide)", type=Path),
        option("--wheel FILE", "a package for Pyodide, such as numpy; may be repeated", type=Path, action="append"),
    ),
)
def serve(args: Namespace) -> Outcome:
    """Serve the calculators as a page on this machine, until Ctrl-C. With --json the address is a line of JSON.

    --export writes the page as static files instead, for a web server that knows no Python.
    """
    more = vars(args)
    if "export" in more:
        return Outcome(export(args.export, more.get("pyodide"), more.get("wheel", ())).document())
    if alone := [each for each in ("pyodide", "wheel") if each in more]:
        raise InvalidInput([Problem(f"--{each}", None, "goes with --export") for each in alone])
    import trainledger.web.listening as listening
    from trainledger.web.server import make_app, warm_up

    found, address = listening.listen(args.host, args.port)
    calculators = {**CALCULATORS, "runs": runs_in(args.runs)}
    app = make_app(calculators, with_token=bool(address.token))
    if args.json:
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
    args.json = False  # its line is printed
    return Outcome(lines("", {}), DONE)
