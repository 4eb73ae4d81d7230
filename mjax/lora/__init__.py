"""LoRA (arXiv 2106.09685): frozen weights, and adapters beside them that are trained."""
