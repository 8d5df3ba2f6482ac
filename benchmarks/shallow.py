"""A config.yaml whose Llama has fewer layers, so that one GPU holds all of its training state."""

from dataclasses import asdict, replace
from pathlib import Path

import yaml

from tprimat.facts.models import model_shape

ROOT = Path(__file__).resolve().parent.parent


def write_shallow_config(file: Path, layers: int) -> None:
    """The repository's config.yaml with Llama 3.1 8B's shape spelled out, at another depth."""
    document = yaml.safe_load((ROOT / "config.yaml").read_text())
    shape = asdict(replace(model_shape("llama-3.1-8b"), name=f"llama-3.1-8b-{layers}-layers", layers=layers))
    document["models"]["llama"]["architecture"] = {key: value for key, value in shape.items() if value is not None}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(document, sort_keys=False))
