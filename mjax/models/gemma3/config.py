"""The config of Gemma 3. No JAX is imported here."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mjax.config.bounds import Count, Positive
from mjax.config.marks import NEW_RUN, TUNING, By
from mjax.config.model import Tuned, register
from mjax.errors import UsageError
from mjax.models.llama.config import DecoderConfig


@register
@dataclass(frozen=True)
class Gemma3Config(DecoderConfig):
    """A Gemma 3: windows in most layers, two rotary bases, norms around attention and MLP, GeGLU, a tied embedding."""

    kind: Literal["gemma3"] = "gemma3"
    """Architecture of the model."""
    head_dim: Annotated[Count | None, By("head_size")] = 256
    """Attention head size, d_h."""
    window: Annotated[Count | None, TUNING] = 512
    """Tokens that a position attends to in a layer with a window, including itself."""
    global_attention_interval: Annotated[Count | None, TUNING] = 6
    """The last layer in each group of this many has full attention instead of a window. Layers after the last complete
    group have a window."""
    rope_theta: Annotated[Positive, NEW_RUN] = 1_000_000.0
    """Base of the rotary frequencies in layers without a window, as is --model.rope-scaling."""
    local_rope_theta: Positive = 10_000.0
    """Base of the rotary frequencies in layers with a window."""
    query_pre_attn_scalar: Count = 256
    """Scores are q k / √query_pre_attn_scalar."""
    norm_epsilon: Tuned = 1e-6
    """Added to the mean square in RMSNorm."""

    title: ClassVar[str] = "a Gemma 3"
    module: ClassVar[str] = "mjax.models.gemma3.model:Gemma3"
    families: ClassVar[str] = "mjax.models.gemma3.huggingface:FAMILIES"
    activation = "gelu_tanh"

    def check(self, config) -> None:
        super().check(config)
        if config.optimizer.parametrization != "standard":
            flag = f"--optimizer.parametrization {config.optimizer.parametrization}"
            raise UsageError(f"{flag} is not supported for {self.title} (its embedding grows with √hidden); remove it")
