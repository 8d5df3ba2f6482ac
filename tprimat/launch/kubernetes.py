"""Runs as jobs of Kubernetes: a TrainJob of Kubeflow Trainer v2, or an indexed Job that needs nothing but Kubernetes itself.

Sources: kubeflow/trainer, pkg/apis/trainer/v1alpha1 and pkg/constants (the PET_* variables that it sets), and Kubernetes' page
on indexed Jobs. tests/launch/test_kubernetes.py validates both against the published schemas; neither has run on a cluster.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from tprimat.core.errors import LaunchError
from tprimat.launch.command import answer_of

Kind = Literal["trainjob", "job"]
RESULTS = "/results"
"""Where the volume for results is mounted."""
CONTAINER = "node"
"""Name that Kubeflow's runtimes give the container of a trainer."""
MOUNTS = [{"name": "results", "mountPath": RESULTS}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
"""Where the volumes appear in the container."""
PORT = 29500
RESOURCES: Mapping[str, str] = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
"""Platform -> the resource that its device plugin offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What to start."""

    name: str
    namespace: str
    image: str
    nodes: int
    gpus_per_node: int
    gpu_resource: str | None
    """None: no GPUs are asked for."""
    runtime: str
    """The ClusterTrainingRuntime of a TrainJob."""
    claim: str
    """The PersistentVolumeClaim for results, which all nodes can write."""
    command: tuple[str, ...]


def manifest(work: Workload, kind: Kind) -> str:
    """Return the objects to create, as YAML documents."""
    return yaml.safe_dump_all(trainjob(work) if kind == "trainjob" else indexed_job(work), sort_keys=False, width=1000)


def trainjob(work: Workload) -> list[dict[str, Any]]:
    """Return a TrainJob. Kubeflow tells the nodes about each other by PET_*."""
    pod = {"volumes": volumes(work), "containers": [{"name": CONTAINER, "volumeMounts": MOUNTS}]}
    patch = {"template": {"spec": {"replicatedJobs": [{"name": CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}]}}}
    resources = {} if work.gpu_resource is None else {"resourcesPerNode": limits(work)}
    spec = {
        "runtimeRef": {"name": work.runtime},
        "trainer": {"image": work.image, "numNodes": work.nodes, "command": list(work.command), **resources},
        "runtimePatches": [{"manager": "tprimat.io/launcher", "trainingRuntimeSpec": patch}],
    }
    return [document("trainer.kubeflow.org/v1alpha1", "TrainJob", work, spec)]


def indexed_job(work: Workload) -> list[dict[str, Any]]:
    """Return an indexed Job, and for several nodes the service by which they find the first one."""
    container: dict[str, Any] = {"name": CONTAINER, "image": work.image, "command": list(work.command), "volumeMounts": MOUNTS}
    if work.gpu_resource is not None:
        container["resources"] = limits(work)
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [container], "volumes": volumes(work)}
    template, parallel = {"spec": pod}, {"completions": work.nodes, "parallelism": work.nodes, "completionMode": "Indexed"}
    job = document("batch/v1", "Job", work, {**parallel, "backoffLimit": 0, "template": template})
    if work.nodes == 1:
        return [job]
    # A pod of an indexed Job is called NAME-INDEX; below the service's name its name resolves.
    first = f"{work.name}-0.{work.name}"
    container["env"] = [{"name": "MASTER_ADDR", "value": first}, {"name": "MASTER_PORT", "value": str(PORT)}]
    pod["subdomain"] = work.name
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"batch.kubernetes.io/job-name": work.name}}
    return [document("v1", "Service", work, service), job]


def document(version: str, kind: str, work: Workload, spec: dict[str, Any]) -> dict[str, Any]:
    """Return an object of Kubernetes."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": work.name, "namespace": work.namespace}, "spec": spec}


def limits(work: Workload) -> dict[str, Any]:
    """Return the GPUs of a node as limits, which Kubernetes takes for requests too."""
    return {"limits": {work.gpu_resource: str(work.gpus_per_node)}}


def volumes(work: Workload) -> list[dict[str, Any]]:
    """Return the volume for results, and shared memory: NCCL and data loaders need more than a container's 64 MiB."""
    return [
        {"name": "results", "persistentVolumeClaim": {"claimName": work.claim}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]


def create(text: str) -> str:
    """Create the objects of a manifest, and return what kubectl says.

    Raises:
        LaunchError: there is no kubectl, or it refuses.
    """
    fix = "--dry-run prints the manifest for `kubectl create -f -` elsewhere"
    done = answer_of(("kubectl", "create", "-f", "-"), where="--launcher kubernetes", fix=fix, text=text)
    if done.returncode != 0:
        raise LaunchError(f"kubectl failed: {' '.join(done.stderr.split()) or f'exit status {done.returncode}'}")
    return done.stdout.strip()
