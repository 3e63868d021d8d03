"""A store whose files were changed together with what the index says of them, as only a wrong program would."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from trainledger.engine.data.files import Checksum
from trainledger.engine.data.store import INDEX, with_checksum


def reseal(file: Path) -> None:
    """Put the checksums of a changed file right in the index of its store."""
    index = json.loads((file.parent / INDEX).read_text())
    seen = Checksum()
    seen.update(file.read_bytes())
    for shard in index["shards"]:
        shard["files"] = [
            asdict(seen.record(file.name)) if each["name"] == file.name else each for each in shard["files"]
        ]
    (file.parent / INDEX).write_text(json.dumps(with_checksum(index)))
