"""config.json as published for one model of each family, with the quirks of the published files, and for models with
mixers, or in the forms that transformers' defaults have, shortened.

What only names tokens or versions is left out of most of them.
"""

import json
from pathlib import Path
from typing import Any

CONFIGS, HYBRIDS = (
    dict[str, dict[str, Any]](json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8")))
    for name in ("published_configs.json", "hybrid_configs.json")
)
