"""Laws of the folder of a supervised training."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.run.lock import FILE

ROOT = pathlib.Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny"
DEMO = {"role": "router", "prompt": "who directed", "reply": "film"}
HOLDER = """
import pathlib, sys
from jax_ragrl.run.lock import lock_folder
lock_folder(pathlib.Path(sys.argv[1]), "--out")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "command",
    [
        ["warmup"],
        ["sft", f"--config={TINY / 'vanilla_sft.py'}"],
        ["sft", f"--config={TINY / 'sft_c3po.py'}", "--config.data.demos=DEMOS"],
    ],
    ids=["warmup", "sft on passages", "sft on demonstrations"],
)
def test_one_process_at_a_time_trains_in_a_folder(command, tmp_path, capsys):
    demos, out = tmp_path / "demos.jsonl", tmp_path / "out"
    demos.write_text(json.dumps(DEMO) + "\n")
    arguments = [x.replace("DEMOS", str(demos)) for x in command]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        code = main([*arguments, f"--out={out}"])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1, lines
    assert f"{out} is in use by process {holder.pid}" in lines[0]
    assert "another --out" in lines[0]
    # Nothing of the other process was touched.
    assert [x.name for x in out.iterdir()] == [FILE]
