"""A chat template of a stranger can neither loop for hours nor fill the memory."""

import pytest

from mjax.generation import chat_template
from mjax.generation.chat_template import Template
from mjax.utils.child import ChildError

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (LOOP, "it is not done after 2 s"),
        ("{{ 'x' * 10**10 }}", "takes more than 1024 MiB"),
        ("{{ 'x' * 2**25 }}", "writes more than 4,194,304 characters in a text"),
        ("{{ ''.__class__ }}{{ raise_exception('no roles') }}", "TemplateError: no roles"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "SecurityError"),
    ],
)
def test_template_is_bounded(program, words, monkeypatch):
    if program == LOOP:  # the others end by themselves, on a busy machine later than that
        monkeypatch.setattr(chat_template, "SECONDS", 2.0)
    template = Template("{% if wild %}" + program + "{% else %}{{ said }}{% endif %}")
    assert template.render([{"wild": False, "said": "é\u2028"}]) == [["é\u2028", []]]
    with pytest.raises(ChildError, match=words):
        template.render([{"wild": True}])
    assert template.render([{"wild": False, "said": "again"}]) == [["again", []]]
