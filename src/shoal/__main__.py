"""`python -m shoal`, so that `torchrun -m shoal trainer ...` starts the same program on every rank."""

import sys

from shoal.cli.main import main

sys.exit(main())
