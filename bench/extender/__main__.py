"""`python -m bench.extender`."""

import sys

from bench.extender.filter import main

sys.exit(main())
