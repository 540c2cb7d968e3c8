"""Where the long checks keep their figures: benchmarks/reliability/NAME.json, which docs/reliability.md quotes."""

import json
import platform
import time
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reliability"


def record(name, figures, out=None):
    """Write the figures of a check with the machine and the day; returns the path."""
    path = Path(out) if out else FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = dict(date=time.strftime("%Y-%m-%d"), machine=platform.machine(), python=platform.python_version())
    path.write_text(json.dumps(about | figures, indent=1) + "\n")
    print(f"Written to {path}")
    return path
