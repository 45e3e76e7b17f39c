"""``python -m tierstore`` is ``tierstore``; with no more words it says what to do next."""

import sys

from tierstore.cli import main
from tierstore.cli.first_steps import print_first_steps

if __name__ == "__main__":
    sys.exit(main() if sys.argv[1:] else print_first_steps())
