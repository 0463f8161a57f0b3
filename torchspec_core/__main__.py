"""`python -m torchspec_core` is the `torchspec` command."""

from torchspec_core.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
