"""Pure functions from results to tables, plots and pages."""
