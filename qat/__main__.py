"""`python -m qat VERB RUN ...`."""

import sys

from qat.cli.command import main

sys.exit(main())
