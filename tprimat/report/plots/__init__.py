"""The pictures, one file each."""

import logging
import warnings

# A home that cannot be written costs matplotlib its cache, and the user nothing; a name in another script shows as boxes.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "Glyph .* missing from font")
