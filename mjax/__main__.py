"""`python -m mjax` and the console script `mjax`."""

import sys

from mjax.cluster.huge_pages import restart_with_huge_pages


def main() -> None:
    """Set up the process for this machine, then run the command line."""
    restart_with_huge_pages()  # before imports that would be made twice
    try:
        from mjax.cluster.launch import claim_gpu_memory
        from mjax.commands import cli
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "mjax":
            raise
        sys.exit(f"mjax: error: the package {error.name} is not installed; install mjax again, with its requirements")

    claim_gpu_memory()
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
