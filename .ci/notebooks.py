"""Runs the notebooks as a reader would: `python .ci/notebooks.py [FILE ...]`.

Two run at a time, each in a scratch folder, and no notebook file is changed. Cells tagged `install`
are skipped, because the package is installed already. If a cell fails, the cell and its traceback
are printed, and the exit code is 1.
"""

import os
import pathlib
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor

import nbclient
import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

REPO = pathlib.Path(__file__).resolve().parent.parent
CELL_TIMEOUT = 600


def run_notebook(path: pathlib.Path) -> None:
    """Executes one notebook with the kernel of this interpreter; raises the error of a cell."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [c for c in notebook.cells if "install" not in c.metadata.get("tags", [])]
    with tempfile.TemporaryDirectory() as scratch:
        nbclient.NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT,
            kernel_name="python3",
            resources={"metadata": {"path": scratch}},
        ).execute()


def passes(path: pathlib.Path) -> bool:
    start = time.monotonic()
    try:
        run_notebook(path)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        print(f"FAILED {path}\n{error}", flush=True)
        return False
    print(f"ok {path} ({time.monotonic() - start:.0f} s)", flush=True)
    return True


def main(arguments: list[str]) -> int:
    paths = [pathlib.Path(a) for a in arguments] or sorted((REPO / "notebooks").glob("*.ipynb"))
    # Cells call `ragrl`, as in an activated environment.
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if not paths:
        print(f"FAILED: there is no notebook in {REPO / 'notebooks'}")
        return 1
    with ProcessPoolExecutor(2) as pool:
        return 0 if all([*pool.map(passes, paths)]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
