"""Opening a trained run: its config on another mesh, its tokenizer, and only the weights of its state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from mjax.checkpoint.arrays import leaves_by_path
from mjax.checkpoint.base import cast_to_trained, restore_weights
from mjax.checkpoint.folders import checkpoint_steps
from mjax.checkpoint.mirror import local_run
from mjax.config import Config, DataConfig, MeshConfig, axes, load_user_model, read_config, read_settings
from mjax.config.checks import validate
from mjax.config.model import ModelConfig
from mjax.config.plain_values import build
from mjax.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_folder
from mjax.errors import UsageError, name_arguments
from mjax.models.protocol import Model
from mjax.parallel.mesh import make_mesh
from mjax.step.layout import build_layout
from mjax.utils.files import resolve_parents

MICRO_BATCHES_A_STAGE = 4  # for a pipeline: its bubble is then a fifth at most


@dataclass(frozen=True)
class OpenRun:
    """A trained run.

    Attributes:
      folder: of the run.
      config: as it was saved.
      step: of the checkpoint.
      weights: float32 master weights, on the devices of `mesh`.
      mesh: of the devices.
      shape: of the mesh.
    """

    folder: Path
    config: Config
    step: int
    weights: Model
    mesh: Mesh
    shape: MeshConfig

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer stored in the run.

        Raises:
          UsageError: it has none.
        """
        return run_tokenizer(self.folder, self.config.model, flag=None)

    def weights_for(self, target: Model) -> Model:
        """The weights for another program on the same mesh: with another attention kernel, sequence or dtype."""
        stored, expected = (
            {name: leaf.shape for name, leaf in leaves_by_path(model).items()} for model in (self.weights, target)
        )
        if different := [name for name in stored | expected if stored.get(name) != expected.get(name)]:
            name = different[0]
            shapes = f"the shape {stored.get(name)} and the program {expected.get(name)}"
            raise UsageError(f"{name} of {self.folder} has {shapes}; build it from the run's config")
        return jax.tree.unflatten(jax.tree.structure(target), jax.tree.leaves(self.weights))


@name_arguments("step")
def open_run(folder: str | Path, step: int | None = None, mesh: MeshConfig | dict[str, int] | None = None) -> OpenRun:
    """Open a run folder: its config, and the weights of checkpoint `step`, by default of the newest intact one.

    Args:
      folder: of the run.
      step: of the checkpoint.
      mesh: for the weights, or its fields, such as {"model": 2}; by default one device; may differ from the mesh of
        training.

    Raises:
      UsageError: there is no such run or checkpoint; the mesh cannot split its model or needs more devices than there
        are; or its model is user-defined, and the program has neither defined, imported nor loaded it with
        `load_config`.
      RunError: the checkpoint is damaged.
    """
    mesh = build(MeshConfig, mesh, "mesh") if isinstance(mesh, dict) else mesh or MeshConfig()
    folder = resolve_parents(local_run(folder))
    load_user_model(None, folder, print)
    config = read_config(folder / "config.json")
    inference_config(config, mesh)  # Orbax would explain in kilobytes
    devices = make_mesh(mesh)
    # Frozen weights too: a program that computes in bf16 rounds them itself, and another one must not.
    abstract = cast_to_trained(build_layout(replace(config, mesh=mesh), devices).abstract_model, folder)
    step, weights = restore_weights(folder, abstract, step, print)
    return OpenRun(folder, config, step, weights, devices, mesh)


def read_run(run: Path, causal: bool, reason: str) -> Config:
    """The config of the run in folder `run`.

    Args:
      run: its folder.
      causal: whether its model must be one that generates text, or a bidirectional one.
      reason: why another will not do.

    Raises:
      UsageError: the folder has no config, or another kind of model; or nothing has registered its model.
    """
    config = (read_config if causal else read_settings)(run / "config.json")  # no BERT is user-defined
    if config.model.causal != causal:
        wanted = "a GPT" if causal else "a BERT"
        raise UsageError(f"{run} holds {config.model.title}, {reason}; give the run folder of {wanted}")
    return config


def inference_config(
    config: Config,
    mesh: MeshConfig,
    attention: str | None = None,
    micro_batch: int | None = None,
    compute: str | None = None,
) -> Config:
    """The config for using the model of a run on `mesh`, on this machine's devices, without dropout.

    The `sequence` of a causal model covers all its positions, however short the samples were.

    Args:
      config: as saved by the run.
      mesh: may differ from the mesh of training.
      attention: the kernel, or `auto`; by default one that needs no trial, `xla` on a GPU and `xla_blocks` on a CPU.
      micro_batch: sequences per forward pass of a data-parallel replica; by default as in training. A step runs one
        micro-batch per replica, or four times as many as there are stages.
      compute: dtype of activations and matmuls; by default as in training.

    Raises:
      UsageError: the model cannot be split over the mesh, there are too few devices, or a micro-batch is below 1.
    """
    train, precision, model = config.train, config.precision, config.model.without_dropout()
    if micro_batch is not None:
        train = replace(train, micro_batch=micro_batch)
    if train.micro_batch < 1:
        raise UsageError(f"--train.micro-batch is {train.micro_batch}; it must be at least 1")
    if attention is None:
        attention = "xla" if jax.default_backend() == "gpu" else "xla_blocks"
    if compute is not None:
        precision = replace(precision, compute=compute)
    if model.causal:
        model = replace(model, sequence=model.max_positions)
    samples = train.micro_batch * mesh.data * (MICRO_BATCHES_A_STAGE * mesh.pipe if mesh.pipe > 1 else 1)
    train = replace(train, global_batch=samples, batch_rampup=None, batch_history=())
    model, data = replace(model, attention=attention), DataConfig(mock=True)  # no training data are read
    config = replace(config, model=model, mesh=mesh, precision=precision, data=data, train=train)
    validate(config)
    check_enough_devices(mesh)
    return config


def check_enough_devices(mesh: MeshConfig) -> None:
    """Refuse a mesh that needs more devices than there are; fewer are allowed.

    Raises:
      UsageError: it needs more.
    """
    if (present := len(jax.devices())) < mesh.devices:
        flags = axes.cli_sizes(mesh)
        given = " ".join(f"--mesh.{axis} {size}" for axis, size in flags.items() if size > 1)
        fewer = " ".join(f"--mesh.{axis} 1" for axis, size in flags.items() if size > 1)
        raise UsageError(f"{given} needs {mesh.devices} devices; {present} available: use {fewer}")


def run_tokenizer(
    run: Path, model: ModelConfig, given: str | None = None, flag: str | None = "--tokenizer KIND:FILES"
) -> Tokenizer:
    """The tokenizer of the run in folder `run`, or the given one.

    Args:
      run: folder of the run.
      model: of the run.
      given: KIND:FILES, as in `mjax prepare`.
      flag: how it is given to the command, for the message; None: the command has no such flag.

    Raises:
      UsageError: there is none, or it has more ids than `model` has embeddings.
    """
    ways = [f"add the one its model was trained with: {flag}"] if flag is not None else []
    if 0 in checkpoint_steps(run):
        ways.append("convert the model again with --tokenizer KIND:FILES, which stores it in the run")
    remedy = ", or ".join(ways) or "use a run that was trained on data of mjax prepare, which stores it"
    if given is not None:
        tokenizer, named = load_tokenizer(given), (flag or "the tokenizer KIND:FILES").replace("KIND:FILES", given)
    elif (run / "tokenizer").is_dir():
        tokenizer, named = tokenizer_from_folder(run / "tokenizer"), f"the tokenizer of {run}"
    else:
        raise UsageError(f"{run} has no tokenizer; {remedy}")
    if tokenizer.vocabulary > model.vocabulary:
        sizes = f"{tokenizer.vocabulary:,} ids and the model of {run} {model.vocabulary:,}"
        raise UsageError(f"{named} has {sizes}; {remedy}")
    return tokenizer
