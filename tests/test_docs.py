"""README.md and docs/ say what is so: their programs run, their commands are legal, what they print and quote is printed.

A fence's language says what becomes of a block:

    python      a program, as printed: runs on two ranks, or as a comment before it says (`<!-- run: ranks=1 -->`);
                `<!-- run: with=stage3 -->` puts a beginning of BEGINNINGS before it
    py          a program for another package, or a part of one: compiled
    sh          bash reads it; commands of this package are parsed, and `python -m zero_c.plan` runs.
                After `<!-- run: output -->` the next block is what it prints
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import zero_c
import zero_c.launch
import zero_c.plan
from ranks import python_path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?:<!-- run: ([^>]*) -->\n)?^```(\w*)\n(.*?)^```$", re.S | re.M)
BEGINNINGS = {"stage3": """\
import torch
import zero_c
from zero_c.torch import ShardedOptimizer

comm = zero_c.init()
model = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 2)})
opt = ShardedOptimizer(model, stage=3, lr=3e-4)
"""}


def blocks(*languages):
    return list(_blocks(languages))


def _blocks(languages):
    for path in DOCUMENTS:
        text = path.read_text()
        found = list(FENCE.finditer(text))
        for match, after in zip(found, [*found[1:], None], strict=False):
            how = dict((part.split("=") + [""])[:2] for part in (match[1] or "").split())
            line = text.count("\n", 0, match.start(2)) + 1
            if match[2] in languages:
                yield pytest.param(match[3], how, after and after[3], id=f"{path.name}:{line}")


def run(command, folder, **how):
    return subprocess.run([sys.executable, *command], cwd=folder, text=True, capture_output=True, timeout=180, **how)


@pytest.mark.parametrize("program, how, after", blocks("python"))
def test_programs_run(program, how, after, tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(BEGINNINGS[how["with"]] + program if "with" in how else program)
    done = run(["-m", "zero_c.launch", "-n", how.get("ranks", "2"), str(script)], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_first_program_learns(tmp_path):
    program = next(match[3] for match in FENCE.finditer((ROOT / "README.md").read_text()) if match[2] == "python")
    script = tmp_path / "train.py"
    script.write_text(program)
    done = run(["-m", "zero_c.launch", "-n", "2", str(script)], tmp_path)
    loss, = re.findall(r"^([0-9.e+-]+) {'parameters'", done.stdout)
    assert float(loss) < 16, "an untrained model's loss is about 64, the variance of the target"


@pytest.mark.parametrize("program, how, after", blocks("py"))
def test_fragments_compile(program, how, after):
    compile(program, "fragment", "exec")


@pytest.mark.parametrize("commands, how, after", blocks("sh"))
def test_commands(commands, how, after, tmp_path):
    readable = re.sub(r"<[a-z ]+>", "X", commands)  # what the reader fills in
    subprocess.run(["bash", "-n"], input=readable, text=True, check=True)
    for line in readable.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:2] != ["python", "-m"]:
            continue
        module, arguments = words[2], words[3:]
        if module == "zero_c.plan":
            zero_c.plan.parser().parse_args(arguments)
            if "--model" not in arguments:  # the reader's own
                done = run(["-m", module, *arguments], tmp_path)
                assert done.returncode == 0, done.stderr
                assert "output" not in how or done.stdout == after
        elif module == "zero_c.convert":
            pytest.importorskip("torch")
            from zero_c.convert import __main__

            __main__.parser().parse_args(arguments)
        else:
            assert module == "zero_c.launch", line
            assert run(["-m", module, *arguments[:-1], "/nowhere/train.py"], tmp_path).returncode != 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_links_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        linked = path.parent / target if target else path
        assert linked.exists(), f"{path.name} links {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, anchor


def test_every_class_of_errors_is_explained():
    rows = dict(re.findall(r"^\| `zero_c\.(\w+)` \| `([\w.]+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.M))
    classes = {name: kind for name, kind in vars(zero_c).items()
               if name in zero_c.__all__ and isinstance(kind, type) and issubclass(kind, Exception)}
    assert rows.keys() == classes.keys()
    for name, base in rows.items():
        assert classes[name].__base__.__name__ == base.removeprefix("zero_c.")


def test_messages_are_still_those_of_the_sources():
    table = (ROOT / "docs" / "errors.md").read_text().split("## Common messages")[1]
    messages = re.findall(r'^\| "(.*?)" \|', table, re.M)
    assert len(messages) > 10
    sources = "".join(path.read_text() for path in [*(ROOT / "zero_c").rglob("*.py"), *(ROOT / "csrc").glob("*.[ch]")])
    whole = re.sub(r'"\s*\n\s*f?"', "", sources)  # literals that go on in the next line
    assert [message for message in messages if message not in whole] == []
