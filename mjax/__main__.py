"""`python -m mjax` and the console script `mjax`."""

import sys

from mjax.cluster.huge_pages import restart_with_huge_pages


def main() -> None:
    """Run the command line, after setting up the process for this machine."""
    restart_with_huge_pages()  # before imports that would be made twice
    try:
        from mjax.cluster.launch import claim_gpu_memory
        from mjax.commands import cli
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "mjax":
            raise
        sys.exit(f"mjax: error: the package {error.name} is not installed; install mjax again, with what it needs")

    claim_gpu_memory()
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
