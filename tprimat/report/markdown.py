"""Tables in Markdown."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table whose first `left` columns are flush left and the others, which hold numbers, flush right."""
    rule = [":--" if number < left else "--:" for number in range(len(header))]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (header, rule, *rows))
