"""`python -m qat VERB RUN ...`."""

import sys

from qat.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
