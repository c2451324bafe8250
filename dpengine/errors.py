"""All errors and warnings of dpengine, with stable codes, and the check of keyword arguments.

An error states where (the dotted module or argument), what was found, and what to do (``fix``).
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar


class PrivacyError(RuntimeError):
    """Base class of all errors that protect the guarantee.

    Args:
        message: Place, problem, and reason why it matters.
        fix: Remedy, preferably a line of code.
        where: Dotted name of the layer or parameter at fault; None if there is none.
    """

    code = "DPE000"

    def __init__(self, message: str, *, fix: str = "", where: str | None = None):
        self.fix = fix
        self.where = where
        super().__init__(f"[{self.code}] {message} {fix}".rstrip())

    def __reduce__(self) -> tuple[Any, ...]:
        """Supports pickling, so that errors of other processes keep all attributes."""
        return _unpickled, (type(self), self.args, self.fix, self.__dict__)

    @property
    def docs(self) -> str:
        """Anchor of this error in the documentation."""
        return f"docs/errors.md#{self.code.lower()}"


def _unpickled(kind: type[PrivacyError], args: tuple[Any, ...], fix: str, attributes: dict[str, Any]) -> PrivacyError:
    error = kind.__new__(kind, *args)
    error.args, error.fix = args, fix
    error.__dict__.update(attributes)
    return error


class UnsupportedError(ValueError):
    """An object cannot be trained privately as it is."""


class UnsupportedModuleError(UnsupportedError):
    """A module cannot be trained privately as it is. The engine raises the subclass ``UnsupportedLayerError``."""


class UnsupportedLayerError(PrivacyError, UnsupportedModuleError):
    """A layer has no rule for per-sample gradients, or mixes the samples of a batch."""

    code = "DPE001"


class MissingGradientError(PrivacyError, ValueError):
    """A trainable parameter has no per-sample gradient, or got a gradient outside its layer."""

    code = "DPE002"


class ParameterMismatchError(PrivacyError, ValueError):
    """Optimizer and model do not hold the same parameters."""

    code = "DPE003"


class SamplingError(PrivacyError, ValueError):
    """The loader does not draw every example with one known probability."""

    code = "DPE004"


class StaleGradientError(PrivacyError, ValueError):
    """``zero_grad`` was not called since the last step."""

    code = "DPE005"


class InvalidBudgetError(PrivacyError, ValueError):
    """A privacy parameter is out of range."""

    code = "DPE007"


class CalibrationError(PrivacyError, ValueError):
    """The target epsilon cannot be reached."""

    code = "DPE008"


class ScaledGradientError(PrivacyError):
    """Gradients are multiplied by a loss scale that was not passed to the engine."""

    code = "DPE009"


class BatchDependentLossError(PrivacyError):
    """The loss of one sample depends on the other samples of the batch."""

    code = "DPE010"


class BudgetExceeded(PrivacyError):
    """The next step would exceed the target epsilon."""

    code = "DPE011"


class ReductionError(PrivacyError, ValueError):
    """The loss is a sum, but was declared as a mean, or vice versa."""

    code = "DPE013"


class UnknownParameterError(PrivacyError):
    """A parameter or an optimizer cannot be made private."""

    code = "DPE016"


class RepeatedBackwardError(PrivacyError, ValueError):
    """The same samples were used in two backward passes of one step."""

    code = "DPE017"


class BatchMismatchError(PrivacyError):
    """The samples in a backward pass are not those that the sampler drew."""

    code = "DPE018"


class DetachedError(PrivacyError):
    """An optimizer was stepped without its engine, for example a copy, or one that was detached during the step."""

    code = "DPE019"


class MissingDependencyError(PrivacyError, ImportError):
    """An optional package is not installed."""

    code = "DPE020"


class LedgerError(PrivacyError):
    """The ledger is missing, edited or truncated."""

    code = "DPE021"


class BatchStateError(PrivacyError):
    """A backward pass, step or call does not fit the state of the logical batch."""

    code = "DPE022"


class MechanismMismatchError(PrivacyError, ValueError):
    """A stored state and the run that loads it, or two ranks of a run, have different mechanisms."""

    code = "DPE023"


class CorruptFileError(PrivacyError):
    """A stored file is missing, damaged, edited, or of an unknown version."""

    code = "DPE024"


class AccountingRefusedError(PrivacyError):
    """No valid privacy bound exists for this history of charges."""

    code = "DPE025"


class BufferUpdateError(PrivacyError):
    """A forward pass or the loop stores data of a batch in the model."""

    code = "DPE026"


class ExtensionError(PrivacyError, ValueError):
    """A user's clipping policy, grad sampler or norm sampler does not fulfill its contract."""

    code = "DPE027"


class PrivacyWarning(Warning):
    """Information that matters for the privacy guarantee. Shown once for each code and object at fault."""


class _Process:
    """Represents the process in `_shown`."""


_PROCESS = _Process()
_shown: weakref.WeakKeyDictionary[object, set[tuple[str, str]]] = weakref.WeakKeyDictionary()


def notice(code: str, message: str | Callable[[], str], *, key: str = "", of: object = _PROCESS) -> None:
    """Warns once for each ``(code, key)`` and object.

    Args:
        code: The code of the error catalogue, such as ``"DPE012"``.
        message: What happened and what to do; or a function that returns it, called only if the notice is shown.
        key: Distinguishes notices with the same code that should each be shown.
        of: The object at fault, such as a model; the process by default.
    """
    shown = _shown.setdefault(of, set())
    if (code, key) not in shown:
        shown.add((code, key))
        frame = sys._getframe(1)
        caller = frame.f_back or frame
        # `warnings.warn` would show equal texts from one line only once, even for different objects.
        warnings.warn_explicit(
            f"[{code}] {message if isinstance(message, str) else message()}",
            PrivacyWarning,
            caller.f_code.co_filename,
            caller.f_lineno,
            module=caller.f_globals.get("__name__"),
        )


def forget_notices() -> None:
    """Allows every notice to be shown again, as in a new process. For tests."""
    _shown.clear()


C = TypeVar("C", bound=Callable[..., Any])


def keyword_hints(target: C) -> C:
    """Decorates a public function or class: its TypeError for an unknown keyword suggests a similar keyword."""
    if isinstance(target, type):
        target.__init__ = _checked(target.__init__, target.__qualname__)  # type: ignore[misc]
        return target
    return _checked(target, target.__qualname__)


def check_keywords(function_name: str, names: Iterable[str], accepted: Sequence[str]) -> None:
    """Checks keywords against those that a function accepts.

    Args:
        function_name: Name of the function.
        names: The keywords.
        accepted: All keywords that the function accepts.

    Raises:
        TypeError: If a keyword is unknown. The message suggests the most similar accepted one.
    """
    for name in names:
        if name not in accepted:
            matches = difflib.get_close_matches(name, accepted, n=1) or [k for k in accepted if name in k or k in name]
            hint = f" Did you mean {matches[0]!r}?" if matches else f" It takes: {', '.join(accepted) or 'none'}."
            raise TypeError(f"{function_name}() has no argument {name!r}.{hint}")


def _checked(function: Any, name: str) -> Any:
    accepted = [p.name for p in inspect.signature(function).parameters.values() if p.name != "self"]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_keywords(name, kwargs, accepted)
        return function(*args, **kwargs)

    return checked
