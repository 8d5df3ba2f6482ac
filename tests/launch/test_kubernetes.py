"""The manifests for Kubernetes, validated against the published schemas (tools/kubeflow_schema.py). No cluster runs them here."""

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from tprimat.core.errors import ConfigError, LaunchError
from tprimat.hardware.nodes import find_nodes
from tprimat.launch.kubernetes import create
from tprimat.runner.request import RunRequest
from tprimat.runner.submit import shown, submit_to_kubernetes

PUBLISHED = json.loads((Path(__file__).parent.parent / "schemas" / "kubeflow_trainer.json").read_text())
SCHEMAS = {"TrainJob": "trainjob_spec", "Job": "job_spec"}
IMAGE = "cluster.kubernetes.image=registry/tprimat:1"


def documents(*settings, **fields):
    request = RunRequest(model="llama", platform="nvidia", settings=(IMAGE, *settings), **fields)
    return list(yaml.safe_load_all(shown(request, (), "kubernetes")))


def faults(document):
    return [f"{error.json_path}: {error.message}" for error in validator(document["kind"]).iter_errors(document["spec"])]


def validator(kind):
    return Draft202012Validator(PUBLISHED[SCHEMAS[kind]])


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("kind", ["trainjob", "job"])
def test_manifests_are_what_the_schemas_accept(kind, nodes):
    found = documents(f"cluster.kubernetes.kind={kind}", nodes=nodes, gpus=4)
    work = found[-1]
    assert work["kind"] == {"trainjob": "TrainJob", "job": "Job"}[kind]
    assert faults(work) == []
    assert len(found) == (2 if (kind, nodes) == ("job", 2) else 1)


@pytest.mark.parametrize("kind", ["TrainJob", "Job"])
def test_the_validation_finds_an_unknown_field_and_a_wrong_type(kind):
    (work,) = documents(f"cluster.kubernetes.kind={kind.lower()}")
    work["spec"]["numnodes"] = 2
    assert any("numnodes" in fault for fault in faults(work))
    work["spec"].pop("numnodes")
    work["spec"][{"TrainJob": "trainer", "Job": "completions"}[kind]] = "two"
    assert any("'two' is not of type" in fault for fault in faults(work))


def test_a_trainjob_asks_for_nodes_gpus_and_a_volume():
    (work,) = documents("cluster.kubernetes.volume_claim=shared", nodes=2, gpus=8)
    trainer = work["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["resourcesPerNode"]) == (2, {"limits": {"nvidia.com/gpu": "8"}})
    assert trainer["command"][:4] == ["python3", "-m", "tprimat", "run"]
    assert "--output-dir" in trainer["command"]
    (patch,) = work["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}


def test_the_pods_of_an_indexed_job_understand_what_they_are_told():
    service, work = documents("cluster.kubernetes.kind=job", nodes=2)
    spec, pod = work["spec"], work["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    nodes = find_nodes(2, {**environment, "JOB_COMPLETION_INDEX": "1"})
    assert (nodes.rank, nodes.master_address) == (1, f"{work['metadata']['name']}-0.{service['metadata']['name']}")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": work["metadata"]["name"]}


def test_an_image_must_be_named_and_a_kubectl_must_be_there(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="image is not set"):
        shown(RunRequest(model="llama", platform="nvidia"), (), "kubernetes")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="There is no kubectl here"):
        create("")


def test_what_kubectl_gets_is_the_manifest_and_its_refusal_is_told(monkeypatch, tmp_path, capsys):
    program = tmp_path / "kubectl"
    program.write_text(
        f'#!/bin/sh\nwhile IFS= read -r line; do echo "$line"; done > {tmp_path}/got.yaml\necho trainjob created\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    request = RunRequest(model="llama", platform="nvidia", settings=(IMAGE,))
    import sys

    assert submit_to_kubernetes(request, (), sys.stderr) == 0
    assert faults(yaml.safe_load((tmp_path / "got.yaml").read_text())) == []
    assert "trainjob created" in capsys.readouterr().err
    program.write_text("#!/bin/sh\necho 'no matches for kind TrainJob' >&2\nexit 1\n")
    with pytest.raises(LaunchError, match="kubectl failed: no matches for kind TrainJob"):
        submit_to_kubernetes(request, (), sys.stderr)
