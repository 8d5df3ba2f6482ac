"""Memory and time of a training run, predicted before it: pure functions of a workload and, where there are some, of probes."""
