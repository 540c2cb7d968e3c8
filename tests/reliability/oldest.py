"""The oldest versions that pyproject.toml promises, as constraints for pip: every `>=` becomes `==`.

    python tests/reliability/oldest.py > constraints-oldest.txt

`make oldest` installs them in a virtual environment of its own and runs the suite there.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNTIME = ("torch", "jax", "keras", "lm", "hf")  # extras that users install; tools of development are the newest


def oldest():
    """["numpy==1.26", ...] of what the package and its extras need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *(n for extra in RUNTIME for n in project["optional-dependencies"][extra])]
    found = {}
    for need in needs:
        match = re.fullmatch(r"([\w-]+)>=([\d.]+)(.*)", need)
        if match:
            found[match[1]] = f"{match[1]}=={match[2]}"
        elif not need.startswith("fastweights["):
            raise SystemExit(f"{need} has no lower bound; expected NAME>=VERSION")
    return sorted(found.values())


if __name__ == "__main__":
    print(*oldest(), sep="\n")
