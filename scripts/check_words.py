"""Find sentences that an engineer of this field would not write, in docs, docstrings, comments, messages and commits.

    python scripts/check_words.py                  # prints each with what to write instead; exit code 1 if there is one
    python scripts/check_words.py --commit FILE    # a commit message, as scripts/hooks/commit-msg does

Code in backticks, code blocks and links are not read, nor are logs of results and generated pages. A phrase that has to
stay is marked `prose: ok` with the reason, in its line.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = re.compile(r"benchmarks/log/|docs/reference/(commands|flags|configs|python)\.md|CHANGELOG\.md|LICENSE")
DOCS, HELP, DOCSTRING, COMMENT, MESSAGE, TEST, COMMIT = (
    "docs", "help", "docstring", "comment", "message", "test name", "commit",
)  # fmt: skip
"""Where a text stands; the docstring of a field or constant is `help`, because flags show it."""
ALL = frozenset({DOCS, HELP, DOCSTRING, COMMENT, MESSAGE, TEST, COMMIT})
READ_BY_USERS = frozenset({DOCS, HELP, MESSAGE})

WORDS = re.compile(r"\b(found|own|kept|beside|apart|told|hear|said)\b")
"""Words that stand for a term of the field; tests/test_budgets.py limits the lines of mjax/ with one."""

PHRASES = [
    # everyday words for terms of the field
    ("matrix products?", "matmul", READ_BY_USERS),
    ("masters(?! degree)", "master weights", ALL),
    ("held back by", "limited by; bottleneck", ALL),
    ("messages? between stages|messages? of a pipeline", "pipeline send/recv", ALL),
    ("sums( and gathers)? over data", "gradient all-reduce, ZeRO all-gather", ALL),
    ("(labels?|tokens) that (do not |does not )?counts?", "unmasked labels, masked labels", ALL),
    ("(dims?|queries|keys|heads) (that )?(is|are) (not )?turned", "rotated", ALL),
    ("stretch(es)?", "span, window", ALL),
    ("summands?", "term", ALL),
    ("in hand", "in memory", ALL),
    # words that translate another language
    ("anew|afresh", "again, from scratch", ALL),
    ("dear(er|est|ly)?", "slow, expensive", ALL),
    ("mend(s|ed|ing)?", "fix", ALL),
    ("(?<!look )(?<!looks )alike", "equally, the same way", ALL),
    ("refus(e|es|ed|al|ing)", "reject; is not supported", frozenset({DOCS, HELP})),
    ("(is|are) not there for", "is not supported for", ALL),
    ("goes on(?=[.,;:)])|(go|goes|went) on (with|at|until)", "continue", ALL),
    ("com(es|e) to (a )?(validation|perplexity|loss|[0-9])", "reaches, is", ALL),
    ("in the place of|in its place", "instead of, instead", ALL),
    ("besides(?=[.;,)])", "as well, too", ALL),
    ("(whichever|this|that|at the same) moment(?! of)", "point, time: a moment is Adam's", ALL),
    # things that speak and know
    ("knows? (nothing|no [a-z]+|neither)", "does not depend on, does not import", ALL),
    ("(says?|said|saying) so", "reports it", ALL),
    ("(is|are|was|were) said(?! to)", "is reported, documented", ALL),
    # negations and sentences without a subject
    ("there (is|are) none|(has|have) none(?! of)", "the missing thing, and what to do", READ_BY_USERS),
    (
        r"(?<!there )(is|are) no (?!longer|more|less|other|such|one\b|need|way|doubt|match|[a-z]+er\b)[a-z]\w+",
        "is not a …",
        ALL - {COMMENT},
    ),
    (r"(?<=[.!?¶] )(?-i:What|Whatever|Whoever) (?!if\b|about\b)[^.?!;:¶|]*[.;:]", "a subject with a name", ALL),
    (r"(?<=[.!?¶] )(?-i:Those|That) (of|which|that|whose|in|with|without)\b", "the noun again", ALL),
    (r"(?<=[.!?¶] )(?-i:In all)\b", "Total", ALL),
    (r"\A(?-i:What|How|Where|Who|Why|That|Those|As|Of|From|With|By)\b(?! to\b)", "a verb or noun first", {DOCSTRING}),
    (r"\Atest (what|that|whoever|of|as|those|from)\b", "test_<unit>_<behaviour>", {TEST}),
]
"""Pattern of a phrase, what to write instead, and where it is an error."""

COMMIT_VERBS = re.compile("count|give|keep|leave|let|mend|say|state|tell", re.IGNORECASE)
"""Verbs that a commit's subject does not begin with: they do not say what changed."""
MAX_SUBJECT_CHARACTERS = 65


class Text(NamedTuple):
    """A text of a file: where it stands, and its first line."""

    where: str
    line: int
    text: str


RULES = [
    (re.compile(pattern if pattern[0] == "\\" else rf"\b({pattern})(?!\w)", re.IGNORECASE), instead, places)
    for pattern, instead, places in PHRASES
]


def remove_code(text: str) -> str:
    """Replace code, links and addresses, line by line, so that what remains stays in its line."""
    blank = lambda match: "CODE" + "\n" * match[0].count("\n")  # noqa: E731
    text = re.sub(r"(?ms)^ *(```|~~~).*?^ *\1[^\n]*$|<!--.*?-->", blank, text)
    text = re.sub(r"(``?)[^`]+\1", blank, text)
    return re.sub(r"(?<=\])\([^)]*\)|https?://\S+", blank, text)


def check(text: Text) -> Iterator[tuple[int, str]]:
    """Line and problem of each phrase in a text."""
    prose = re.sub(r"\s*\n[\s>#*|-]*", join_lines, remove_code(text.text))
    flat = prose.replace("\n", "")
    for pattern, instead, places in RULES:
        for match in pattern.finditer(flat) if text.where in places else ():
            yield text.line + line_of(prose, match.start()), f"{match[0].strip()!r} in a {text.where}: {instead}"


def join_lines(ends: re.Match) -> str:
    """A space for the end of a line, with a mark at the end of a paragraph or item; its line feeds keep the count."""
    is_paragraph = ends[0].count("\n") > 1 or re.search("[#*|-]", ends[0])
    return ("¶ " if is_paragraph else " ") + "\n" * ends[0].count("\n")


def line_of(prose: str, position: int) -> int:
    """The line of a character of `prose`, counted without its line feeds."""
    characters = 0
    for number, line in enumerate(prose.split("\n")):
        characters += len(line)
        if position < characters:
            return number
    return 0


def read_python(name: str, source: str) -> Iterator[Text]:
    """Docstrings, comments, the names of tests as words, and strings of the package that may be messages."""
    tree = ast.parse(source)
    docs = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for number, statement in enumerate(body) if isinstance(body, list) else ():
            match statement:
                case ast.Expr(ast.Constant(str(text)) as constant):
                    docs.add(id(constant))
                    yield Text(HELP if number else DOCSTRING, statement.lineno, text)
                case ast.FunctionDef(name=test) if test.startswith("test_"):
                    yield Text(TEST, statement.lineno, test.replace("_", " "))
    if name.startswith(("mjax/", "benchmarks/")):
        yield from read_strings(tree, docs)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(COMMENT, token.start[0], token.string.lstrip("# "))


def read_strings(tree: ast.AST, docs: set[int]) -> Iterator[Text]:
    """Strings of four words or more that are not docstrings, with X for the holes of f-strings."""
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(parts):
                docs.update(map(id, parts))
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)
            case ast.Constant(str(text)) if id(node) not in docs:
                pass
            case _:
                continue
        if len(text.split()) >= 4:
            yield Text(MESSAGE, node.lineno, text)


def read_file(name: str) -> Iterator[Text]:
    """The texts of a file of the repository."""
    content = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        yield Text(DOCS, 1, content)
    elif name.endswith(".py"):
        yield from read_python(name, content)
    else:
        for cell in json.loads(content)["cells"]:
            if cell["cell_type"] == "markdown":
                first = content.count("\n", 0, content.find(json.dumps(cell["source"][:1], ensure_ascii=False)[1:-1]))
                yield Text(DOCS, first + 1, "".join(cell["source"]))


def check_commit(message: str) -> Iterator[str]:
    """The problems of a commit message; git's comments and merges have none."""
    message = re.sub(r"(?m)^#.*\n?", "", message).strip()
    subject = message.partition("\n")[0]
    if subject.startswith(("Merge ", "Revert ", "fixup!", "squash!")):
        return
    component, colon, change = subject.partition(": ")
    if not colon or not re.fullmatch(r"[a-z0-9][\w .,/-]*", component):
        yield f"{subject!r} names no component: write `planner: document time_step`"
    if len(subject) > MAX_SUBJECT_CHARACTERS:
        yield f"the subject has {len(subject)} characters: use {MAX_SUBJECT_CHARACTERS}, and the body for the why"
    verb = change.partition(" ")[0]
    if not verb.islower() or COMMIT_VERBS.fullmatch(verb):
        yield f"{verb!r} does not say what changed: use add, fix, remove, rename, move, test or document"
    for _, problem in check(Text(COMMIT, 1, message)):
        yield problem


def check_files(names: Iterable[str]) -> Iterator[str]:
    """A line for each phrase in files of the repository that has no mark."""
    for name in names:
        lines = (ROOT / name).read_text(encoding="utf-8").split("\n")
        for line, problem in sorted({hit for text in read_file(name) for hit in check(text)}):
            if not any("prose: ok" in marked for marked in lines[line - 1 : line]):
                yield f"{name}:{line}: {problem}"


def main() -> int:
    """Print the findings; exit code 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", type=Path, metavar="FILE", help="check a commit message instead of the tree")
    commit = parser.parse_args().commit
    if commit is None:
        listed = subprocess.run(
            ["git", "ls-files", "*.md", "*.py", "*.ipynb"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        problems = list(check_files(name for name in listed.stdout.split("\n") if name and not SKIPPED.match(name)))
    else:
        problems = list(check_commit(commit.read_text(encoding="utf-8")))
    print(*problems, sep="\n", end="\n" * bool(problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
