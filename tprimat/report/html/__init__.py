"""One self-contained HTML page on any number of runs."""
