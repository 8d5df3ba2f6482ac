"""Fine-tuning in the suite: torchtune's command, and its logs on the page."""

from tprimat.cli import finetune


def test_the_command_of_fp8_is_torchtunes_full_recipe_with_its_switch(tmp_path):
    argv = finetune.command_of("full-fp8", tmp_path, tmp_path / "checkpoint", 8).argv
    assert argv[1:9] == (
        "-m",
        "torchtune._cli.tune",
        "run",
        "--nnodes",
        "1",
        "--nproc_per_node",
        "8",
        "full_finetune_distributed",
    )
    assert {"enable_fp8_training=True", "batch_size=14", "tokenizer.max_seq_len=8192", "dataset.packed=True"} <= set(argv)
    assert "enable_fp8_training=True" not in finetune.command_of("full-bf16", tmp_path, tmp_path, 8).argv


def test_what_is_missing_is_said_with_the_command_that_gets_it(tmp_path):
    assert finetune.INSTALL in finetune.why_not(None)


def test_logs_become_records_and_records_a_table(tmp_path):
    logs = finetune.folder_of("lora-bf16", tmp_path) / "logs"
    logs.mkdir(parents=True)
    lines = [
        f"Step {step} | loss:{2 - step / 100} lr:0.0003 tokens_per_second_per_gpu:{16312 + step % 3} peak_memory_alloc:72.65 "
        for step in range(1, 31)
    ]
    (logs / "log_1.txt").write_text("\n".join(lines) + "\n")
    assert finetune.read_logs(tmp_path, 8, "AMD Instinct MI350X") == []
    text = finetune.section(tmp_path, "torchtune is not installed.")
    row = next(line for line in text.splitlines() if "lora-bf16" in line)
    assert "16,31" in row
    assert "130,50" in row
    assert "72.6 GiB" in row or "72.7 GiB" in row
    assert "Not run" not in text


def test_without_records_the_page_says_why(tmp_path):
    assert "Not run: torchtune is not installed." in finetune.section(tmp_path, "torchtune is not installed.")
