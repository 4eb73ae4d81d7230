"""Train a model: python train.py --config gpt_8b [--mesh.data 64 …]. See README.md; `--help` lists every flag."""

import sys

from mjax.cluster.huge_pages import restart_with_huge_pages

if __name__ == "__main__":
    restart_with_huge_pages()  # before imports that would be made twice

    from mjax.cluster.launch import claim_gpu_memory
    from mjax.commands import cli

    claim_gpu_memory()
    sys.exit(cli.main(["train", *sys.argv[1:]]))
