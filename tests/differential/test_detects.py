"""The comparison reports a difference for each of these deliberate mistakes: replacements of text in today's code.

The text is looked for in all files of the package and must be there exactly once, so that files may move. An issue that
changes the text of such a line changes it here too.
"""

import re

import pytest
from differential.sides import CURRENT, NoBaseline, both_sides, copy_package, differences
from differential.test_differential import SHORT, cases

CASES = cases({**SHORT, "model": 4, "alone": 8, "sequence": 60, "spread": 3})
MISTAKES = {  # name: the text that is replaced, in which « » holds the part that becomes what follows
    "finish_step gets the divisor": (
        "plan.clipping.finish_step(self.source, step, «plan.expected_batch_size», self.passes.",
        "2 * plan.expected_batch_size",
    ),
    "finish_step gets the next step": ("plan.clipping.finish_step(self.source, step«», plan.", " + 1"),
    "leaks of unfrozen parameters are not seen": ("    «self.watch_leaks()»\n        self.rows = rows\n", "pass"),
    "sums stay when the charge fails": (
        "            self._charge_discarded(effect.discarded)\n        «finally»:\n            if effect",
        "except ZeroDivisionError: pass\n        else",
    ),
    "no finite check after samples were dropped": ("if «dropped and not buffer.is_finite()»:", "False"),
    "a second norm in ghost mode is taken": ("            if «use.parameter in self._met»:", "False"),
    "the noise address is one too high": ("self.plan.noise_std, self.batches.batches[-1].step«», 1 / divisor", " + 1"),
    "the divisor is one too large": ("self.batches.batches[-1].step, 1 / «divisor», topology", "(divisor + 1)"),
    "a discarded batch is not charged": ('«self.ledger.charge(self.plan.event(), count=count, kind="void")»', "pass"),
    "factors are not clamped": ("factors_BK.sub_(_least(factors_BK.dtype)).clamp_(0«, 1»)", ""),
    "another error code": ('code = "«DPE018»"', "DPE017"),
    "units are ignored": ("loss_scale=loss_scale, «units=units, »fingerprint=fingerprint", ""),
    "a resumed run keeps its incarnation": ("« if is_seeded(state) else secrets.randbits(_NONCE_BITS)»", ""),
    "zero_grad keeps a clipped batch": (
        "        elif self.stage is Stage.CLIPPED:\n            «return self.discard()»", "pass"
    ),
    "merged batches are charged as one": ("                self.ledger.charge(event, count=«count»)\n", "1"),
    "a batch over budget is released": ("        «self._check_before_charge(len(self.batches.batches))»\n", "pass"),
    "all ranks draw the noise of the first": (
        "first, end = (total * rank // replicas.size for rank in («replicas.rank, replicas.rank + 1»))", "0, 1"
    ),
}  # fmt: skip


def make_mistake(root, marked, replacement):
    """Replaces a part of a text that the package has exactly once."""
    before, part, after = re.split("[«»]", marked)
    text = before + part + after
    files = {path: path.read_text() for path in (root / "dpengine").rglob("*.py")}
    found = [path for path, content in files.items() for _ in range(content.count(text))]
    assert len(found) == 1, f"{text!r} is in {len(found)} places; it must be in one: change it in {__file__}"
    found[0].write_text(files[found[0]].replace(text, before + replacement + after))


def test_each_mistake_is_in_one_place():
    contents = [path.read_text() for path in (CURRENT / "dpengine").rglob("*.py")]
    texts = {name: re.sub("[«»]", "", marked) for name, (marked, _) in MISTAKES.items()}
    assert {name for name, text in texts.items() if sum(content.count(text) for content in contents) != 1} == set()


@pytest.mark.nightly
def test_each_mistake_is_detected(tmp_path):
    try:
        with both_sides() as (_, current):
            roots = [current]
            for number, mistake in enumerate(MISTAKES.values()):
                roots.append(tmp_path / str(number))
                copy_package(current, roots[-1], list((current / "dpengine" / "kernels").glob("native*.so")))
                make_mistake(roots[-1], *mistake)
            detected = differences(roots, CASES)
    except NoBaseline as reason:
        pytest.skip(str(reason))
    found = {name: len(texts) for name, texts in zip(MISTAKES, detected, strict=True)}
    print(*(f"{number:4} of {len(CASES)} cases: {name}" for name, number in found.items()), sep="\n")
    assert all(found.values()), f"Not detected: {[name for name, number in found.items() if not number]}"
