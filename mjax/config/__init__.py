"""Every option of a run: its config, the config of its model, and the checks before a device is touched."""

from mjax.config.model import REGISTRY, ModelConfig, is_user_defined, register_folders
from mjax.config.run import (
    CheckpointConfig,
    Config,
    DataConfig,
    HealthConfig,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
    available_configs,
    differing_fields,
    from_dict,
    has_user_model,
    load_config,
    load_user_model,
    read_config,
    read_settings,
    save_config,
    to_dict,
    to_flag,
    with_values,
)

register_folders()


def __getattr__(name: str):
    """The config of an architecture in mjax/models, such as `LlamaConfig`."""
    for config in REGISTRY.values():
        if config.__name__ == name and not is_user_defined(config):
            return config
    raise AttributeError(f"module 'mjax.config' has no attribute {name!r}")
