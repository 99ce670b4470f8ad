"""`python -m raynforce` is the command `raynforce`."""

import sys

from raynforce.cli import main

if __name__ == "__main__":
    sys.exit(main())
