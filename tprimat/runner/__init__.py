"""Run plans in order: sessions, single runs, sweeps, the micro-batch search and their progress."""
