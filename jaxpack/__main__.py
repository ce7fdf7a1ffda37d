"""`python -m jaxpack`."""

import sys

from jaxpack.cli import main

if __name__ == "__main__":
    sys.exit(main())
