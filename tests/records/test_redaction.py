"""What must not leave a machine, and what a log needs to stay readable."""

import json

import pytest

from tprimat.records.redaction import Redactor

SECRETS = {
    "logged in with hf_" + "abcdefghijklmnopqrstuvwxyz012345": "abcdefghij",
    "wandb: api key " + "0123456789abcdef" * 2 + "01234567": "0123456789abcdef",
    "AWS_ACCESS_KEY_ID=" + "AKIA" + "IOSFODNN7EXAMPLE": "IOSFODNN7",
    "export AWS_SECRET_ACCESS_KEY=" + "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY": "K7MDENG",
    "Authorization: Bearer " + "abc.def-ghi_jkl": "abc.def",
    "pulling from https://alice:hunter2@registry.example.com/x": "hunter2",
    "MY_SERVICE_TOKEN='s3cr3t value'": "s3cr3t",
    "DB_PASSWORD=12345": "12345",
    "password: 12345": "12345",
    "SIGNING_KEY=x9y8": "x9y8",
    '{"api_key": "zzz111"}': "zzz111",
    "main.py --wandb-key qqq222 --steps 5": "qqq222",
    "main.py --api-token=qqq333": "qqq333",
    "git clone with ghp_" + "a1b2c3d4e5f6g7h8i9j0k1l2m3n4o5p6q7r8": "a1b2c3",
    "https://bucket.example.com/x?X-Amz-Signature=deadbeef01&b=1": "deadbeef01",
    "id eyJhbGciOiJIUzI1" + "NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abcdef": "eyJzdWIi",
    "DB_PWD=hunter2": "hunter2",
    "SMTP_PASS=hunter2": "hunter2",
    "Server=x;Pwd=hunter2;": "hunter2",
    '{"db_pwd": "hunter2"}': "hunter2",
    "passphrase: correct horse battery": "horse",
    "postgres://alice:p@ss@db/x": "p@ss",
    "redis://:hunter2@cache:6379/0": "hunter2",
    "stripe " + "sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc": "4eC39",
    "vault " + "hvs." + "CAESIJlU02LQZq5gWUWjUmpX": "CAESIJ",
    "google " + "AIza" + "SyDdI0hCZtE6vySjMm-WEfRq3CPzqKqqsHI": "SyDdI0",
    "google " + "ya29." + "a0AfH6SMBx3b2n4kq1jZ8": "a0AfH6",
    "client_secret is 'abc" + "8Q~" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ0123456'": "8Q~aBc",
    "AccountKey=" + "Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4==;x": "Zm9vYmFy",
    "aws_session_token = " + "FwoGZXIvYXdzEBYaDH": "FwoGZX",
    '{"auths": {"ghcr.io": {"auth": "YWxpY2U6aHVudGVyMg=="}}}': "YWxpY2U",
    "machine api.example.com login alice password hunter2": "hunter2",
    "  password hunter2": "hunter2",
    "Cookie: session=abcdef; theme=dark": "abcdef",
    "Set-Cookie: sid=abcdef": "abcdef",
    'export COOKIE="sid=abcdef; theme=dark"': "abcdef",
    "GPG_PASSPHRASE=correct horse battery": "horse",
    '"DOCKER_AUTH_CONFIG": "{\\"auths\\":{\\"ghcr.io\\":{\\"auth\\":\\"YWxpY2U6aHVudGVyMg==\\"}}}"': "YWxpY2U",
    "curl -s -u alice:hunter2 https://x": "hunter2",
    "mail by " + "key-" + "0123456789abcdef" * 2: "0123456789abcdef",
    "bot 123456789:" + "AAE" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345": "aBcDeF",
    "groq " + "gsk_" + "a1b2c3d4e5f6a1b2c3d4e5f6": "a1b2c3",
    "grok " + "xai-" + "a1b2c3d4e5f6a1b2c3d4e5f6": "a1b2c3",
    "replicate " + "r8_" + "a1b2c3d4e5f6a1b2c3d4e5f6": "a1b2c3",
    "npm " + "npm_" + "a1b2c3d4e5f6a1b2c3d4e5f6a1b2c3d4e5f6": "a1b2c3",
}

PRIVATE = {
    "gpu-node-17:1234:1250 [0] NCCL INFO Bootstrap": "gpu-node-17",
    "MASTER_ADDR=trainer01 MASTER_PORT=29500": "trainer01",
    "SLURM_JOB_NODELIST=rack[03-07]": "rack[03",
    "  host      : worker-3.example.com": "worker-3",
    '      "host": "alpha",': "alpha",
    "Node 1 (alpha) was lost: its launcher ended.": "alpha",
    "[c10d] connecting to [box7.lab]:29500": "box7",
    "worker ip-10-0-0-5.ec2.internal is up": "ip-10-0",
    "NET/Socket : Using eth0:10.20.30.40<0>": "10.20.30.40",
    "store at 192.168.4.5:29500": "192.168.4.5",
    "peer at 10.20.30.40 is gone": "10.20.30.40",
    "--addr=10.20.30.40": "10.20.30.40",
    "listening on fe80::1ff:fe23:4567:890a": "4567",
    "connect [2001:db8::8a2e:370:7334]:29500": "8a2e",
    "mail to alice.smith@example.com": "alice",
    "ssh alice@gpu-node": "alice",
    "USER=alice": "alice",
    "user: alice": "alice",
    "text:/scratch/projects/secret-project/book.txt": "secret-project",
    "--data=/mnt/lustre/alice/book.txt": "lustre",
    "file:///data/alice/book.txt": "alice",
    '  File "/data/alice/env/lib/python3.11/site-packages/torch/x.py", line 3': "alice",
    "saving to /home/alice/runs": "alice",
    "saving to /Users/bob/runs": "bob",
    "cache /ro" + "ot/.cache/x": "/ro" + "ot",
}

HARMLESS = (
    "step 10 | tokens: 262144 | loss 2.31 | eos_token: 128009 | num_tokens=4096",
    "nvidia-cublas-cu12 12.4.5.8, driver 570.86.15.1, torch 2.7.0",
    "master_addr localhost, 127.0.0.1:29500",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "special_tokens: ['<pad>', '<eos>']",
    "pad_token: <pad>",
    "https://huggingface.co/meta-llama/Llama-3.1-8B config.json",
    "key value heads: 8, key: attention, num_query_groups: 8",
    "host memory 503 GiB",
    "forward_pass: 12.3 ms, backward_pass: 24.6 ms, 3.2e5 tokens/s/GPU, 1/2/3",
    "nvidia-curand-cu12==10.3.9.90, cuda 12.8.0.1, version: 10.1.2.3, lib-10.1.2.3.so",
    'File "/usr/lib/python3.11/subprocess.py", line 3, in run',
    "std::runtime_error at c10::detail, 12:34:56, 2026-11-22T04:05:01, ::1",
    "/dev/shm, /proc/self/status, /opt/rocm/lib/librccl.so",
    "ghcr.io/x/y@sha256:0123456789abcdef and torch@2.7",
    "optimizer adam, user-defined, login node",
)


@pytest.mark.parametrize(("line", "secret"), {**SECRETS, **PRIVATE}.items())
def test_it_is_taken_out(line, secret):
    redactor = Redactor()
    redactor.learn(line)
    assert secret not in redactor.text(line)


@pytest.mark.parametrize("line", HARMLESS)
def test_it_stays(line):
    redactor = Redactor()
    redactor.learn(line)
    assert redactor.text(line) == line


def test_a_host_named_once_is_redacted_everywhere():
    redactor = Redactor()
    redactor.learn("node-a7:1:1 [0] NCCL INFO\nsaving to /home/alice/x")
    assert redactor.text("rank 3 on node-a7 failed; /scratch/alice/out") == "rank 3 on [host] failed; [path]/out"
    assert redactor.text("node-a70 is another") == "node-a70 is another"


def test_a_private_key_goes_as_a_whole():
    lines = ["before\n", "-----BEGIN RSA PRIVATE KEY-----\n", "c2VjcmV0\n", "-----END RSA PRIVATE KEY-----\n", "after\n"]
    redacted = "".join(Redactor().lines(lines))
    assert "c2VjcmV0" not in redacted
    assert redacted.startswith("before\n")
    assert redacted.endswith("after\n")


def test_a_document_keeps_its_shape_and_numbers():
    document = {
        "command": ["./benchmark.py", "--hf-token", "abc123", "--set", "data=/home/alice/text"],
        "environment": {"WANDB_API_KEY": "abc124", "NCCL_DEBUG": "INFO", "MINE": "abc125"},
        "loss": 2.5,
        "steps": [1, 2, None, True],
        "token": 7,
    }
    redacted = Redactor().document(document)
    assert "abc12" not in json.dumps(redacted)
    assert "alice" not in json.dumps(redacted)
    assert redacted["command"][3:] == ["--set", "data=~/text"]
    assert (redacted["loss"], redacted["steps"], redacted["token"]) == (2.5, [1, 2, None, True], 7)
    assert redacted["environment"] == {"WANDB_API_KEY": "[secret]", "NCCL_DEBUG": "INFO", "MINE": "[value]"}


def test_redacting_twice_changes_nothing_more():
    once = Redactor().text("HF_TOKEN=abc password: 'x y' --api-key=zz Bearer abcdefgh12 MASTER_ADDR=node7 /home/alice/x")
    assert Redactor().text(once) == once
