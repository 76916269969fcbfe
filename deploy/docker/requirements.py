"""Print what pyproject.toml asks for, one requirement a line: ``run [EXTRA,…]`` or ``build`` (all but torch)."""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
if sys.argv[1] == "build":
    # torch is there already, as a dependency.
    wanted = [each for each in project["build-system"]["requires"] if not each.startswith("torch")]
else:
    extras = [name for name in "".join(sys.argv[2:]).split(",") if name]
    wanted = project["project"]["dependencies"] + [
        each for name in extras for each in project["project"]["optional-dependencies"][name]
    ]
print(*wanted, sep="\n")
