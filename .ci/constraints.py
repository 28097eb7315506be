"""Resolve exact versions for the given Pythons and print constraints.txt.

    make constraints PYTHONS="python3.10 python3.11 python3.12"

Nothing is installed: pip only resolves, once under each interpreter, so markers are judged as they
will be. The file holds names, versions and markers; no hashes and no addresses.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

GROUPS = ("test", "lint")


def resolve(interpreter: str) -> tuple[str, dict[str, str]]:
    """Python version, and name -> version of everything the project needs under `interpreter`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--dry-run", "--ignore-installed"]
        groups = [argument for group in GROUPS for argument in ("--group", group)]
        subprocess.run([*pip, "--quiet", *groups, "--report", str(report), ".[build,demo]"], check=True)  # noqa: S603
        data = json.loads(report.read_text())
    found = {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"] for item in data["install"]
    }
    found.pop("edge-appliance")
    return data["environment"]["python_version"], found


def main() -> None:
    """Print the merged constraints."""
    versions: dict[str, dict[str, str]] = defaultdict(dict)
    pythons = []
    for interpreter in sys.argv[1:]:
        python, found = resolve(interpreter)
        pythons.append(python)
        for name, version in found.items():
            versions[name][python] = version
    print("# Exact versions by Python; made by `make constraints`.")
    for name, by_python in sorted(versions.items()):
        if len(set(by_python.values())) == 1 and len(by_python) == len(pythons):
            print(f"{name}=={by_python[pythons[0]]}")
            continue
        for python, version in by_python.items():
            print(f'{name}=={version}; python_version == "{python}"')


if __name__ == "__main__":
    main()
