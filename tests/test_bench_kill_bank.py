"""The benchmark that kills a loaded bank still runs, and finds nothing lost in two kills."""

import json
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parent / "bench" / "kill_bank.py"


def test_two_kills_lose_nothing(tmp_path):
    command = [sys.executable, str(SCRIPT), "--kills", "2", "--out", str(tmp_path / "result.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["value"], result["pass"], result["details"]["kills"]) == (0, True, 2)
    assert result["details"]["states_acknowledged"] > 0
    assert json.loads((tmp_path / "result.json").read_text()) == result
