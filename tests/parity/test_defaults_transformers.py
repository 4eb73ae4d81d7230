"""Omitted settings of a config.json have the defaults of the config class of `transformers`."""

from dataclasses import asdict

import pytest

from mjax.config.model import REGISTRY, is_user_defined
from mjax.interop.convert import families
from mjax.models.huggingface.family import model_config

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity
UNKNOWN = "kimi_k2"  # its config.json brings a class of its own
READ = [
    family
    for family in families()
    if not family.written_only
    and family.model_type != UNKNOWN
    and not is_user_defined(REGISTRY[family.fixed["kind"]])  # of other tests
]
GIVEN = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"hidden_size": 96 * 128}}
"""Sizes whose defaults no model can have."""


@pytest.mark.parametrize("family", READ, ids=lambda family: family.model)
def test_omitted_settings_are_those_of_transformers(family):
    """All but sizes, which every config.json has."""
    theirs = transformers.AutoConfig.for_model(family.model_type, **GIVEN.get(family.model_type, {})).to_dict()
    sizes = {name: theirs[name] for name, (_, default) in family.fields.items() if default is ...}
    ours = model_config(family, {"model_type": family.model_type, **sizes}, "config.json", 1)
    spelled = model_config(family, theirs, "config.json", 1)
    derived = dict.fromkeys(("kv_heads", "head_dim", "feed_forward"))
    assert {**asdict(ours), **derived} == {**asdict(spelled), **derived}
    assert (ours.groups, ours.head_size) == (spelled.groups, spelled.head_size)
