"""Privacy cost of a history, by an accountant of the user's choice.

All results are upper bounds for add-or-remove unless another relation is given.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist

from dpengine.errors import AccountingRefusedError

from . import arguments, custom_accountant, gdp, library, rdp
from .composition import Bounds, Composition, compose
from .custom_accountant import Accountant
from .events import Relation
from .ledger import Charge, checked_history, steps_of
from .monte_carlo import estimate as monte_carlo
from .prv import prv
from .tilted_pld import pld


@dataclass(frozen=True)
class BuiltinAccountant:
    """Functions of a built-in accountant, which bound the privacy loss of a composition.

    Attributes:
        epsilon: Returns an upper bound on epsilon for a delta.
        delta: Returns an upper bound on delta for an epsilon.
        bounds: Returns a lower and an upper bound on epsilon for a delta; None without a lower bound.
        spacing: Returns the spacing of the grid of privacy losses; None without a grid.
        simulates: Whether the accountant is for runs without a closed form, and does not support DP-SGD.
    """

    epsilon: Callable[[Composition, float, Relation], float]
    delta: Callable[[Composition, float, Relation], float]
    bounds: Callable[[Composition, float, Relation], Bounds] | None = None
    spacing: Callable[[Composition, float, Relation], float | None] | None = None
    simulates: bool = False


ACCOUNTANTS = {
    "pld": BuiltinAccountant(pld.epsilon, pld.delta, pld.bounds, pld.spacing),
    "rdp": BuiltinAccountant(rdp.epsilon, rdp.delta),
    "gdp": BuiltinAccountant(gdp.epsilon, gdp.delta, gdp.bounds),
    "prv": BuiltinAccountant(prv.epsilon, prv.delta, prv.bounds, prv.spacing),
    "dp_accounting": BuiltinAccountant(library.pld_epsilon, library.pld_delta, spacing=library.pld_spacing),
    "dp_accounting_rdp": BuiltinAccountant(library.rdp_epsilon, library.rdp_delta),
    "monte_carlo": BuiltinAccountant(monte_carlo.epsilon, monte_carlo.delta, simulates=True),
}


@dataclass(frozen=True)
class PrivacySpent:
    """Privacy cost of a history.

    Args:
        epsilon: Epsilon at ``delta``.
        delta: The given delta.
        mu: Smallest mu of Gaussian differential privacy whose curve bounds that of the history at ``delta`` and at each
            power of ten from 1e-9 that the accountant supports.
        advantage: Maximum advantage of a membership test: true minus false positive rate, ``delta`` at epsilon 0.
        steps: Number of charged batches, released or discarded.
        accountant_used: Name of the accountant.
    """

    epsilon: float
    delta: float
    mu: float
    advantage: float
    steps: int
    accountant_used: str


def accountant_name(accountant: str | Accountant = "pld") -> str:
    """Returns the name of an accountant. Raises if it is not built in and does not satisfy `Accountant`."""
    choices = ", ".join(repr(name) for name in ACCOUNTANTS)
    if isinstance(accountant, str) and accountant in ACCOUNTANTS:
        return accountant
    if not isinstance(accountant, type) and type(accountant).__module__ == "builtins":
        raise ValueError(
            f"accountant={accountant!r} is not known. Choose one of {choices}, or pass an object: see Accountant."
        )
    custom_accountant.check_accountant(accountant)
    name = custom_accountant.name_of(accountant)
    if name in ACCOUNTANTS:
        raise ValueError(
            f"accountant is a {type(accountant).__name__} with the name {name!r} of a built-in accountant. Rename it."
        )
    return name


def epsilon_of(
    history: Iterable[Charge],
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> float:
    """Returns an upper bound on the epsilon of a history.

    The result depends neither on the order of the charges nor on how equal charges are split.

    Args:
        history: All charges, such as ``ledger.history``. Discarded batches count like steps.
        delta: Strictly between 0 and 1; well below 1/N.
        accountant: "pld" (tight), "rdp" (fast, looser) or "gdp" (exact, only without sampling); for a second opinion
            "prv", or "dp_accounting" and "dp_accounting_rdp" of the dp-accounting library; "monte_carlo" (simulation,
            for a history with one run that has no closed form; takes up to half a minute). Or an object that satisfies
            `Accountant`.
        relation: Neighboring relation.

    Returns:
        0.0 if nothing was charged, infinity for a release without noise.

    Raises:
        InvalidBudgetError: If ``delta`` is out of range, or the total count of charges exceeds the maximum.
        TypeError: If the history contains anything but charges, or an object does not satisfy `Accountant`.
        AccountingRefusedError: If the history contains an unclaimed release, or the accountant does not support it.
        ValueError: If the accountant is unknown, or a custom accountant returns a value out of range.
    """  # noqa: DOC502 - the checks raise on our behalf
    delta, name, relation = arguments.delta_in_range(delta), accountant_name(accountant), Relation(relation)
    history = checked_history(history)
    if not isinstance(accountant, str):
        return custom_accountant.epsilon_by(accountant, history, delta, relation)
    return ACCOUNTANTS[name].epsilon(compose(history), delta, relation)


def bounds_of(
    history: Iterable[Charge],
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> tuple[float, float, float]:
    """Returns bounds on epsilon and an estimate, ``(lower, estimate, upper)``. Report the upper bound.

    Args:
        history: All charges.
        delta: Strictly between 0 and 1.
        accountant: An accountant with both bounds: "pld", "prv", "gdp", or an `Accountant` with ``bounds``.
        relation: Neighboring relation.

    Returns:
        A lower bound, an estimate and an upper bound.

    Raises:
        AccountingRefusedError: If the accountant has no lower bound, or does not support the history.
    """
    name, history = accountant_name(accountant), checked_history(history)
    delta, relation = arguments.delta_in_range(delta), Relation(relation)
    if not isinstance(accountant, str):
        custom_bounds = custom_accountant.bounds_by(accountant, history, delta, relation)
        if custom_bounds is not None:
            return custom_bounds
    elif (function := ACCOUNTANTS[name].bounds) is not None:
        bounds = function(compose(history), delta, relation)
        return bounds.lower, bounds.estimate, bounds.upper
    choices = ", ".join(repr(name) for name, builtin in ACCOUNTANTS.items() if builtin.bounds is not None)
    raise AccountingRefusedError(f"accountant {name!r} has no lower bound.", fix=f"Choose one of {choices}.")


def delta_of(
    history: Iterable[Charge],
    epsilon: float,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> float:
    """Returns an upper bound on the delta of a history at a given epsilon.

    Args:
        history: All charges.
        epsilon: At least 0 and finite.
        accountant: As for `epsilon_of`.
        relation: Neighboring relation.

    Returns:
        Between 0 and 1.
    """
    epsilon, name, relation = arguments.epsilon_in_range(epsilon), accountant_name(accountant), Relation(relation)
    history = checked_history(history)
    if not isinstance(accountant, str):
        return custom_accountant.delta_by(accountant, history, epsilon, relation)
    return ACCOUNTANTS[name].delta(compose(history), epsilon, relation)


def advantage_of(
    history: Iterable[Charge], accountant: str | Accountant = "pld", relation: Relation = Relation.ADD_OR_REMOVE_ONE
) -> float:
    """Returns a bound on the advantage of any membership test: the total variation distance, ``delta`` at epsilon 0."""
    return delta_of(history, 0.0, accountant, relation)


def mu_gdp(
    history: Iterable[Charge],
    delta: float = 1e-9,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> float:
    """Returns the smallest mu whose Gaussian curve bounds that of the history; exact for unsampled Gaussians.

    A sampled history is not Gaussian: its mu grows slowly as delta decreases, so the range of delta matters.

    Args:
        history: All charges.
        delta: The curve is bounded at each decade of delta from 1e-9 (or from the smallest decade that the accountant
            supports), and at this delta.
        accountant: As for `epsilon_of`.
        relation: Neighboring relation.

    Returns:
        mu; infinite for a release without noise.
    """
    history = checked_history(history)
    composition, relation = _composed(history), Relation(relation)
    if composition.non_private or composition.unsampled:
        return gdp.exact_mu(composition, relation)
    deltas = {10.0**-decade for decade in range(1, 10)} | {arguments.delta_in_range(delta)}
    points = privacy_profile(history, deltas, accountant, relation)
    advantage = advantage_of(history, accountant, relation)
    mu_at_zero = 2 * NormalDist().inv_cdf((1 + advantage) / 2) if advantage < 1 else 0.0
    return max(mu_at_zero, *(gdp.largest_mu(eps, delta) for delta, eps in points if eps > 0), 0.0)


def privacy_profile(
    history: Iterable[Charge],
    deltas: Iterable[float],
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> tuple[tuple[float, float], ...]:
    """Returns the privacy curve as pairs ``(delta, epsilon)`` in order of decreasing delta.

    Args:
        history: All charges.
        deltas: Deltas to evaluate. Those that the accountant does not support are omitted.
        accountant: As for `epsilon_of`.
        relation: Neighboring relation.

    Returns:
        The pairs, each with an upper bound for its delta.

    Raises:
        AccountingRefusedError: If the accountant supports none of the deltas.
    """  # noqa: DOC502 - the last error
    history = checked_history(history)
    _composed(history)  # raises for an unclaimed release, which no delta supports
    points, last_error = [], None
    for delta in sorted((arguments.delta_in_range(value) for value in deltas), reverse=True):
        try:
            points.append((delta, epsilon_of(history, delta, accountant, relation)))
        except AccountingRefusedError as error:
            last_error = error
    if last_error is not None and not points:
        raise last_error
    return tuple(points)


def discretization_of(
    history: Iterable[Charge],
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> float | None:
    """Returns the grid spacing of the privacy loss behind `epsilon_of`, for reports; None without a grid."""
    name = accountant_name(accountant)
    function = ACCOUNTANTS[name].spacing if isinstance(accountant, str) else None
    return (
        None if function is None else function(_composed(history), arguments.delta_in_range(delta), Relation(relation))
    )


def privacy_spent(
    history: Iterable[Charge],
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> PrivacySpent:
    """Returns the complete privacy cost of a history, for reports.

    Args:
        history: All charges.
        delta: Delta of ``epsilon``; strictly between 0 and 1.
        accountant: As for `epsilon_of`.
        relation: Neighboring relation.

    Returns:
        The numbers, with the name of the accountant.
    """
    history = checked_history(history)
    epsilon = epsilon_of(history, delta, accountant, relation)
    mu = mu_gdp(history, delta, accountant, relation)
    advantage = advantage_of(history, accountant, relation)
    return PrivacySpent(epsilon, float(delta), mu, advantage, steps_of(history), accountant_name(accountant))


def _composed(history: Iterable[Charge]) -> Composition:
    return compose(checked_history(history))
