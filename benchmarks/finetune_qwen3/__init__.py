"""Train Qwen3 8B on the embedded engine and fine-tune it through torchtune, and compare both by TPrimat's records."""
