"""Write tests/schemas/kubeflow_trainer.json: what Kubeflow Trainer and Kubernetes accept, for the tests of manifests.

python3 tools/kubeflow_schema.py TRAINER_CHECKOUT. The schemas are those in its manifests/base/crds, without descriptions and
without rules of Kubernetes' own. A ClusterTrainingRuntime holds the whole specification of a batch/v1 Job.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).parent.parent / "tests" / "schemas" / "kubeflow_trainer.json"
LEFT_OUT = {"description", "default", "format"}


def reduced(schema: Any) -> Any:
    """Return a JSON Schema that also refuses unknown fields, as the strict validation of kubectl does."""
    if isinstance(schema, list):
        return [reduced(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: reduced(one) for name, one in value.items()}
        elif key not in LEFT_OUT and not key.startswith("x-kubernetes"):
            found[key] = reduced(value)
    if "properties" in found and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def specification(checkout: Path, plural: str) -> Any:
    """Return the schema of the `spec` of a custom resource."""
    path = checkout / "manifests" / "base" / "crds" / f"trainer.kubeflow.org_{plural}.yaml"
    (version,) = yaml.safe_load(path.read_text(encoding="utf8"))["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]["spec"]


def main() -> None:
    """Write the file."""
    checkout = Path(sys.argv[1])
    commit = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    runtime = specification(checkout, "clustertrainingruntimes")
    job = runtime["properties"]["template"]["properties"]["spec"]["properties"]["replicatedJobs"]["items"]["properties"][
        "template"
    ]
    document = {
        "source": "https://github.com/kubeflow/trainer, manifests/base/crds, reduced by tools/kubeflow_schema.py",
        "commit": commit.stdout.strip(),
        "license": "Apache-2.0, Copyright The Kubeflow Authors",
        "trainjob_spec": reduced(specification(checkout, "trainjobs")),
        "job_spec": reduced(job["properties"]["spec"]),
    }
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
