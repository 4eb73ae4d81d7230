"""Configs that differ from others in a few fields."""

from dataclasses import replace


def changed(config, **sections):
    """The config with other fields: changed(config, train={"steps": 3})."""
    return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()})
