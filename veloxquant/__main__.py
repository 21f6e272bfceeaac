"""`python -m veloxquant`: the same as the `veloxquant` command."""

import sys

from veloxquant.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
