"""Import hook that checks types of signatures in `parallel/`, `models/` and `step/`: shapes, dtypes and the rest."""

from collections.abc import Callable

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

checked_call = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float


def checked(function: Callable) -> Callable:
    """Check a function's calls; not those that make a dataclass, which JAX fills with abstract values and markers."""
    return function if "__init__" in function.__qualname__ else checked_call(function)


def install() -> None:
    """Check modules that are imported from now on."""
    install_import_hook(["mjax.parallel", "mjax.models", "mjax.step"], f"{__name__}.checked")
