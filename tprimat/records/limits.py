"""How large what a file holds may be: bytes, levels and numbers. What exceeds them is refused where it is read."""

LARGEST_DOCUMENT = 256 * 2**20
"""Bytes of a JSON document, which is read as a whole: ten times those of a run of a hundred thousand steps."""
LARGEST_LINE = 2**20
"""Bytes of one line of a .jsonl file, which is read line by line."""
LARGEST_UNPACKED = 4 * 2**30
"""Bytes of an archive or of a trace, packed or unpacked."""
MOST_EXPANSION = 200
"""Most bytes of an unpacked archive for each of its own. Records grow five- to twentyfold, zeros a thousandfold."""
ALWAYS_ALLOWED = 16 * 2**20
"""Bytes of an unpacked archive that need no such ratio."""
DEEPEST = 8
"""Levels in a value of free form."""
LARGEST_WHOLE = 2**53
"""The largest whole number up to which floating point is exact."""
LARGEST_REAL = 1e100
"""Sums of squares of such numbers are still finite."""
LARGEST_STEP = 10**9
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-9, 1e9
"""31 years."""
