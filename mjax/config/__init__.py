"""Every option of a run: its config, the config of its model, and the checks before a device is touched."""

from mjax.config.model import register_folders
from mjax.config.run import (
    BERTConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    GPTConfig,
    HealthConfig,
    LlamaConfig,
    LogConfig,
    MeshConfig,
    MixtureConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
    as_flag,
    available_configs,
    differences,
    from_dict,
    has_own_model,
    load_config,
    load_own_model,
    read_config,
    read_settings,
    save_config,
    to_dict,
)

register_folders()
