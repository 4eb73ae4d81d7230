"""One short file per published model. `mjax train --config NAME` runs it; every field is a flag.

With a `model` axis above 1 they have sequence parallelism, which is faster. Papers before 2022 ran without it:
`--mesh.no-sequence-parallel`.
"""
