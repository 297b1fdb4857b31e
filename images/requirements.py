"""Print what an image has to install: the project's own dependencies and those of the extras that are named.

    python3 requirements.py pyproject.toml operator,agents [--without torch,triton]

Printed to a file of its own, so that a change elsewhere in pyproject.toml leaves the image's layer of packages alone.
"""

import argparse
import re
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str], without: list[str]) -> list[str]:
    """Requirement lines, sorted; ValueError where an extra does not exist."""
    project = tomllib.loads(pyproject)["project"]
    known = project["optional-dependencies"]
    unknown = sorted(set(extras) - set(known))
    if unknown:
        raise ValueError(f"pyproject.toml has no extra {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    lines = {line for group in (project["dependencies"], *(known[extra] for extra in extras)) for line in group}
    return sorted(line for line in lines if re.split(r"[^A-Za-z0-9._-]", line)[0] not in without)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("extras", help="separated by commas")
    parser.add_argument("--without", default="", help="names of packages to leave out, separated by commas")
    args = parser.parse_args()
    print("\n".join(requirements(args.pyproject.read_text(), args.extras.split(","), args.without.split(","))))


if __name__ == "__main__":
    main()
