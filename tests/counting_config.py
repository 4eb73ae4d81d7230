"""The tiny config, in a process that counts its programs and prints at its end how many the disk had."""

import atexit
from collections import Counter

import jax

from tests.tiny_config import config as config

PREFIX = "/jax/compilation_cache/"
counts = Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.removeprefix(PREFIX)]))
atexit.register(
    lambda: print(f"{counts['compile_requests_use_cache']} programs, {counts['cache_hits']} from the disk", flush=True)
)
