"""Reports: what the taps of one use of a layer, or of a parameter, tell the receiver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .record import LayerCall, Use, turned
from .tap import CopyTap, Tap, put_tensors, take_tensors
from .watch import Kind, Watch

if TYPE_CHECKING:
    from .capture import Capture


class CallReport:
    """Pairs what went into one use of a layer with the gradient of what came out."""

    def __init__(
        self,
        capture: Capture,
        watch: Watch,
        uses: Mapping[str, Use],
        rule: Any = None,
        *,
        batch_first: bool = False,
    ):
        self.capture = capture
        self.watch = watch
        self.uses = uses
        self.rule = watch.rule if rule is None else rule
        self.name = watch.name
        self.needs_output = getattr(self.rule, "needs_output", False)
        self.batch_first = batch_first or capture.batch_first

    def tap(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The output with a tap behind it."""
        anchor = self.capture.anchor
        saved, self.other_inputs, self.input_spec = take_tensors((args, kwargs))
        saved = [t.detach() for t in saved]
        in_place = self.watch.in_place or self.watch.kind is Kind.OPERATIONS
        if in_place and isinstance(output, Tensor):
            self.output_spec = None
            return Tap.apply(output, anchor, self, *saved)
        outputs, self.other_outputs, self.output_spec = take_tensors(output)
        self.output_count = len(outputs)
        return put_tensors(
            CopyTap.apply(anchor, self, len(outputs), *outputs, *saved), self.other_outputs, self.output_spec
        )

    def fire(self, saved: tuple[Tensor, ...], grad: Any) -> None:
        output = None
        if self.output_spec is None:
            front = grad if self.batch_first else turned(grad)
        else:
            if self.needs_output:
                saved, outputs = saved[: -self.output_count], saved[-self.output_count :]
                output = self._outputs(outputs)
            front = self._outputs(grad)
        inputs = saved if self.batch_first else map(turned, saved)
        args, kwargs = put_tensors(inputs, self.other_inputs, self.input_spec)
        order, mean_loss = self.batch_first, self.capture.mean_loss
        call = LayerCall(self.watch.module, args, front, kwargs, output, self.name, order, mean_loss)
        self.capture.report(call, self.uses, self.rule)

    def _outputs(self, values: Sequence[Tensor | None]) -> Any:
        front = [v if v is None or self.batch_first else turned(v) for v in values]
        return put_tensors(front, self.other_outputs, self.output_spec)


class RowsReport:
    """A parameter that was repeated for each row."""

    def __init__(self, capture: Capture, use: Use):
        self.capture = capture
        self.use = use
        self.name = use.name

    def fire(self, saved: tuple[Tensor, ...], grad: Tensor) -> None:
        self.capture.report_rows(self.use, grad)
