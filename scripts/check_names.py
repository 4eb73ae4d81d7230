"""Find names in `mjax/` that an engineer of this field would not guess.

    python scripts/check_names.py            # prints each, exit code 1 if there is one
    python scripts/check_names.py --warnings # also those for a person to decide

A function is verb + object or, as a pure view, a noun; `to_x`, `from_x` and `with_x` are conversions and `on_x` is a
callback. A class is a noun of the field with its domain. A limit is MAX_ or MIN_ with its unit. A parameter or local
variable is a noun. A name that has to stay is marked `name: ok` with the reason, in its line.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PREPOSITIONS = {
    "about", "and", "at", "behind", "beside", "by", "for", "in", "into", "of", "off", "or", "over", "per", "than",
    "through", "towards", "under", "until", "up",
}  # fmt: skip
"""No function begins with a preposition."""

CONVERSIONS = {"as", "without"}
"""`to_x` and `drop_x` are the usual words."""

PARTICIPLE = re.compile("[a-z]{3,}(ed|wn|ght|ken|ven|tten|ld|lt)")
LIKE_PARTICIPLES = {
    "adult", "belt", "bold", "build", "child", "chunked", "cold", "default", "down", "embed", "even", "fault",
    "feed", "field", "fixed", "flatten", "flight", "fold", "freight", "given", "gold", "grouped", "halt", "height",
    "hold", "insight", "light", "masked", "melt", "need", "old", "own", "packed", "red", "result", "right", "salt",
    "scaffold", "seed", "seven", "shard", "sharded", "shield", "smelt", "speed", "straight", "threshold", "tied",
    "token", "unknown", "weight", "weighted", "world", "yield",
}  # fmt: skip
"""Verbs, nouns, and terms of the field: a grouped matmul, a chunked loss."""

SUPERLATIVES = {
    "ENOUGH", "FAR", "FEW", "FEWEST", "HIGHEST", "LARGEST", "LEAST", "LONGEST", "LOWEST", "MANY", "MOST",
    "SHORTEST", "SMALLEST", "WIDEST", "WORTH",
}  # fmt: skip
"""Words of limits, which are MAX_ or MIN_."""

GENERIC_CLASSES = {
    "Announced", "Aux", "Choice", "Common", "Facts", "Form", "How", "Kind", "Lasting", "Line", "Listener",
    "Matrices", "Moved", "Numbers", "Part", "Parts", "Place", "Question", "Region", "Rung", "Sample", "Samples",
    "Seen", "Sent", "Share", "Software", "Start", "Step", "Trial", "Unfit", "Way", "Window", "Written",
}  # fmt: skip
"""Nouns that need their domain: `LayerKind`, `RouterOutput`."""

EVERYDAY_WORDS = {
    "aloud", "anew", "apart", "beside", "dear", "elsewhere", "everywhere", "farewell", "found", "hear", "heard",
    "hers", "kept", "lasting", "likewise", "mine", "nobody", "noted", "nothing", "obey", "ours", "own", "roomy",
    "said", "say", "says", "straight", "tell", "tells", "theirs", "told", "unfit", "whom",
}  # fmt: skip
"""Words that stand for a term: a heartbeat, a broadcast, saved, local, custom."""

NO_NOUNS = {
    "apart", "each", "found", "heard", "here", "kept", "noted", "others", "own", "said", "there", "told",
}  # fmt: skip
"""Names of variables instead of a noun: `layer`, `local_folder`, `other_ranks`."""


def split_name(name: str) -> list[str]:
    """`_MaxGroups` and `max_groups` → ['max', 'groups']."""
    return [word.lower() for word in re.split("_|(?<=[a-z0-9])(?=[A-Z])", name.strip("_")) if word]


def check_function(node: ast.FunctionDef) -> Iterator[tuple[bool, str]]:
    """True for an error, False for a warning, and the problem, for each problem of a function's name."""
    words = split_name(node.name)
    if node.name.startswith("__"):
        return
    decorators = " ".join(map(ast.unparse, node.decorator_list))
    is_view = "property" in decorators or "overload" in decorators or ".setter" in decorators
    returns_bool = node.returns is not None and ast.unparse(node.returns) == "bool"
    if words[0] in PREPOSITIONS:
        yield True, "a function begins with a verb or a noun"
    if words[0] in CONVERSIONS:
        yield False, "`to_x`, `from_x` and `with_x` are conversions"
    if PARTICIPLE.fullmatch(words[0]) and words[0] not in LIKE_PARTICIPLES and not is_view and not returns_bool:
        yield True, "a function is verb + object: `quantize`, not `rounded`"
    if "of" in words[1:]:
        yield False, "a compound: `layer_kinds`, not `kinds_of`"
    arguments = (argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
    for name in (node.name, *arguments):
        if EVERYDAY_WORDS.intersection(split_name(name)):
            yield True, f"{name}: a term of the field"


def check_variable(name: str) -> Iterator[tuple[bool, str]]:
    """The same for a parameter or a variable."""
    words = set(split_name(name))
    if name.isupper() and {word.upper() for word in words} & SUPERLATIVES and not words & {"max", "min"}:
        yield True, "a limit is MAX_<THING>_<UNIT> or MIN_…"
    if name.strip("_") in NO_NOUNS:
        yield True, "a noun"
    elif name.isupper() and words & EVERYDAY_WORDS:
        yield True, "a term of the field"


def check_class(node: ast.ClassDef) -> Iterator[tuple[bool, str]]:
    """The same for a class."""
    if node.name.strip("_") in GENERIC_CLASSES:
        yield True, "a class is a noun with its domain: `RouterOutput`, not `Choice`"
    if set(split_name(node.name)) & EVERYDAY_WORDS:
        yield True, "a term of the field"


def check_names(tree: ast.Module) -> Iterator[tuple[int, bool, str, str]]:
    """Line, True for an error, name and problem of each name in a module that is not one of the field."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                problems = check_function(node)
            case ast.ClassDef(name=name):
                problems = check_class(node)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                problems = check_variable(name)
            case _:
                continue
        for is_error, problem in problems:
            yield node.lineno, is_error, name, problem


def main() -> int:
    """Print the names; exit code 1 if one is an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warnings", action="store_true", help="also print what a person decides")
    warnings = parser.parse_args().warnings
    errors = 0
    for file in sorted((ROOT / "mjax").rglob("*.py")):
        lines = file.read_text().splitlines()
        for line, is_error, name, problem in check_names(ast.parse("\n".join(lines))):
            if "name: ok" in lines[line - 1] or not (is_error or warnings):
                continue
            errors += is_error
            print(f"{file.relative_to(ROOT)}:{line}: {'error' if is_error else 'warning'}: {name}: {problem}")
    return errors > 0


if __name__ == "__main__":
    sys.exit(main())
