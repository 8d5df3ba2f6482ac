"""python3 -m tprimat COMMAND: the same as the command `tprimat`."""

import sys

from tprimat.cli.start import script

if __name__ == "__main__":
    sys.exit(script())
