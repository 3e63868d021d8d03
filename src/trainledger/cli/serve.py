"""The calculators as a page, from this machine."""

from __future__ import annotations

from argparse import Namespace

from trainledger.cli.arguments import DONE, Outcome, count, takes
from trainledger.cli.asking import lines, say


@takes(count("--port N", "port of the page (8000)", default=8000, most=65535))
def serve(args: Namespace) -> Outcome:
    """Serve the calculators as a page on this machine."""
    import uvicorn

    from trainledger.web.server import make_app

    say(f"http://127.0.0.1:{args.port}")
    uvicorn.run(make_app(), host="127.0.0.1", port=args.port, log_level="warning")
    return Outcome(lines("", {}), DONE)
