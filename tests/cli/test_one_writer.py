"""One process at a time writes the results of a command."""

import json
import pathlib
import subprocess
import sys

import pytest

from jax_ragrl.cli.main import main

ROOT = pathlib.Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny"
DEMO = {"role": "router", "prompt": "who directed", "reply": "film"}
HOLDER = """
import pathlib, sys
from jax_ragrl.run import lock
getattr(lock, sys.argv[1])(pathlib.Path(sys.argv[2]), "--out")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("command", "lock"),
    [
        (["warmup", "tiny"], "lock_folder"),
        (["warmup", "sft", f"--config={TINY / 'vanilla_sft.py'}"], "lock_folder"),
        (
            ["warmup", "sft", f"--config={TINY / 'sft_c3po.py'}", "--config.data.demos=DEMOS"],
            "lock_folder",
        ),
        (["data", "index", "--corpus=DEMOS", "--kind=bm25"], "lock_folder"),
        (["warmup", "demos", f"--config={TINY / 'mmoa_rag.py'}", "--writer=labels"], "lock_output"),
        (["warmup", "pool", f"--config={TINY / 'opera.py'}"], "lock_output"),
        (["evaluate", "--systems=direct", "--data=DEMOS@DEMOS"], "lock_folder"),
        (["bench", "retrieval", "--retrievers=bm25", "--data=DEMOS@DEMOS"], "lock_folder"),
    ],
    ids=lambda x: " ".join(x[:2]) if isinstance(x, list) else "",
)
def test_one_process_at_a_time_writes_results(command, lock, tmp_path, capsys):
    demos, out = tmp_path / "demos.jsonl", tmp_path / "results" / "out"
    demos.write_text(json.dumps(DEMO) + "\n")
    arguments = [x.replace("DEMOS", str(demos)) for x in command]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock, str(out)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        before = sorted(out.parent.rglob("*"))
        place = "--out" if command[0] in ("data", "warmup") else "--workdir"
        code = main([*arguments, f"{place}={out}"])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1, lines
    assert f"{out} is in use by process {holder.pid}" in lines[0]
    assert f"another {place}" in lines[0]
    # Nothing of the other process was touched.
    assert sorted(out.parent.rglob("*")) == before
