"""Draw the SVG pictures of the documentation into docs/images, or check that they are up to date.

python scripts/make_figures.py             # write all
python scripts/make_figures.py mesh_2_by_4 # write some
python scripts/make_figures.py --check     # exit code 1 names the pictures that are out of date

Each public function of a module of scripts/figures is a picture, and its name is the file's name.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import figures  # noqa: E402
from scripts.figures.svg import Drawing  # noqa: E402

FOLDER = ROOT / "docs" / "images"


def pictures() -> dict[str, Callable[[], Drawing]]:
    """The function of each picture, by name."""
    pictures_by_name = {}
    for module in pkgutil.iter_modules(figures.__path__):
        loaded = importlib.import_module(f"scripts.figures.{module.name}")
        for name, function in inspect.getmembers(loaded, inspect.isfunction):
            if function.__module__ == loaded.__name__ and not name.startswith("_") and module.name != "svg":
                if name in pictures_by_name:
                    raise ValueError(f"two pictures have the name {name}")
                pictures_by_name[name] = function
    return pictures_by_name


def main() -> int:
    """Write the pictures, or name those that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="pictures to draw; all without a name")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a picture is out of date")
    arguments = parser.parse_args()
    known, stale = pictures(), []
    if unknown := set(arguments.names) - set(known):
        parser.error(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    for name in arguments.names or sorted(known):
        file, text = FOLDER / f"{name}.svg", known[name]().svg()
        if not file.is_file() or file.read_text() != text:
            stale.append(file.name)
            if not arguments.check:
                file.write_text(text)
    if not arguments.names:
        stale += [file.name for file in FOLDER.glob("*.svg") if file.stem not in known]
    if arguments.check and stale:
        print(f"out of date in docs/images: {', '.join(stale)}; run: python scripts/make_figures.py")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
