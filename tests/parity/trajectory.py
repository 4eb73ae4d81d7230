"""The same run of AdamW or Muon here and in torch, from the same weights over the same batches."""

from dataclasses import replace

import jax
import numpy as np
import torch

from mjax.parallel.mesh import make_mesh
from mjax.step.step import build_program


def losses_of_both(config, weights, peer, peer_loss, batches, steps=20, last=None):
    """Losses of `steps` steps at a constant rate, ours and torch's.

    Args:
      config: of our run; torch takes learning rate, decay and clipping from it.
      weights: our model's, whole.
      peer: torch's module, which holds the same.
      peer_loss: batch → torch's loss of it.
      batches: what every step takes one of, in turn.
      last: a list to which our last state is added.
    """
    program = build_program(config, make_mesh(config.mesh))
    state = program.initialize()
    placed = jax.tree.map(lambda ours, there: jax.device_put(np.asarray(ours), there.sharding), weights, state.model)
    state = replace(state, model=placed)

    ours, theirs = [], []
    optimizers = _optimizers_of(peer, config.optimizer)
    for step in range(steps):
        batch = batches[step % len(batches)]
        state, metrics = program.train_step(state, program.put_on_devices(batch))
        ours.append(float(metrics.loss))
        loss = peer_loss(batch)
        peer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), config.optimizer.clip_norm)
        for each in optimizers:
            each.step()
        theirs.append(loss.item())
    if last is not None:
        last.append(state)
    return ours, theirs


def _optimizers_of(peer, optimizer):
    """AdamW for all weights, or Muon for the matrices of the layers and AdamW for the others."""
    weights, found = dict(peer.named_parameters()), []
    if optimizer.name == "muon":
        matrices = [weights.pop(name) for name in list(weights) if ".layers." in name and weights[name].ndim == 2]
        options = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
        rate = optimizer.learning_rate
        found.append(torch.optim.Muon(matrices, lr=rate, weight_decay=optimizer.weight_decay, **options))
    # As Megatron: no decay of weights with one dim, biases and LayerNorm.
    decayed, spared = ([p for p in weights.values() if (p.ndim > 1) == many] for many in (True, False))
    groups = [{"params": decayed, "weight_decay": optimizer.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    betas = optimizer.beta1, optimizer.beta2
    return [*found, torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=betas, eps=optimizer.epsilon)]
