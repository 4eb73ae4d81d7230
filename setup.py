"""Version and long description of the package, which pyproject.toml cannot compute.

PyPI shows README.md without the repository, so its links become links to the version's tag on GitHub.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
[VERSION] = re.findall(
    r'^__version__ = "(.+)"$', (ROOT / "mjax" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE
)


def absolute_links(text: str) -> str:
    """Change the links of README.md to files of the repository; pictures to the files themselves."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}({PROJECT['urls']['Source']}/{kind}/v{VERSION}/{link[2]})"

    return re.sub(r"(!?\[[^\[\]]*\])\((?!#|[a-z]+:)([^)\s]+)\)", absolute, re.sub("<!--.*?-->", "", text))


setup(
    version=VERSION,
    long_description=absolute_links((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
