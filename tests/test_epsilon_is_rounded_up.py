"""An epsilon is rounded up at the last digit shown, wherever one is printed or taught to be printed."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "tutorials/*.py", "dpengine/**/*.py", "dpengine/**/*.jinja")
    for path in ROOT.glob(pattern)
)
# A format of some digits rounds to nearest. A target is no epsilon that was spent, but is shown beside one.
NEAREST = re.compile(r"\{[^{}\n]*(?:epsilon|reached|target|spent|\beps\b)[^{}\n]*:[^{}\n]*\.\d+[fge]\}")


def test_there_is_something_to_look_at():
    assert {"README.md", "tutorials", "dpengine"} <= {path.parts[0] for path in TEXTS}
    assert NEAREST.search('f"ε = {engine.get_epsilon(delta=1e-5):.2f} at δ"')
    assert NEAREST.search('f"would reach epsilon {reached:.4g}"')


def test_no_epsilon_is_rounded_to_nearest():
    found = {str(path): NEAREST.findall((ROOT / path).read_text(encoding="utf-8")) for path in TEXTS}
    assert {path: texts for path, texts in found.items() if texts} == {}
