"""A config.yaml whose model has fewer layers, so that one GPU, or two, hold all of its training state."""

from dataclasses import asdict, replace
from pathlib import Path

import yaml

from tprimat.core.models import model_shape

ROOT = Path(__file__).resolve().parent.parent


def write_shallow_config(file: Path, layers: int | None, model: str = "llama", architecture: str | None = None) -> None:
    """Write the repository's config.yaml with a model's shape spelled out, at another depth or of another row of models.yaml."""
    document = yaml.safe_load((ROOT / "config.yaml").read_text())
    shape = model_shape(architecture or document["models"][model]["architecture"])
    if layers is not None:
        shape = replace(shape, name=f"{shape.name}-{layers}-layers", layers=layers)
    document["models"][model]["architecture"] = {key: value for key, value in asdict(shape).items() if value is not None}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(document, sort_keys=False))
