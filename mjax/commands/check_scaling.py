"""`mjax check-scaling`: whether one learning rate fits a model at any width and depth. This is the coordinate check of
arXiv 2203.03466, appendix D.1, by weight.

Small models of several widths take a few steps on one batch. Then for every weight W these sizes are measured, as root
mean squares:

    start     the residual stream, minus the one with W = 0        must not grow with the width
    updates   the logits, minus those with W of the start,         must neither grow nor vanish
              by the share of the layers that W is of
    decay     the share of W that a step without gradient takes    must neither grow nor vanish
    size      the residual stream, and the logits                  must not grow

So a failure names the weight whose initial values, learning rate or decay is wrong, in a custom model too: nothing but
its weights is needed.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from mjax.commands.arguments import CheckScalingArguments
from mjax.config import Config, DataConfig, MeshConfig, PrecisionConfig, TrainConfig, load_config
from mjax.config.checks import validate
from mjax.config.marks import WIDE, effective_value, names_with
from mjax.errors import RunError, UsageError, check_folder
from mjax.models.protocol import Model
from mjax.parallel.mesh import batch_specs, make_mesh
from mjax.parallel.weights import LAYER, PART, has_weight_decay, leaf_name, read_dims, weight_metadata
from mjax.pictures.figures import save
from mjax.step.layout import build_layout
from mjax.step.optimizer import make_optimizer
from mjax.step.parametrization import scale_updates
from mjax.step.step import build_program, sum_over_batch
from mjax.utils.figures import format_table

LIMIT = 0.3  # largest exponent of a size that neither grows nor vanishes: wrong factors give about 1/2 or 1
HEAD_SIZE, LAYERS, RATE, INIT_STD, NOISE = 32, 4, 1e-3, 0.02, 1e-6
START_NOISE = 0.01
"""Part of the residual stream up to which a weight may change it at the start: as much as a token that changes its
expert."""
BATCHES, POSITIONS, TOKENS = 4, 8, 8
"""Sizes are means over batches of one short sequence: muP is a limit of models that are wider than a batch has tokens,
and beyond it updates of many tokens cancel, as width^−1/4."""
SENTENCES = {
    "start": "the part of the residual stream that needs it {} at the start; lower its initial values",
    "updates": "the effect of its updates on the logits {}; correct its learning rate, or the scale of its result",
    "decay": "its weight decay in a step {}; keep learning rate × weight decay the same",
    "size": "its size {} at the start; lower initial values",
}


class Growth(NamedTuple):
    """A size of models of several widths, or depths.

    Attributes:
      part: name of a weight, or stream or logits.
      measure: start, updates, decay or size.
      along: width or depth.
      at: the widths or depths.
      sizes: of each model.
    """

    part: str
    measure: str
    along: str
    at: tuple[int, ...]
    sizes: tuple[float, ...]

    @property
    def exponent(self) -> float:
        """a, if sizes are proportional to widthᵃ; by least squares."""
        return float(np.polyfit(np.log(self.at), np.log(np.maximum(self.sizes, 1e-30)), 1)[0])

    @property
    def fails(self) -> bool:
        """True if the size grows, or vanishes and must not."""
        may_vanish = self.measure in ("start", "size")
        return self.exponent > LIMIT or (self.exponent < -LIMIT and not may_vanish)

    def describe(self) -> str:
        """A sentence about a failure."""
        verb = "grows" if self.exponent > 0 else "vanishes"
        sizes = f"{self.sizes[0]:.2g} at {self.at[0]}, {self.sizes[-1]:.2g} at {self.at[-1]}"
        change = f"{verb} as {self.along}^{self.exponent:.2f} ({sizes})"
        return f"{self.part}: {SENTENCES[self.measure].format(change)}"


def check_scaling(arguments: CheckScalingArguments) -> int:
    """Measure, print, and return the exit code.

    Raises:
      UsageError: the model is not causal, a size does not fit it, or there are not two widths.
    """
    config = load_config(arguments.config)
    if not config.model.causal:
        raise UsageError(f"mjax check-scaling is not for {config.model.title}; give the config of a causal model")
    for name, sizes in (("--widths", arguments.widths), ("--depths", arguments.depths)):
        if len(set(sizes)) < 2 or min(sizes) < 1:
            raise UsageError(f"{name} {' '.join(map(str, sizes))} shows no growth; give two sizes, such as {name} 8 64")
    if arguments.figure:
        check_folder("--figure", arguments.figure)
    growths = measure(config, arguments.widths, arguments.depths, arguments.steps)
    failures = [growth for growth in growths if growth.fails]
    if arguments.figure:
        draw(growths, arguments.figure)
    if arguments.json:
        values = [{**growth._asdict(), "exponent": growth.exponent, "fails": growth.fails} for growth in growths]
        print(json.dumps({"ok": not failures, "growths": values}))
        return bool(failures)
    for (along, at), rows in groupby(growths, lambda growth: (growth.along, growth.at)):
        cells = [(g.part, g.measure, f"{g.exponent:+.2f}", *(f"{size:.2g}" for size in g.sizes)) for g in rows]
        print("\n".join(format_table((along, "", "exponent", *at), cells, 2)))
    print("\n".join(f"✗ {growth.describe()}" for growth in failures) or "✓ no part grows or vanishes")
    return bool(failures)


def draw(growths: Sequence[Growth], file: Path) -> None:
    """Draw the sizes relative to those of the first model, a panel for each measure; failures have a legend, and the
    area of exponents up to `LIMIT` is grey."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((growth.measure, growth.along, growth.at) for growth in growths))
    figure = Figure(figsize=(3.2 * len(panels), 4), dpi=120, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        for growth in (growth for growth in growths if panel == (growth.measure, growth.along, growth.at)):
            style = {"color": "C3", "label": growth.part} if growth.fails else {"color": "C0", "alpha": 0.5}
            axes.plot(growth.at, np.divide(growth.sizes, growth.sizes[0]), "o-", **style)
        ratios = np.divide(panel[2], panel[2][0])
        axes.fill_between(panel[2], ratios**-LIMIT, ratios**LIMIT, color="0.9")
        axes.set(xscale="log", yscale="log", xlabel=panel[1], title=panel[0])
        axes.set_xticks(panel[2], map(str, panel[2]))
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="x-small")
    figure.supylabel("size / that of the first model")
    save(figure, file)


def measure(config: Config, widths: Sequence[int], depths: Sequence[int], steps: int) -> list[Growth]:
    """All sizes along the width, and for completep along the depth."""
    layers = min(config.model.layers, LAYERS)
    sweeps = {("width", tuple(widths)): [(width, layers) for width in widths]}
    if config.optimizer.parametrization == "completep":
        sweeps["depth", tuple(depths)] = [(widths[0], depth) for depth in depths]
    growths = []
    for along, shapes in sweeps.items():
        models = [_measure_model(_small(config, widths[0], *shape), steps) for shape in shapes]
        noise = {"start": START_NOISE * max(sizes["stream", "size"] for sizes in models)}
        measured = [Growth(*key, *along, tuple(sizes[key] for sizes in models)) for key in models[0]]
        growths += [growth for growth in measured if max(growth.sizes) > noise.get(growth.measure, NOISE)]
    return growths


def _small(config: Config, first: int, width: int, layers: int) -> Config:
    """The config of a small model, with heads of one size, or of the first model's number. The first model is the base,
    so that its updates are small, whatever the base of the config."""
    model, optimizer = config.model.without_dropout(), config.optimizer
    base = {"base_width": first, "base_depth": min(model.layers, LAYERS), "base_head_size": HEAD_SIZE}
    base = {name: size for name, size in base.items() if getattr(optimizer, name) is not None}
    heads = {"heads": max(1, model.hidden // HEAD_SIZE)} | ({"head_dim": HEAD_SIZE} if model.head_dim else {})
    sizes = {name: effective_value(model, name) for name in names_with(WIDE, type(model))}
    wide = {name: max(size, model.hidden) for name, size in sizes.items() if size}  # muP is a limit of wide latents too
    model = replace(model, **heads, **wide).resize(first, layers)
    model = model.resize(width, layers, more_heads=optimizer.base_head_size is None)
    tokens = {"vocabulary": min(model.vocabulary, TOKENS), "vocabulary_multiple": 1, "init_std": INIT_STD}
    constant = {"learning_rate": RATE, "min_learning_rate": 0.0, "schedule": "constant", "warmup_steps": 0}
    constant |= {"decay_steps": None, "wsd_decay_steps": None, "wsd_decay": "exponential"}
    small = Config(
        model=replace(model, attention="xla", sequence=POSITIONS, **tokens),
        data=DataConfig(mock=True),
        optimizer=replace(optimizer, **base, **constant),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(global_batch=1, micro_batch=1, seed=config.train.seed),
    )
    validate(small)
    return small


def _measure_model(config: Config, steps: int) -> dict[tuple[str, str], float]:
    """The sizes of one model, by part and measure."""
    print(f"width {config.model.hidden}, {config.model.layers} layers …", file=sys.stderr, flush=True)
    mesh = make_mesh(MeshConfig())
    program, layout = build_program(config, mesh), build_layout(config, mesh)
    specs = layout.specs, batch_specs(config.batch_arrays(), POSITIONS)
    transform, shard_map = scale_updates(config, make_optimizer(config, layout)), partial(jax.shard_map, mesh=mesh)

    def head(weights, x, micro_batch, context):
        return x, weights.logits(x, context.tokens)

    def decay(weights):
        return transform.update(jax.tree.map(jnp.zeros_like, weights), transform.init(weights), weights)[0]

    forward = partial(sum_over_batch, config, layout.plan, head=head)
    forward = jax.jit(shard_map(forward, in_specs=specs, out_specs=P()))
    start = program.initialize().model
    old, structure = jax.tree.flatten(start)
    decayed = jax.tree.leaves(jax.jit(shard_map(decay, in_specs=specs[:1], out_specs=specs[0]))(start))
    sizes = Counter()
    for seed in range(BATCHES):
        ids = np.random.default_rng(seed).integers(0, config.model.vocabulary, (1, POSITIONS + 1), np.int32)
        batch = program.put_on_devices({"tokens": ids[:, :-1], "labels": ids[:, 1:]})
        state = program.initialize()
        for _ in range(steps):
            state, _ = program.train_step(state, batch)
        new = jax.tree.leaves(state.model)
        (stream, logits), (_, trained) = forward(start, batch), forward(state.model, batch)
        sizes.update({("stream", "size"): _rms(stream), ("logits", "size"): _rms(logits)})
        for i, label, mask, share in _matrices(start):
            zeroed = [*old[:i], jnp.where(mask, 0.0, old[i]), *old[i + 1 :]]
            before = [*new[:i], jnp.where(mask, old[i], new[i]), *new[i + 1 :]]
            sizes[label, "start"] += _rms(forward(structure.unflatten(zeroed), batch)[0] - stream)
            sizes[label, "updates"] += _rms(forward(structure.unflatten(before), batch)[1] - trained) / share
            size = _rms(jnp.where(mask, old[i], 0.0)) or 1.0  # a matrix may start at zero
            sizes[label, "decay"] += _rms(jnp.where(mask, decayed[i], 0.0)) / size
    if broken := next((key for key, size in sizes.items() if not np.isfinite(size)), None):
        raise RunError(f"{' '.join(broken)} is not finite at width {config.model.hidden}; look at the model's layers")
    return {key: float(size) / BATCHES for key, size in sizes.items()}


def _matrices(model: Model) -> Iterator[tuple[int, str, np.ndarray | bool, float]]:
    """The matrices and embeddings, part by part: number of the weight, name, mask of its elements, share of layers."""
    weights = jax.tree_util.tree_leaves_with_path(model)
    cards = zip(weights, read_dims(model), weight_metadata(model, "parts"), strict=True)
    for i, ((path, weight), dims, parts) in enumerate(cards):
        name, parts = leaf_name(path), (parts or ()) if PART in dims else ()
        shape = [len(parts) if dim == PART else 1 for dim in dims]
        masks = {f"{name} ({part})": np.reshape([part == other for other in parts], shape) for part in parts}
        share = weight.shape[0] / model.config.layers if LAYER in dims else 1.0
        if has_weight_decay(dims):
            yield from ((i, label, mask, share) for label, mask in (masks or {name: True}).items())


def _rms(x: Array) -> float:
    return float(jnp.sqrt(jnp.square(x).mean()))
