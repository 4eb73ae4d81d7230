"""Every mjax command in README.md and docs/ is understood: its flags exist and its config can run."""

import re
import shlex
from dataclasses import replace

import pytest
import tyro

from mjax import cli
from mjax.commands import lm_eval as harness_command
from mjax.commands.train import TrainArguments, choose_config
from mjax.config import DataConfig
from mjax.validation import validate
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _commands():
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if "train.py" in words:
                    yield page.name, ["train", *words[words.index("train.py") + 1 :]]
                elif "mjax" in words and words[words.index("mjax") - 1] == "-m":
                    yield page.name, words[words.index("mjax") + 1 :]


def test_there_are_commands_to_check():
    assert len(list(_commands())) >= 8


@pytest.mark.parametrize(
    ("page", "words"), list(_commands()), ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60]
)
def test_a_command_in_the_docs_is_understood(page, words, monkeypatch):
    command, argv = words[0], [word.replace("$I", "0") for word in words[1:]]
    assert command in cli.COMMANDS, page
    if command == "lm-eval":  # its flags are the harness's
        assert "--run" in argv or argv[argv.index("--model") + 1] == harness_command.NAME
        return
    if command != "train":
        monkeypatch.setattr(tyro, "cli", _parse_only(tyro.cli))
        with pytest.raises(_Parsed):
            cli.main([command, *argv])
        return
    if "--run" in argv:
        return
    arguments = tyro.cli(TrainArguments, args=argv, default=choose_config(argv))
    validate(replace(arguments.settings, data=DataConfig(mock=True)), page)


class _Parsed(Exception):
    pass


def _parse_only(parse):
    def parse_and_stop(*args, **kwargs):
        parse(*args, **kwargs)
        raise _Parsed

    return parse_and_stop
