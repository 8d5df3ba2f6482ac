"""A clone of Megatron-LM that trains nothing: its pretrain_gpt.py reads its words and prints alike.

The lines are constructed: their wording is that of megatron/training/training.py and arguments.py, their numbers are invented.
"""

SCRIPT = """
import os, sys
sys.path.insert(0, {here!r})
import fake_megatron_lm
fake_megatron_lm.train(sys.argv[1:], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
"""
MILLISECONDS = 400.0


def make_clone(folder, here):
    """A folder for MEGATRON_PATH."""
    (folder / "megatron/core/datasets").mkdir(parents=True)
    (folder / "megatron/core/datasets/Makefile").touch()
    (folder / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 1\n")
    (folder / "pretrain_gpt.py").write_text(SCRIPT.format(here=str(here)))
    return folder


def given(words):
    """Argument -> value, None for a switch."""
    options, name = {}, None
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            options[name] = None
        else:
            options[name] = word
    return options


def train(words, rank, ranks):
    if rank != ranks - 1:
        return
    told = given(words)
    tensor, pipeline = int(told["tensor_model_parallel_size"]), int(told["pipeline_model_parallel_size"])
    arguments = {
        **{name: True if value is None else value for name, value in told.items()},
        "world_size": ranks,
        "data_parallel_size": ranks // (tensor * pipeline),
        "params_dtype": "torch.bfloat16",
        "padded_vocab_size": int(told["vocab_size"]) + 1,
        "transformer_impl": "transformer_engine",
    }
    print(f"using world size: {ranks}, data-parallel size: {ranks // (tensor * pipeline)}, context-parallel size: 1, "
          f"tensor-model-parallel size: {tensor}, pipeline-model-parallel size: {pipeline}")  # fmt: skip
    print("------------------------ arguments ------------------------")
    for name, value in sorted(arguments.items()):
        print(f"  {name} {'.' * (48 - len(name))} {value}")
    print("-------------------- end of arguments ---------------------")
    steps, batch = int(told["train_iters"]), int(told["global_batch_size"])
    for step in range(1, steps + 1):
        # The first line resets nothing, so the second prints the mean of both.
        milliseconds = {1: 10 * MILLISECONDS, 2: 5.5 * MILLISECONDS}.get(step, MILLISECONDS)
        print(
            f" [2026-11-26 10:22:{step:02}.276157] iteration {step:8}/{steps:8} | consumed samples: {step * batch:12} | "
            f"elapsed time per iteration (ms): {milliseconds:.1f} | throughput per GPU (TFLOP/s/GPU): 0.0 | "
            f"learning rate: 1.000000E-05 | global batch size: {batch:5} | lm loss: {12 - 0.1 * step:.6E} | loss scale: 1.0 | "
            "grad norm: 1.361 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
    print("[after training is done] datetime: 2026-11-26 10:22:11")
