"""Tables and figures of anything the ledger knows: for the terminal, and as HTML that opens offline."""
