"""Omitted settings of a config.json have the defaults of the config class of `transformers`."""

from dataclasses import asdict

import pytest

from mjax.interop.convert import families
from mjax.models.huggingface.family import model_config

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity
SPELLED = ("num_key_value_heads", "head_dim")


READ = [family for family in families() if not family.written_only]


@pytest.mark.parametrize("changed", [{}, {"hidden_size": 256, "num_attention_heads": 8}], ids=["none", "a few"])
@pytest.mark.parametrize("family", READ, ids=lambda family: family.model)
def test_omitted_settings_are_those_of_transformers(family, changed):
    names = {"hidden_size": "n_embd", "num_attention_heads": "n_head"} if family.model_type == "gpt2" else {}
    names = {"num_attention_heads": "n_head"} if family.model_type == "bloom" else names
    changed = {names.get(name, name): value for name, value in changed.items()}
    theirs = transformers.AutoConfig.for_model(family.model_type, **changed)
    ours = model_config(family, {"model_type": family.model_type, **changed}, "config.json", 1)
    spelled = model_config(family, theirs.to_dict(), "config.json", 1)
    either = dict.fromkeys(("kv_heads", "head_dim", "feed_forward"))
    assert {**asdict(ours), **either} == {**asdict(spelled), **either}
    heads = theirs.num_attention_heads
    groups = getattr(theirs, "num_key_value_heads", None) or heads
    size = getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
    assert (ours.groups, ours.head_size) == (groups, size)
    width = getattr(theirs, "intermediate_size", None) or 4 * theirs.hidden_size
    assert getattr(ours, "mlp_width", width) == width
