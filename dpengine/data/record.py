"""A labelled data set: its tensors and its origin."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledData:
    """A classification task with a fixed split.

    Attributes:
        name: Short name, such as ``"adult"``. Results on different names must not share a row of a table.
        title: The name for people.
        train_inputs: ``(N, ...)`` float32. Scaled by public ranges only: no statistic of the rows was read.
        train_labels: ``(N,)`` int64.
        test_inputs: ``(M, ...)`` float32.
        test_labels: ``(M,)`` int64.
        classes: Number of classes.
        source: Where the data were published.
        licence: Under what terms.
        sha256: Digest of every file that was read, uncompressed for Adult.
        feature_names: One name for each input column, empty for images.
        note: Remark for ``describe``, such as that the set replaces another one; may be empty.
    """

    name: str
    title: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    classes: int
    source: str
    licence: str
    sha256: Mapping[str, str]
    feature_names: tuple[str, ...] = ()
    note: str = ""

    def describe(self) -> str:
        """One line for people: title, sizes and licence, and the note if there is one."""
        line = f"{self.title} ({len(self.train_labels):,} train / {len(self.test_labels):,} test, {self.licence})"
        return f"{line}. {self.note}" if self.note else line
