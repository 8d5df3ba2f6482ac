"""What torchtitan 0.3.0 offers under this name, as far as a configuration of ours uses it (torchtitan/models/llama3)."""

from types import SimpleNamespace


def llama3_8b():
    return SimpleNamespace(dataloader=SimpleNamespace(dataset="c4"), profiler=SimpleNamespace(), metrics=SimpleNamespace())


def model_registry(flavor, *, converters=None):
    if converters:  # as each converter says (torchtitan/components/quantization/float8.py)
        start = "[titan] 2026-01-01 10:00:00,123 - root - INFO - "
        print(f"{start}Float8 training active with recipe rowwise\n{start}Swapped to Float8Linear layers", flush=True)
    return {"flavor": flavor, "converters": converters}


def default_adamw(lr, **settings):
    return {"lr": lr, **settings}


class Float8LinearConverter:
    class Config(SimpleNamespace):
        pass


class FullAC:
    class Config(SimpleNamespace):
        pass
