"""``python -m workers.agent``."""

import sys

from workers.agent import main

if __name__ == "__main__":
    sys.exit(main())
