"""One guard of the training step: the text that removes it, and the test that fails without it.

``old`` occurs exactly once in the package; the file is not named, so that code may move between files.
"""

from typing import NamedTuple


class Guard(NamedTuple):
    """A guard of the training step.

    Attributes:
        what: Effect of the guard, or the code that it rejects. No two rows have the same.
        old: The text of the guard.
        new: The text that removes or weakens it.
        test: Node id of the test that fails then, from the folder of the tests.
        also: Further pairs of old and new text, if the guard is in several places.
    """

    what: str
    old: str
    new: str
    test: str
    also: tuple[tuple[str, str], ...] = ()

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """All pairs of old and new text."""
        return ((self.old, self.new), *self.also)
