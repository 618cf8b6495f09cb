"""`python -m shoal.cli` is `shoal`."""

import sys

from shoal.cli.main import main

sys.exit(main())
