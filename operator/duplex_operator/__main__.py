"""python -m duplex_operator"""

import sys

from duplex_operator.main import main

if __name__ == "__main__":
    sys.exit(main())
