"""`python -m mjax` and the console script `mjax`."""

import sys


def main() -> None:
    """Run the command line, after setting up the process for this machine."""
    try:
        from mjax.cluster import launch, xla_flags
        from mjax.commands import cli
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "mjax":
            raise
        sys.exit(f"mjax: error: the package {error.name} is not installed; install mjax again, with what it needs")

    launch.restart_with_huge_pages()
    launch.claim_gpu_memory()
    xla_flags.be_fast()
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
