"""Where a layer's weights are, by another rule than that of `tests.reference.layers_of`."""


def place_of(layer, model):
    """What the names of the weights of a layer, from 0, begin with, and its index in them."""
    if model.dense_layers:
        return ("blocks.0.", layer) if layer < model.dense_layers else ("blocks.1.", layer - model.dense_layers)
    if model.expert_interval > 1:
        return f"blocks.turns.{layer % model.expert_interval}.", layer // model.expert_interval
    return "blocks.", layer
