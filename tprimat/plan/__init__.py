"""Plan a run, and check its evidence against the plan."""
