"""llama.cpp's own server in a process that tests may kill.

As `engine.sync`, `python FILE PORT PID_FILE FOLDER STEP` restarts one with `FOLDER/model.gguf`.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from jax_ragrl.models.by_name import SMOLLM2, SMOLLM2_PACKAGE, local_model

MISSING = [n for n in ("xllamacpp", SMOLLM2_PACKAGE) if importlib.util.find_spec(n) is None]
# Threads of llama.cpp wait for each other busily, which is slow on a core that others use.
SERVER = """
import sys, threading, xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.model_alias = sys.argv[1], {sys.argv[2]}
params.hostnames, params.port = ["127.0.0.1"], int(sys.argv[3])
params.n_parallel, params.n_ctx = 1, 2048
# Its defaults round keys and values to float16, which decides between nearly equal tokens.
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
threading.Event().wait()
"""


@contextlib.contextmanager
def llama_cpp(file: Path | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address to give as `base_url`, and the process of the server; None: SmolLM2."""
    command = [sys.executable, "-c", SERVER, str(file or local_model(SMOLLM2)), SMOLLM2, "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            yield f"{process.stdout.readline().strip()}/v1", process
        finally:
            process.kill()


def restart(port: str, pid_file: str, folder: str) -> None:
    """Replaces the server on a port, and returns when the new one answers."""

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
        except OSError:
            return False

    with contextlib.suppress(FileNotFoundError):
        stop(Path(pid_file))
        while answers():
            time.sleep(0.05)
    command = [sys.executable, "-c", SERVER, f"{folder}/model.gguf", "policy", port]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, start_new_session=True, **quiet)
    Path(pid_file).write_text(str(process.pid))
    while not answers():
        assert process.poll() is None, "the server ended"
        time.sleep(0.05)


def stop(pid_file: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


if __name__ == "__main__":
    restart(*sys.argv[1:4])
