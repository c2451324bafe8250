"""Runs Python blocks of Markdown pages, each in a separate process.

Run as a script, it reads ``[[name, first line, code], ...]`` from standard input, forks a process for each block after
the packages are loaded, and prints ``[[exit code, output], ...]``. So torch, which takes seconds, is loaded once.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A block of Python.

    Attributes:
        page: The page, relative to the root of the repository.
        line: Number of lines in front of the code.
        code: The code.
    """

    page: str
    line: int
    code: str

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line + 1}"


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a snippet, errors included."""

    code: int
    output: str


def snippets_of(page: str) -> list[Snippet]:
    """Returns all Python blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Snippet(page, text[: match.start(1)].count("\n"), match[1]) for match in BLOCK.finditer(text)]


def run(snippets: list[Snippet], *, warnings: str = "error") -> dict[Snippet, Outcome]:
    """Runs each snippet in its own process and its own empty directory, with this action for warnings."""
    blocks = [[snippet.page, snippet.line, snippet.code] for snippet in snippets]
    command = [sys.executable, "-W", warnings, __file__]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, input=json.dumps(blocks), capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    outcomes = [Outcome(*pair) for pair in json.loads(result.stdout)]
    return dict(zip(snippets, outcomes, strict=True))


def _run_block(page: str, line: int, code: str) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "output", "w+") as output:
        (Path(folder) / "work").mkdir()
        process = os.fork()
        if process == 0:
            status = 1
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(Path(folder) / "work")
                exec(compile("\n" * line + code, page, "exec"), {"__name__": "__main__"})  # errors name the page's line
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(process, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


if __name__ == "__main__":
    # Loaded once for all blocks: what an engine and an optimizer need. A block still has to import what it uses.
    import torch._dynamo  # noqa: F401

    from dpengine import PrivacyEngine  # noqa: F401

    print(json.dumps([_run_block(*block) for block in json.load(sys.stdin)]))
