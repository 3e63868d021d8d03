"""``python -m trainledger`` is the command line."""

from trainledger.cli.command_line import main

if __name__ == "__main__":
    raise SystemExit(main())
