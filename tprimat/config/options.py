"""What users may type: options that are gone, with what to do instead."""

REMOVED = {
    "accuracy": ("", "python3 benchmarks/accuracy.py writes docs/accuracy.md and scores rows"),
    "compare-all": ("", "./compare_all_configs.sh, or compare --results-dir with several folders"),
    "history": ("", "compare --baseline A --fail-if-slower 3%, or export --to csv"),
    "parity": ("", "compare, which checks the losses of what it ranks"),
    "peak-picture": ("", "peak --picture"),
    "submit": ("", "run --launcher slurm"),
    "suite": ("", "probe all"),
    "--hosts": ("", "srun, torchrun's own flags, or --launcher kubernetes (docs/clusters.md)"),
    "--until-sure": ("", "--fail-if-slower, which says how many runs would decide"),
    "engine_options.load_ahead": (
        "It had no measurable effect (docs/performance.md), and the engine now does without it.",
        "remove the key",
    ),
    "nemo.enable_cuda_graph": (
        "Megatron-Core replaced it, and NeMo, which builds the model's configuration twice, stops with it.",
        "cuda_graph_impl: local, or remove the key",
    ),
}
"""Command, flag, or the last two words of a key that older scripts and configurations may have -> why it is gone, if that is
worth a sentence, and what to do instead."""
