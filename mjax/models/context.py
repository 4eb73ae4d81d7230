"""The context of a forward pass: everything a layer may need to know about its tokens, in one object."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Array, Float, Int

from mjax.config.pattern import PLAIN, LayerKind
from mjax.parallel.random import DropoutKey, dropout_tokens
from mjax.parallel.tokens import Tokens


@dataclass(frozen=True)
class Context:
    """A description of the rows of the stream.

    Attributes:
      tokens: which tokens the rows are.
      key: dropout masks of this forward pass, inside a layer those of the layer; None: no dropout.
      positions: of each token; None: those of `tokens.position_ids`.
      documents: number of a token's document, if attention must stay within it; of whole sequences, also
        where a rank has a part of their positions.
      kind: of a layer, from the pattern of the model.
      layer: number of a layer in the model, from 1.
      slots: which positions the slots of a cache hold on this rank, where one position after them is computed; None
        in training, and for whole prompts.
      loss_chunks: parts of the vocabulary, one after the other, in which the loss is computed (`Output.cross_entropy`).
    """

    tokens: Tokens
    key: DropoutKey | None = None
    positions: Int[Array, "b s"] | None = None
    documents: Int[Array, "b s"] | None = None
    kind: LayerKind = PLAIN
    loss_chunks: int = 1
    layer: Array | int = 0
    slots: Int[Array, " S"] | None = None

    def position_ids(self) -> Int[Array, "_ s"]:
        """Positions of this rank's tokens, counted within their documents if the run does; one row if all sequences
        have the same."""
        return self.tokens.position_ids()[None] if self.positions is None else self.positions

    def of_layer(self, number: Array | int, kind: LayerKind = PLAIN) -> Context:
        """The context of a layer, numbered from 1; 0 is the embedding."""
        key = None if self.key is None else self.key.fold(number)
        return replace(self, key=key, kind=kind, layer=number)

    def key_of(self, site: int) -> DropoutKey | None:
        """The masks of one of the sites of a layer (`parallel/random.py`)."""
        return None if self.key is None else self.key.fold(site)

    def dropout(self, x: Float[Array, "t h"], rate: float, site: int) -> Float[Array, "t h"]:
        """Dropout of the stream with the masks of a site."""
        return dropout_tokens(x, rate, self.key_of(site), self.tokens)
