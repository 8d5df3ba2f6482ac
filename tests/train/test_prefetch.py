"""What a rank begins before it is needed: a driver of ours, in C, notes which GPU it is asked to open."""

import os
import shutil
import subprocess
import sys

import pytest
from planning import LIGHTLY, ROOT

DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
static int note(const char *what, int value) {
    FILE *log = fopen(getenv("DRIVER_LOG"), "a");
    fprintf(log, "%s %d\n", what, value);
    fclose(log);
    return atoi(getenv("DRIVER_STATUS"));
}
int cuInit(unsigned int flags) { return note("init", (int)flags); }
int cuDeviceGet(int *device, int number) { *device = 100 + number; return note("get", number); }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = 0; return note("retain", device); }
"""
OPEN = """
from tprimat.train.startup import prefetch_gpu
thread = prefetch_gpu(1)
print(thread is not None)
thread and thread.join()
"""


def open_gpu(folder, status=0):
    log = folder / "log"
    own = {"LD_LIBRARY_PATH": str(folder), "DRIVER_LOG": str(log), "DRIVER_STATUS": str(status)}
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", OPEN], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True", log.read_text(encoding="ascii").splitlines() if log.exists() else []


@pytest.fixture
def driver(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here to make a driver with")
    (tmp_path / "driver.c").write_text(DRIVER, encoding="ascii")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True)
    return tmp_path


def test_the_gpu_of_this_rank_is_opened(driver):
    assert open_gpu(driver) == (True, ["init 0", "get 1", "retain 101"])


def test_a_driver_that_fails_is_left_to_torch_to_report(driver):
    assert open_gpu(driver, status=999) == (True, ["init 0"])


def test_without_a_driver_nothing_is_opened(tmp_path):
    (tmp_path / "libcuda.so.1").write_text("no library", encoding="ascii")
    assert open_gpu(tmp_path) == (False, [])


WITHOUT_TRITON = f"""
import sys
sys.modules["triton"] = None
{LIGHTLY}
from tprimat.megatron.compat import prefetch_compiler_key
prefetch_compiler_key().join()
"""


def test_a_torch_without_triton_is_no_error_that_a_failed_run_could_be_put_down_to():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_TRITON], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
