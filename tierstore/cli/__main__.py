"""``python -m tierstore.cli`` is ``tierstore``."""

import sys

from tierstore.cli import main

if __name__ == "__main__":
    sys.exit(main())
