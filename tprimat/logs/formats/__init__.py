"""One file a log format: the lines that it prints, as fields."""
