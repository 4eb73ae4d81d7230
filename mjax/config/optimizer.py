"""The options of the optimizer and of its learning rate. This module imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mjax.config.bounds import Bounds, Count, CountOrZero, NotNegative, Share
from mjax.config.marks import FILE_ONLY, PLANNED, RATE, Elsewhere, Only

WSD, MUON = Only("optimizer.schedule", "wsd"), Only("optimizer.name", "muon")
Schedule = Literal["cosine", "linear", "constant", "inverse_square_root", "wsd"]


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate. Weight decay applies to matrices and embeddings, never to biases or
    LayerNorm."""

    name: Annotated[Literal["adamw", "muon"], PLANNED] = "adamw"
    """adamw, or muon: orthogonalised momentum for the matrices of the layers, and AdamW for everything else
    (embeddings, heads, norms, biases)."""

    learning_rate: Annotated[NotNegative, RATE, Elsewhere("lr peak-lr max-lr")] = 1.5e-4
    """Peak learning rate."""
    min_learning_rate: Annotated[NotNegative, RATE, Elsewhere("min-lr")] = 1e-5
    """Learning rate at the end of the schedule."""
    schedule: Annotated[Schedule, RATE, Elsewhere("lr-decay-style lr-scheduler lr-scheduler-type decay-lr~")] = "cosine"
    """Shape of the decay after warm-up (wsd: warm-up, stable, decay)."""
    warmup_steps: Annotated[CountOrZero, RATE, Elsewhere("lr-warmup-iters warmup-iters warmup warmup-ratio~")] = 0
    """Steps of linear warm-up."""
    decay_steps: Annotated[Count | None, RATE, Elsewhere("lr-decay-iters lr-decay-steps")] = None
    """Step at which min_learning_rate is reached; by default train.steps."""
    wsd_decay_steps: Annotated[Count | None, RATE, WSD, Elsewhere("lr-wsd-decay-iters")] = None
    """wsd only: length of the final decay, in steps; by default a tenth of decay_steps."""
    wsd_decay: Annotated[Literal["exponential", "linear", "minus_sqrt"], RATE, WSD] = "exponential"
    """wsd only: shape of the final decay; minus_sqrt is 1 − √p after a part p of it (arXiv 2405.18392)."""
    weight_decay: Annotated[NotNegative, Elsewhere("wd")] = 0.01
    """Decoupled weight decay."""
    beta1: Annotated[Share, FILE_ONLY, Elsewhere("adam-beta1")] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[Share, FILE_ONLY, Elsewhere("adam-beta2")] = 0.999
    """Decay of the second moment."""
    epsilon: Annotated[float, Bounds(gt=0, such_as="1e-8"), FILE_ONLY, Elsewhere("adam-eps adam-epsilon eps")] = 1e-8
    """Added to the square root of the second moment; with 0 a weight without gradient would become 0 / 0."""
    muon_adjust_lr: Annotated[Literal["match_rms_adamw", "original"], MUON] = "match_rms_adamw"
    """muon only: factor of the update of a matrix. match_rms_adamw: 0.2 √max(in, out), so that AdamW's learning rates
    and weight decay fit (arXiv 2502.16982); original: √max(1, out / in). As adjust_lr_fn of torch.optim.Muon."""
    clip_norm: Annotated[NotNegative, Elsewhere("clip-grad grad-clip gradient-clip-val max-grad-norm")] = 1.0
    """Largest global L2 norm of the gradient; 0: no clipping."""
