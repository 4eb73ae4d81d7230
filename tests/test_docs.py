"""The pages say what is true: their Python and their commands run, print what they claim, and their links lead on.

A ```python block is run after those above it on its page; the ```output block that follows one is its output. Of an
mjax command in a ```bash block the flags exist, and the config can run.

A ```text block below a ```bash block is what its last command prints; a line `…` in it stands for lines left out. The
line before may be `<!-- numbers vary -->`, if digits differ between machines, or `<!-- not run: why -->`.
"""

import ast
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import tokenize
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from mjax.checkpoint import mirror
from mjax.commands import cli
from mjax.commands.flags import flag_names
from mjax.commands.sft import DEFAULTS, SftArguments
from mjax.commands.train import TrainArguments, choose_config
from mjax.config import DataConfig
from mjax.config.checks import resolve, validate
from scripts import make_site
from tests.conftest import COMPILE_QUICKLY, ROOT

FILES = [ROOT / "README.md", ROOT / "notebooks" / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
PAGES = {str(file.relative_to(ROOT)): file.read_text() for file in sorted(FILES)}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Pages train or plan for seconds; what train-from-python.md trains, notebook 07 does too.
MARKS = {page: pytest.mark.ci for page in PAGES if page.startswith("docs/")}
MARKS |= dict.fromkeys(("docs/extend/python-tour.md", "docs/guides/inspect-a-model.md"), pytest.mark.all)
MARK = "===== end of block ====="


def _python(page):
    """Line, code and promised output of each Python block of a page."""
    found = []
    for fence in FENCE.finditer(PAGES[page]):
        language, body = fence.groups()
        if language == "python":
            found.append([PAGES[page][: fence.start(2)].count("\n") + 1, body, None])
        elif language == "output":
            assert found[-1][2] is None, f"{page}: two output blocks follow the code of line {found[-1][0]}"
            found[-1][2] = body
    return found


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=MARKS.get(page, ())) for page in PAGES if _python(page)],
)
def test_python_prints_what_page_says(page, tmp_path):
    blocks = _python(page)
    script = ["import gc; gc.set_threshold(50_000)", "space = {'__name__': '__main__'}"]  # as in conftest.py
    for line, code, _ in blocks:
        source = "\n" * (line - 1) + code  # so that a traceback names the line of the page
        script.append(f"exec(compile({source!r}, {page!r}, 'exec'), space)\nprint({MARK!r}, flush=True)")
    flags = f"--xla_force_host_platform_device_count=8 {COMPILE_QUICKLY}"
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", "\n".join(script)]
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for (line, _, promised), printed in zip(blocks, result.stdout.split(MARK + "\n"), strict=False):
        assert promised in (None, printed), f"{page}, line {line}"


DIFFS = [(page, body) for page, text in PAGES.items() for kind, body in FENCE.findall(text) if kind == "diff"]


@pytest.mark.parametrize(("page", "body"), DIFFS, ids=[page for page, _ in DIFFS])
def test_diff_of_page_applies(page, body):
    command = ["git", "apply", "--check", "--recount", "--unidiff-zero", "-"]
    files = re.split(r"^(?=--- a/)", body, flags=re.MULTILINE)  # git would read the second header as a removed line
    for part in filter(str.strip, files):
        result = subprocess.run(command, cwd=ROOT, input=part, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def _shell(page):
    """Commands, promised output and True if digits count, of each pair of ```bash and ```text that can be run."""
    fences = list(FENCE.finditer(PAGES[page]))
    for bash, text in itertools.pairwise(fences):
        between = PAGES[page][bash.end() : text.start()]
        if (bash[1], text[1]) != ("bash", "text") or re.search(r"^#", between, re.MULTILINE):
            continue
        (mark,) = re.findall(r"<!-- (.*) -->\n\Z", between) or [""]
        if mark.startswith("not run: "):
            assert len(mark.split()) >= 4, f"{page}: {mark!r} gives no reason"
            continue
        assert mark in ("", "numbers vary"), f"{page}: unknown mark {mark!r}"
        yield bash[2].replace("\\\n", " ").splitlines(), text[2], not mark


def _matches(promised, printed, digits):
    """True if the promised lines are those printed; `…` stands for lines left out, digits count only if `digits`."""
    if not digits:
        promised, printed = (re.sub(r"[\d.,:]*\d", "0", re.sub(r"[ ─-]+", " ", text)) for text in (promised, printed))
    lines = [line.rstrip() for line in promised.splitlines()]
    pattern = "".join(r"(?:.*\n)*?" if line == "…" else re.escape(line) + r" *\n" for line in lines)
    return re.fullmatch(pattern, printed.replace("\r", "\n") + "\n" * (not printed.endswith("\n")))


@pytest.mark.ci
@pytest.mark.parametrize("page", [page for page in PAGES if any(_shell(page))])
def test_command_prints_what_page_says(page, tmp_path):
    for name in ("train.py", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "120", "NO_COLOR": "1"}
    environment.pop("XLA_FLAGS", None)
    for commands, promised, digits in _shell(page):
        for line in commands:
            words = shlex.split(line, comments=True)
            if not words:
                continue
            words = [sys.executable, *(["-m", "mjax"] if words[0] == "mjax" else []), *words[1:]]
            result = subprocess.run(
                words, cwd=tmp_path, env=environment, text=True, timeout=300, stdout=-1, stderr=subprocess.STDOUT
            )
        shown = result.stdout.replace(str(tmp_path), "/home/you")
        assert _matches(promised, shown, digits), f"{page}: {line}\n--- prints\n{shown}\n--- the page says\n{promised}"


@pytest.mark.parametrize(
    ("promised", "printed", "digits", "matches"),
    [
        ("a 1\n", "a 1\n", True, True),
        ("a 1\n", "a 2\n", True, False),
        ("a 1\n", "a  2.5\n", False, True),
        ("a 1\n", "b 1\n", False, False),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True, True),
        ("a\n…\n", "b\n", True, False),
    ],
)
def test_promised_output_is_compared(promised, printed, digits, matches):
    assert bool(_matches(promised, printed, digits)) == matches


def _anchor(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _anchors(text):
    return {_anchor(line.lstrip("# ")) for line in FENCE.sub("", text).splitlines() if line.startswith("#")}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", PAGES[page])):
        file, _, anchor = target.partition("#")
        if not re.match(r"[a-z]+:", target):  # of another site
            path = Path(os.path.normpath((ROOT / page).parent / file)) if file else ROOT / page
            assert path.exists(), target
            assert not anchor or anchor in _anchors(path.read_text()), target


def _commands():
    for page, text in PAGES.items():
        for language, block in FENCE.findall(text):
            for line in block.replace("\\\n", " ").splitlines() if language == "bash" else ():
                words = shlex.split(line, comments=True)
                if "train.py" in words:
                    yield page, ["train", *words[words.index("train.py") + 1 :]]
                elif "mjax" in words and words[words.index("mjax") - 1 : words.index("mjax")] in ([], ["-m"]):
                    yield page, words[words.index("mjax") + 1 :]


class _Parsed(Exception):
    pass


COMMANDS = list(_commands())


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page}: {shlex.join(words)[:60]}" for page, words in COMMANDS]
)
def test_command_of_page_is_understood(page, words, monkeypatch):
    command, argv = words[0], [word.replace("$I", "0") for word in words[1:]]
    assert command in cli.COMMANDS
    if command == "lm-eval":  # its flags are the harness's
        assert "--run" in argv or argv[argv.index("--model") + 1] == "mjax"
    elif command == "train" and "--run" not in argv:
        argv = [re.sub(r"^runs/\w+/config\.json$", "smollm2_135m", word) for word in argv]  # of an imported model
        chosen = choose_config(argv)
        settings = tyro.cli(TrainArguments, args=argv, default=chosen).settings
        mock = replace(settings, data=DataConfig(mock=True))
        validate(resolve(mock, chosen.settings, flag_names(argv), page, ROOT)[0], page)
    elif command == "sft" and "--init" in argv:  # a run whose config has the defaults
        argv = ["--data.path" if word == "--data" else word for word in argv]
        tyro.cli(SftArguments, args=argv, default=SftArguments(settings=DEFAULTS))
    elif command != "train":
        parse = tyro.cli

        def parse_and_stop(*args, **kwargs):
            parse(*args, **kwargs)
            raise _Parsed

        monkeypatch.setattr(tyro, "cli", parse_and_stop)
        monkeypatch.setattr(mirror, "fetch", lambda *_: None)  # a run in an object store
        with pytest.raises(_Parsed):
            cli.main([command, *argv])


def code_lines(file):
    """Lines with code: neither blank, nor comment, nor docstring."""
    text, docstrings = file.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        match getattr(node, "body", None):
            case [ast.Expr(ast.Constant(str())) as docstring, *_]:
                docstrings.update(range(docstring.lineno, docstring.end_lineno + 1))
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in silent]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings)


def _pages_of(entries):
    """Pages of the site's navigation, in its order."""
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [value] if isinstance(value, str) else _pages_of(value)


def test_site_lists_every_page():
    listed = list(_pages_of(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert sorted(listed) == sorted(page.removeprefix("docs/") for page in PAGES if page.startswith("docs/"))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](bert.md#b) [c](https://jax.dev) [d](#e)", None),
        ("![a picture](../images/mesh.svg)", None),
        ("[`a[b]`](../../mjax/step/step.py)", "[`a[b]`](REPOSITORY/blob/main/mjax/step/step.py)"),
        ("[log](../../benchmarks/log)", "[log](REPOSITORY/tree/main/benchmarks/log)"),
        ("[rules](../../CONTRIBUTING.md#code)", "[rules](REPOSITORY/blob/main/CONTRIBUTING.md#code)"),
        ("[numbers](../numbers.toml)", "[numbers](REPOSITORY/blob/main/docs/numbers.toml)"),
        ("![logo](../../docs/numbers.toml)", "![logo](REPOSITORY/raw/main/docs/numbers.toml)"),
        ("| `<\\|a\\|>` | b |", "| `<|a|>` | b |"),
        ("it takes <!--num:a-->4<!--/--> s", "it takes 4 s"),
        ("<details><summary>Answer</summary>", '<details markdown="1"><summary>Answer</summary>'),
        ("```text\n<!--a--> [b](../../c)\n```", None),
    ],
)
def test_site_shows_pages_of_the_repository(written, shown):
    assert make_site.convert(written, "docs/guides/a.md", "REPOSITORY") == (shown or written)


def test_link_to_missing_file_ends_build():
    with pytest.raises(FileNotFoundError, match=r"docs/guides/a.md links to ../../mjax/no.py, which does not exist"):
        make_site.convert("[a](../../mjax/no.py)", "docs/guides/a.md", "REPOSITORY")


SEARCHES = {
    "OOM": "guides/fit-in-memory",
    "out of memory": "guides/fit-in-memory",
    "wandb": "guides/track-a-run",
    "TensorBoard": "guides/track-a-run",
    "freeze layers": "guides/fine-tune",
    "early stopping": "guides/fine-tune",
    "LoRA": "guides/fine-tune",
    "Ulysses": "concepts/context-parallelism",
    "gradient accumulation": "concepts/train-step",
    "gradient checkpointing": "concepts/memory-and-recomputation",
    "FSDP": "concepts/zero",
    "CUDA 12": "reference/platforms",
    "checkpoint size": "reference/checkpoints",
    "cite": "index",
    "own tokenizer": "reference/tokenizers",
    "killed": "guides/resume-and-branch",
    "megatron checkpoint vllm": "guides/megatron-checkpoints",
}


@pytest.mark.parametrize("words", SEARCHES)
def test_search_finds_the_page(words):
    """The site's search shows headings with all words first, so the page has such a heading, and few others do."""
    found = {
        page
        for page, text in PAGES.items()
        for heading in re.findall(r"^#+ (.*)", FENCE.sub("", text), re.MULTILINE)
        if page.startswith("docs/") and set(words.lower().split()) <= set(re.findall(r"[\w.]+", heading.lower()))
    }
    assert f"docs/{SEARCHES[words]}.md" in found
    assert len(found) <= 4, found


def test_pages_stay_short():
    """Words that a person wrote for the site, in text and tables: 36,000 are the length of uv's documentation."""
    written = [text for page, text in PAGES.items() if page.startswith("docs/") and "Generated by" not in text[:400]]
    texts = (re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL) for text in written)
    assert sum(len(text.split()) for text in texts) <= 36_000
