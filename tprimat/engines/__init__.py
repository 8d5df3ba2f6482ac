"""One file a framework: a plan becomes a command, a line of its log becomes fields."""
