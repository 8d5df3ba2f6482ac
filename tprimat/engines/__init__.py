"""The frameworks that can be started: a plan becomes a command, a log line becomes fields."""
