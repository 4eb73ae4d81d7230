"""`python -m mjax` and the console script `mjax`."""

import sys


def main() -> None:
    """Run the command line in a process set up for this machine."""
    from mjax import cli, launch

    launch.restart_with_huge_pages()
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
