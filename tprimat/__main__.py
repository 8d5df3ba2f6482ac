"""python3 -m tprimat COMMAND: the same as the command `tprimat`.

Started by its path, it runs the package beside it, even if the current folder has another one of this name.
"""

import sys
from pathlib import Path

if not __package__:
    HERE = Path(__file__).absolute().parent
    sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place).absolute() != HERE)]

from tprimat.cli.start import script

if __name__ == "__main__":
    sys.exit(script())
