"""The README's Python example is a program that works, as printed, on two ranks."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_example_runs(tmp_path):
    example, = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    script = tmp_path / "train.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, "-m", "zero_c.launch", "-n", "2", str(script)], cwd=tmp_path, text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loss, = re.findall(r"^([0-9.e+-]+) {'parameters'", done.stdout)
    assert float(loss) < 16, "an untrained model's loss is about 64, the variance of the target"
