"""All errors and warnings that dpengine raises, each with a stable code, and the check of keyword arguments.

An error states where (the dotted module or argument), what was found, and what to do; ``fix`` is the line to type.
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
    """Base of all errors that protect the guarantee.

    Args:
        message: Where, what was found, and why it matters.
        fix: What to do about it, best as a line to type.
        where: Dotted name of the layer or parameter at fault, if it is one.
    """

    code = "DPE000"

    def __init__(self, message: str, *, fix: str = "", where: str | None = None):
        self.fix = fix
        self.where = where
        super().__init__(f"[{self.code}] {message} {fix}".rstrip())

    def __reduce__(self) -> tuple[Any, ...]:
        """Comes out of a pickle, as other processes send it, as it was."""
        return _again, (type(self), self.args, self.fix, self.__dict__)

    @property
    def docs(self) -> str:
        """Anchor of this error in the documentation."""
        return f"docs/errors.md#{self.code.lower()}"


def _again(kind: type[PrivacyError], args: tuple[Any, ...], fix: str, rest: dict[str, Any]) -> PrivacyError:
    error = kind.__new__(kind, *args)
    error.args, error.fix = args, fix
    error.__dict__.update(rest)
    return error


class UnsupportedError(ValueError):
    """Something that cannot be trained privately as it is."""


class UnsupportedModuleError(UnsupportedError):
    """A module that cannot be trained privately as it is; what the engine refuses is an ``UnsupportedLayerError``."""


class UnsupportedLayerError(PrivacyError, UnsupportedModuleError):
    """A layer whose per-sample gradients are not known, or which mixes the rows of a batch."""

    code = "DPE001"


class MissingGradientError(PrivacyError, ValueError):
    """A trainable parameter without a per-sample gradient, or with one that did not come through its layer."""

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
    """A privacy parameter outside its legal range."""

    code = "DPE007"


class CalibrationError(PrivacyError, ValueError):
    """The target epsilon cannot be reached."""

    code = "DPE008"


class ScaledGradientError(PrivacyError):
    """Gradients are multiplied by a loss scale that was not passed to the engine."""

    code = "DPE009"


class BatchDependentLossError(PrivacyError):
    """The loss of one row depends on the other rows."""

    code = "DPE010"


class BudgetExceeded(PrivacyError):
    """The next step would spend more than the target."""

    code = "DPE011"


class ReductionError(PrivacyError, ValueError):
    """The loss is summed where a mean was declared, or the other way round."""

    code = "DPE013"


class UnknownParameterError(PrivacyError):
    """A parameter or optimizer that the engine cannot make private."""

    code = "DPE016"


class RepeatedBackwardError(PrivacyError, ValueError):
    """The same rows went through two backward passes in one step."""

    code = "DPE017"


class BatchMismatchError(PrivacyError):
    """The rows seen in backward are not the rows that the sampler drew."""

    code = "DPE018"


class DetachedError(PrivacyError):
    """An optimizer was stepped without its engine: a copy, say, or one that was detached half-way."""

    code = "DPE019"


class MissingDependencyError(PrivacyError, ImportError):
    """An optional package is absent."""

    code = "DPE020"


class LedgerError(PrivacyError):
    """The ledger is missing, edited or truncated."""

    code = "DPE021"


class BatchStateError(PrivacyError):
    """A backward pass, step or call does not fit the state of the logical batch."""

    code = "DPE022"


class MechanismMismatchError(PrivacyError, ValueError):
    """The stored state belongs to another mechanism than the one that loads it."""

    code = "DPE023"


class CorruptFileError(PrivacyError):
    """A stored file is missing, damaged, edited, or of a version that is not known."""

    code = "DPE024"


class AccountingRefusedError(PrivacyError):
    """No sound number can be given for this history."""

    code = "DPE025"


class BufferUpdateError(PrivacyError):
    """A forward pass or the loop keeps data of a batch in the model."""

    code = "DPE026"


class ExtensionError(PrivacyError, ValueError):
    """A clipping policy, grad sampler or norm sampler from outside does not fulfill its contract."""

    code = "DPE027"


class PrivacyWarning(Warning):
    """Something a person who answers for the guarantee must know. Shown once for each code, and object at fault."""


class _Process:
    """Stands for the process in `_shown`."""


_PROCESS = _Process()
_shown: weakref.WeakKeyDictionary[object, set[tuple[str, str]]] = weakref.WeakKeyDictionary()


def notice(code: str, message: str | Callable[[], str], *, key: str = "", of: object = _PROCESS) -> None:
    """Warns once for each ``(code, key)`` and object.

    Args:
        code: The code of the error catalogue, such as ``"DPE012"``.
        message: What happened and what to do; or a function that returns it, called only if the notice is shown.
        key: Tells apart notices of one code that should each be shown.
        of: The object at fault, such as a model; the process by default.
    """
    shown = _shown.setdefault(of, set())
    if (code, key) not in shown:
        shown.add((code, key))
        frame = sys._getframe(1)
        caller = frame.f_back or frame
        # Not `warnings.warn`, which by default shows equal texts from one line once, whatever object they are about.
        warnings.warn_explicit(
            f"[{code}] {message if isinstance(message, str) else message()}",
            PrivacyWarning,
            caller.f_code.co_filename,
            caller.f_lineno,
            module=caller.f_globals.get("__name__"),
        )


def forget_notices() -> None:
    """Lets every notice be shown again, as in a new process. For tests."""
    _shown.clear()


C = TypeVar("C", bound=Callable[..., Any])


def suggests_names(target: C) -> C:
    """Makes a public function or class answer an unknown keyword with the nearest one that it knows."""
    if isinstance(target, type):
        target.__init__ = _checked(target.__init__, target.__qualname__)  # type: ignore[misc]
        return target
    return _checked(target, target.__qualname__)


def check_keywords(called: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Checks keywords against those that a callable takes.

    Args:
        called: Name of the callable.
        names: The keywords.
        known: All keywords that it takes.

    Raises:
        TypeError: If one is not known; the message names the nearest known one.
    """
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or [k for k in known if name in k or k in name]
            hint = f" Did you mean {near[0]!r}?" if near else f" It takes: {', '.join(known) or 'none'}."
            raise TypeError(f"{called}() has no argument {name!r}.{hint}")


def _checked(function: Any, called: str) -> Any:
    known = [p.name for p in inspect.signature(function).parameters.values() if p.name != "self"]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_keywords(called, kwargs, known)
        return function(*args, **kwargs)

    return checked
