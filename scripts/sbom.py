"""sbom.py FILE: write the software bill of materials of an installation with all extras, as CycloneDX JSON.

It lists Hodei and the installed packages that `hodei[server,kubernetes,bare_metal,hosts,plots]` needs, not the developer tools.
"""

import json
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("server", "kubernetes", "bare_metal", "hosts", "plots")


def closure(name: str, extras: tuple[str, ...]) -> dict[str, tuple[Distribution, set[str]]]:
    """All packages that NAME with EXTRAS depends on, directly or not, each with the names of its direct dependencies."""
    found: dict[str, tuple[Distribution, set[str]]] = {}
    todo = [(canonicalize_name(name), frozenset(extras))]
    seen = set(todo)
    while todo:
        name, wanted = todo.pop()
        package, needs = found.setdefault(name, (distribution(name), set()))
        for text in package.requires or ():
            requirement = Requirement(text)
            if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in ("", *wanted)):
                continue
            needed = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            needs.add(needed[0])
            if needed not in seen:
                seen.add(needed)
                todo.append(needed)
    return found


def component(name: str, package: Distribution) -> dict[str, Any]:
    reference = f"pkg:pypi/{name}@{package.version}"
    entry = {"type": "library", "bom-ref": reference, "name": name, "version": package.version, "purl": reference}
    if licence := package.metadata.get("License-Expression"):
        entry["licenses"] = [{"expression": licence}]
    return entry


def bom() -> dict[str, Any]:
    packages = dict(sorted(closure("hodei", EXTRAS).items()))
    entries = {name: component(name, package) for name, (package, _) in packages.items()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**entries.pop("hodei"), "type": "application"}},
        "components": list(entries.values()),
        "dependencies": [
            {
                "ref": f"pkg:pypi/{name}@{package.version}",
                "dependsOn": [f"pkg:pypi/{other}@{packages[other][0].version}" for other in sorted(needs)],
            }
            for name, (package, needs) in packages.items()
        ],
    }


def main(path: Path) -> int:
    content = bom()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"{path}: {len(content['components'])} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
