"""What may leave a machine: named fields, and sentences and commands without secrets, folders, addresses and hosts."""

import dataclasses
import json
import socket
import time
import typing

from changes import replace
from runs.make_runs import a_run

from tools.schemas import BenchmarkDocument
from tprimat.records import sharing
from tprimat.records.schema import NodeRecord, ProbeRecord, RunRecord, TelemetrySample
from tprimat.records.sharing import LEFT_OUT, masked_command, shareable, shareable_text
from tprimat.records.store import as_document, checked

SECRETS = {
    "logged in with hf_" + "abcdefghijklmnopqrstuvwxyz012345": "abcdefghij",
    "AWS_ACCESS_KEY_ID=" + "AKIA" + "IOSFODNN7EXAMPLE": "IOSFODNN7",
    'Authorization: Digest username="al", response="Zq7xK9"': "Zq7xK9",
    "authorization: token hunter2": "hunter2",
    "sshpass -p hunter2 ssh node1": "hunter2",
    "docker login -u me -p hunter2 registry": "hunter2",
    "https://hooks.slack.com/services/T01/B02/hunter2": "hunter2",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nhunter2": "hunter2",
    "key '-----BEGIN EC PRIVATE KEY-----\\nhunter2\\n-----END EC PRIVATE KEY-----'": "hunter2",
    "users: - user: client-key-data: hunter2": "hunter2",
    "the password is hunter2": "hunter2",
    "accepted Zq7xK9vLm2Rt5wYb of alice@example.com": "Zq7xK9",
    "mail to alice@example.com": "alice",
    "login of user swordfish on project Globex": "swordfish",
    "No module named 'apollo_internal'": "apollo",
    "started by dragon99 with ab12cd34ef56": "dragon99",
    "started with ab12cd34ef56": "ab12cd34ef56",
    "peer at fe80:1:2:3:4:5 is gone": "fe80",
    "curl -H 'Bearer abc.def-ghi_jkl'": "abc.def",
    "https://alice:hunter2@registry.example.com/x": "hunter2",
    "postgres://alice:p@ss@db/x": "p@ss",
    "https://bucket.example.com/x?X-Amz-Signature=deadbeef01&b=1": "deadbeef01",
    "MY_SERVICE_TOKEN='s3cr3t value'": "value",
    '{"api_key": "zzz111"}': "zzz111",
    "SIGNING_KEY=x9y8": "x9y8",
    "main.py --wandb-key qqq222 --steps 5": "qqq222",
    "saving to /home/alice/runs": "alice",
    "text:/scratch/projects/apollo/book.txt": "apollo",
    "peer at 10.20.30.40 is gone": "10.20.30.40",
    f"rank 3 on {socket.gethostname()} ended": socket.gethostname(),
}
HARMLESS = (
    "step 10 | tokens: 262144 | loss 2.31 | num_tokens=4096, key value heads: 8, KeyError: 'x', forward_pass: 12.3 ms",
    "driver 570.86.15, torch 2.7.0+cu128, localhost, 127.0.0.1:29500",
    "/dev/shm, /proc/self/status, /opt/rocm/lib/librccl.so, 1/2/3, https://huggingface.co/meta-llama/Llama-3.1-8B",
    "--num-tokens 5 --tokenizer abc --key-value 3",
)


def test_a_sentence_loses_what_is_private_and_keeps_the_rest():
    for text, private in SECRETS.items():
        once = shareable_text(text)
        assert private not in once, text
        assert shareable_text(once) == once
    assert [shareable_text(text) for text in HARMLESS] == list(HARMLESS)


def test_long_text_takes_no_time():
    began = time.monotonic()
    for text in ("a" * 100_000, "token_" * 16_000, "1" * 100_000, "a." * 50_000, "authorization" * 8000, "key " * 25_000):
        shareable_text(text)
    assert time.monotonic() - began < 20  # half a second, on an idle machine


def test_a_command_shows_neither_secrets_nor_variables_that_no_library_reads():
    words = (
        "./benchmark.py",
        "--hf-token",
        "abc123",
        "--set",
        "x.environment.MINE=abc124",
        "--set",
        "x.environment.NCCL_ALGO=Ring",
    )
    masked = masked_command(words)
    assert "abc12" not in " ".join(masked)
    assert masked[:4] == ("./benchmark.py", "--hf-token", "[secret]", "--set")
    assert masked[-1] == "x.environment.NCCL_ALGO=Ring"


def test_a_record_is_shared_without_what_its_fields_do_not_name():
    own = "parallelism.zz9_wide.llama.nvidia.tensor_model_parallel_size=2"
    run = a_run("told", strategy="zz9_wide", command=("./benchmark.py", "--data", "text:/scratch/apollo/alice.txt", "--set", own))
    nodes = tuple(NodeRecord(host=name, accelerator=None, gpus=None) for name in ("box-a", "box-b"))
    options = {"fused": True, "tokenizer": "/scratch/alice/x", "nested": {"api_key": "abc123", "mode": "fast"}}
    private = {"MY_PATH": "alice", "NCCL_TOPO_FILE": "/alice/x.xml", "NCCL_ALGO": "Ring"}
    cause = "box-b: no route to 10.1.2.3, see /scratch/alice/log"
    run = replace(run, nodes=nodes, engine_options=options, environment=private, cause=cause)
    shared = checked(RunRecord, shareable(as_document(run)), None)
    text = json.dumps(as_document(shared))
    assert [part for part in ("alice/", "apollo", "abc123", "box-a", "10.1.2.3", "MY_PATH") if part in text] == []
    assert shared.cause == "node-1: no route to [address], see [path]/log"
    assert [node.host for node in shared.nodes] == ["node-0", "node-1"]
    assert shared.command[-1] == own
    assert shared.engine_options["nested"]["mode"] == "fast"
    assert shared.environment["NCCL_ALGO"] == "Ring"
    assert shareable(as_document(shared)) == as_document(shared)
    assert shareable({"run_id": "x", "of_another_program": "text"}) == {"run_id": "x", "of_another_program": LEFT_OUT}


def text_fields(kind, name=""):
    """The names under which a type holds text."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return {one for field in dataclasses.fields(kind) for one in text_fields(hints[field.name], field.name)}
    if origin is typing.Literal:
        return {name} if any(isinstance(one, str) for one in typing.get_args(kind)) else set()
    if origin is not None:
        return {one for part in typing.get_args(kind)[origin is dict :] for one in text_fields(part, name)}
    return {name} if kind is str else set()


def test_every_text_of_a_record_has_a_rule():
    names = {one for kind in (RunRecord, ProbeRecord, TelemetrySample, BenchmarkDocument) for one in text_fields(kind)}
    known = sharing.NAMES | sharing.SENTENCES | sharing.VARIABLES | {"host", "path", "command"}
    assert names - known == set()
