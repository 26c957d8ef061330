"""`python -m sweep.plots`."""

import sys

from sweep.plots import main

if __name__ == "__main__":
    sys.exit(main())
