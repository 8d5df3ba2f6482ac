"""What programs say when they fail: each wording has its outcome and cause, whatever other ranks say after it."""

from tprimat.logs.failures import cause_in, meaningful

WATCHDOG = (
    "[rank0]:[E ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)",
    "[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited",
    "[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:1",
)
DEVICE_FULL = (
    "torch.OutOfMemoryError: Allocation on device ",
    "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073 bytes",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "/nvshmem/src/host/mem/mem_heap.cpp:1509: non-zero status: 2 cuMemCreate failed ",
    "[torch_memory_saver.cpp] CUresult error  result=2 file=x.cpp func=cu_mem_create",
    "Cuda failure 2 'out of memory'",
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "hip_driver: HIP_ERROR_OutOfMemory",
    "RuntimeError: Failed to allocate 1073741824 bytes on the GPU",
    'RuntimeError: nrt_tensor_allocate status=4 message="Allocation Failure"',  # vllm-project/vllm#12443
    "RuntimeError: XPU out of memory, please use `empty_cache` to release all unoccupied cached memory.",
)
HOST_FULL = (
    "slurmstepd: error: Detected 2 oom-kill event(s) in step 3756240.batch cgroup.",
    "=>> PBS: job killed: mem 130gb exceeded limit 128gb",
    "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
    "slurmstepd: error: Exceeded job memory limit at some point.",
    "java.lang.OutOfMemoryError: Java heap space",
    "MemoryError",
)
REJECTED = (
    "pretrain_gpt.py: error: argument --fp8-format: invalid choice: 'x' (choose from 'e4m3', 'hybrid')",
    "omegaconf.errors.ConfigKeyError: Key 'foo' not in 'X'",
    "TypeError: GPTModelProvider.__init__() got an unexpected keyword argument 'foo'",
    "AssertionError: Sequence parallelism requires tensor parallel size > 1",
    "AssertionError: fp8 format not supported with transformer_impl local",
    "ValueError: Cannot use sequence parallelism without tensor parallelism",  # NVIDIA/Megatron-LM#5768
    "ValueError: Only one of self.fp16: True and self.bf16 True should be True.",
)
OTHERS = {
    "[rank3]: ValueError: bad vocabulary": "ValueError: bad vocabulary",
    "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED": "CUDNN_STATUS_EXECUTION_FAILED",
    "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30": "A GPU failed",
    "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 7": "The processor or the main memory",
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000": "Two ranks use the same GPU",
    "elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 3 (pid: 14) of binary: python": "killed with SIGKILL",
    "DataLoader worker (pid 4242) is killed by signal: Killed. ": "A process that loads data was killed",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 274432": "more shared memory than this GPU",
    "Ran out of memory in memory space hbm. Used 20.48G of 15.75G hbm.": "The TPU ran out of memory: the program needs",
    "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.": "The loss scale of fp16",
    "RuntimeError: CUDA error: invalid device ordinal": "A rank asks for a GPU that its node does not have",
    "RuntimeError: synStatus=20 [Device already acquired] Device acquire failed.": "A process that still runs holds the device",
    "RuntimeError: HIP error: invalid device function": "was not built for this GPU",  # ROCm/ROCm#5594
    "torch.AcceleratorError: CUDA error: misaligned address": "A kernel failed on a GPU",
    "Memory access fault by GPU node-2 (Agent handle: 0x580db0) on address 0x18000.": "A kernel failed on a GPU",
    "NVRM: Xid (PCI:0000:05:00): 31, pid=7, MMU Fault": "A kernel failed on a GPU",
    "NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus.": "A GPU failed",
    "amdgpu 0000:1c:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!": "A GPU failed",
    "RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)": "A GPU failed",
    "*** An error occurred in MPI_Init_thread": "MPI failed",  # NVIDIA-NeMo/Megatron-Bridge#650
    "free(): corrupted unsorted chunks": "A process crashed",
    "srun: error: Task launch for 36.0 failed on node cn131: Job credential expired": "could not start a task: Job credential",
    "ImportError: /env/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi": "A compiled library does not fit",
    "NCCL WARN Call to posix_fallocate failed : No space left on device": "NCCL ran out of shared memory",  # NVIDIA/nccl#290
    "NET/IBP:Got completion from peer 7.6.13.83<36315> with status=12": "The network between the nodes failed",  # nccl#1664
    "EZ9999: The error from device(0), serial number is 6. HBM MULTI BIT ECC": "A GPU failed",
    "EZ9999: an exception occurred during AICORE execution, stream_id:2": "A kernel failed on a GPU",
    "srun: error: task 0 launch failed: Error configuring interconnect": "could not start a task: Error configuring interconnect",
    "job.exception type=timeout severity=0 resource allocation expired": "The scheduler ended the job at its time limit",
    "Pod was evicted: preempted by pod 7c1e on node gpu-17": "The scheduler or the cloud took the job's nodes away",
    "Message: Pod was terminated in response to imminent node shutdown.": "The scheduler or the cloud took the job's nodes away",
    "Spot interruption notice received: instance i-0abc will be terminated at 10:02": "took the job's nodes away",
    "NCCL WARN NET/OFI Request 0x7f completed with error. RC: 21": "The network between the nodes failed",  # aws-ofi-nccl#161
    "The node was low on resource: memory. Container pytorch was using 503Gi": "The machine ran out of main memory",
    "Rank 11: found NaN in local grad norm in backward pass. Device: 3": "is no longer finite, first on rank 11.",
    "!!!!!!! Segfault encountered !!!!!!!": "A process crashed",  # modelscope/ms-swift#8306
    "mlx5: host_unknown: got completion with error: [repeated 2x across cluster]": "The network between the nodes failed",
    "Loss.cu:240: nll_loss: block: [0,0,0], thread: [17,0,0] Assertion `t >= 0 && t < n_classes` failed.": "device-side assert",
    "permute.cu:412: void permute_launcher(X): Assertion `args.p != nullptr' failed.": "A check in a compiled library failed",
    "Failed to compile the C++ dataset helper functions": "could not be compiled",  # NVIDIA/Megatron-LM#807
    "net_ib.cc:94 NCCL WARN NET/IB : mlx5_ib0:1 Got async event : P_Key table change": "The network between the nodes failed",
    "RuntimeError: HIP error: no HIP-capable device is detected": "The framework finds no GPU",
    "srun: error: Unable to allocate resources: User's group not permitted": "could not start a task: Unable to allocate",
    "Key 'foo_size' is not in struct": "The framework rejects the configuration",
}
WAITS = {
    "NET/OFI WARN: NET/OFI Couldn't find any optimal provider": "NCCL could not use the network",  # aws/aws-ofi-nccl#67
    "misc/ibvwrap.cc:212 NCCL WARN Call to ibv_open_device failed": "NCCL could not use the network",
    "[rank_monitor_server@node03] Did not get subsequent heartbeat. Waited 600.00 seconds.": "A rank made no progress",
    "Task /job:jax_worker/replica:0/task:37 heartbeat timeout. It has failed, got preempted, or": "A process of the job",
    "DistNetworkError: The client socket has failed to connect to any network address of (h, 1).": "The ranks did not find",
    "Rank 3: Watchdog caught collective operation timeout:": "A collective operation timed out",
    "p2p.cc:275 NCCL WARN Cuda failure 101 'invalid device ordinal'": "NCCL (RCCL) failed",  # NVIDIA/nccl#1647
    "[exiting program after receiving SIGTERM.] datetime: 2026-01-01 10:01:00": "stopped it with signal SIGTERM",
    "[exiting program after 230.1 minutes] datetime: 2026-01-01 10:01:00": "ended itself at the time limit",
    "kubelet  Error: ImagePullBackOff": "The container could not start",
    "EI0002: The wait execution of the Notify register times out. Reason: no record": "A collective operation timed out",
    "EI0006: [PID: 7] 2025-04-08 Getting socket times out. Reason: Remote Rank did not send": "A collective operation timed out",
    "ncclRemoteError: x Last error: socketProgress: Connection closed by remote peer node07<41234>": "to a rank on node07, which",
}
"""What ranks say that wait for another: NPUs in HCCL's words, and NCCL's, with the name of the node."""
HARMLESS = (
    "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "If you run out of memory, lower the batch",
    "Your job may be preempted at any time; the node is then given to another",
    "NCCL_DEBUG=INFO",
)


def cause_of(*lines):
    return cause_in(meaningful(lines), ())


def test_each_wording_has_its_cause_before_and_after_what_other_ranks_say():
    said = {
        **dict.fromkeys(DEVICE_FULL, "The GPU ran out of memory"),
        **dict.fromkeys(HOST_FULL, "The machine ran out of main memory"),
        **dict.fromkeys(REJECTED, "The framework rejects the configuration"),
        **OTHERS,
    }
    for line, cause in said.items():
        for lines in ([line], [line, *WATCHDOG], [*WATCHDOG, line]):
            assert cause in cause_of(*lines).cause, line


def test_ranks_that_wait_are_the_cause_only_where_nothing_else_is():
    assert "A collective operation timed out" in cause_of(*WATCHDOG).cause
    assert cause_of(*HARMLESS) is None
    assert cause_of(*WATCHDOG).hint.endswith("; waiting: rank 0")
    assert cause_of(f"[rank0]: {WATCHDOG[0].replace('[Rank 0]', '[Rank 4]')}").hint.endswith("; waiting: rank 4")
    for line, cause in WAITS.items():
        assert cause in cause_of(line).cause
        assert "bad vocabulary" in cause_of(line, "[rank3]: ValueError: bad vocabulary").cause
    for line in (
        "srun: error: node07: tasks 0-7: Exited with exit code 1",
        "failed (exitcode: 1) local_rank: 3 (pid: 14) of binary",
        "[ERROR] [launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return code = 1",
        "Pod: kubeflow.train-worker-0 exited with code 1",
        "Job has reached the specified backoff limit",
    ):
        assert cause_of(line).cause == f"A process ended with an error: {line}"
        assert cause_of(line, "[rank3]: ValueError: x").cause == "ValueError: x"


def test_an_abort_is_the_cause_only_where_nothing_else_is():
    for line in (
        "*** SIGABRT received by PID 9361 (TID 9361) on cpu 40",
        "[node07:14] Signal: Aborted (6)",
        "Fatal Python error: Aborted",
    ):
        assert cause_of(line).cause == f"A process aborted itself: {line}"
        assert "A collective operation timed out" in cause_of(*WATCHDOG, line).cause
    exits = ("KeyError: 'total_iters'", "SystemExit")  # intelligent-machine-learning/dlrover#977
    assert cause_of(*exits).cause == "KeyError: 'total_iters'"


def test_the_reason_of_nccl_is_the_line_after_last_error():
    lines = ["[rank2]: torch.distributed.DistBackendError: NCCL error in: x.cpp:77, unhandled cuda error", "[rank2]: Last error:"]
    assert "fabric of a node is not ready" in cause_of(*lines, "[rank2]: Cuda failure 802 'system not yet initialized'").cause
    assert cause_of(*lines, "[rank2]: Error: socket 7").cause == "NCCL (RCCL) failed: Error: socket 7"


def test_torchruns_block_without_a_reason_names_its_first_rank():
    block = "Root Cause (first observed failure):|[0]:|  host : c561|  rank : 0 (local_rank: 0)|  exitcode  : 1 (pid: 7)"
    failure = cause_of("  exitcode  : 1 (pid: 9)", *block.split("|"))
    assert (failure.cause, failure.outcome) == ("A process ended with an error: exitcode : 1 (pid: 7)", "failed")
    assert failure.hint.endswith("; rank 0 (local_rank: 0) on c561 failed first")


def test_what_a_scheduler_kills_after_a_lost_node_or_at_its_limit_is_no_cause():
    killed = "srun: error: node07: tasks 8-15: Killed"
    for reason, cause in (("NODE FAILURE, SEE LOG", "The scheduler lost a node"), ("TIME LIMIT", "at its time limit")):
        assert cause in cause_of(killed, f"slurmstepd: error: *** STEP 7 ON n3 CANCELLED AT 2026 DUE TO {reason}").cause
    ended = "slurmstepd: error: *** STEP 7.0 ON node03 CANCELLED AT 2026-03-03T03 ***"  # by srun, since a task of it failed
    assert cause_of("[rank3]: ValueError: x", ended, killed).cause == "ValueError: x"
    assert "task ended" in cause_of(killed, "slurmstepd: error: *** STEP 7.0 ON node03 CANCELLED AT 2026-03-03T03 ***").cause


def test_a_terse_exception_has_its_condition_or_its_place():
    frame = '[rank0]:   File "/opt/megatron/checkpointing.py", line 1818, in load_checkpoint'
    assert cause_of(frame, "[rank0]: KeyError: 'state'").cause == "KeyError: 'state' (checkpointing.py, line 1818)"
    asserted = ("(head, rank=0, pid=4773)     assert self.lengths.shape[0] == 7", "(head, rank=0, pid=4773) AssertionError")
    assert cause_of(*asserted).cause == "AssertionError: assert self.lengths.shape[0] == 7"


def test_an_exception_of_any_name_ends_a_traceback():
    traceback = ("Traceback (most recent call last):", '  File "x.py", line 1')
    for line in ("torch._dynamo.exc.Unsupported: call_method", "grpc._channel._InactiveRpcError: <x>", "SystemExit: 2"):
        assert cause_of(*traceback, line).cause == line
    assert cause_of("torch.distributed.DeviceMesh: 2 x 4") is None


def test_a_signal_is_the_cause_however_a_launcher_writes_it_and_not_the_one_that_ends_the_others():
    for line in (
        "[2023-06-08 12:05:00,002] [ERROR] [launch.py:325:sigkill_handler] ['python', 'x.py'] exits with return code = -9",
        "torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: -9) local_rank: 5 (pid: 1) of binary: python",
        "  exitcode   : -9 (pid: 4711)",
        "train.sh: line 33: 238568 Killed                  python pretrain_gpt.py",
    ):
        assert cause_of("  exitcode   : -15 (pid: 4710)", line).cause == "A process was killed with SIGKILL."
