"""`python -m sweep.explain`."""

import sys

from sweep.explain import main

sys.exit(main())
