"""`python -m tkcc`: the `tkcc` command where no script is installed."""

import sys

from tkcc.cli.main import main

sys.exit(main())
