"""The questions that users and reports ask of a history, answered by the accountant of their choice.

All answers are upper bounds for add-or-remove unless another relation is named.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist

from dpengine.errors import AccountingRefusedError

from . import arguments, gdp, library, own_accountant, rdp
from .composition import Bounds, Composition, compose
from .events import Relation
from .ledger import Charge, checked_history, steps_of
from .monte_carlo import estimate as monte_carlo
from .own_accountant import Accountant
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
        simulates: Whether the accountant handles runs without a closed form, and not plain DP-SGD.
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
    """What a history cost.

    Args:
        epsilon: At ``delta``.
        delta: As asked.
        mu: Smallest mu of Gaussian differential privacy whose curve covers this history's at every decade of delta from
            1e-9 (or ``delta``, if smaller; or what the accountant answers for, if larger) up.
        advantage: Largest advantage of a membership test: true minus false positive rate, ``delta`` at epsilon 0.
        steps: Batches charged, released or void.
        accountant_used: Name of the accountant that gave the numbers.
    """

    epsilon: float
    delta: float
    mu: float
    advantage: float
    steps: int
    accountant_used: str


def accountant_used(accountant: str | Accountant = "pld") -> str:
    """Returns the name of the accountant that will answer; raises unless it is built in or fulfills `Accountant`."""
    choices = ", ".join(repr(name) for name in ACCOUNTANTS)
    if isinstance(accountant, str) and accountant in ACCOUNTANTS:
        return accountant
    if not isinstance(accountant, type) and type(accountant).__module__ == "builtins":
        raise ValueError(
            f"accountant={accountant!r} is not known. Choose {choices}, or pass an object: see Accountant."
        )
    own_accountant.check_accountant(accountant)
    name = own_accountant.name_of(accountant)
    if name in ACCOUNTANTS:
        raise ValueError(f"accountant is a {type(accountant).__name__} with the name {name!r}, which is built in.")
    return name


def epsilon_of(
    history: Iterable[Charge],
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> float:
    """Returns an upper bound on the epsilon of a history.

    It depends on the charges and ``delta`` alone: not on their order, nor on how equal charges are split.

    Args:
        history: Everything that was charged, such as ``ledger.history``. Voids count like releases.
        delta: Strictly between 0 and 1; well below 1/N.
        accountant: "pld" (tight), "rdp" (fast, looser) or "gdp" (exact, without sampling only); for a second opinion
            "prv", and by the dp-accounting library "dp_accounting" and "dp_accounting_rdp"; "monte_carlo" (by
            simulation, for a history with one run that has no closed form; up to half a minute). Or an object that
            fulfills `Accountant`.
        relation: Which data sets are neighbours.

    Returns:
        0.0 if nothing was charged, infinity if something left without noise.

    Raises:
        InvalidBudgetError: If ``delta`` is out of range, or the charges are more than can be counted.
        TypeError: If the history holds anything but charges, or an object does not fulfill `Accountant`.
        AccountingRefusedError: If the history holds an unclaimed release, or the accountant has no sound answer.
        ValueError: If the accountant is unknown, or an accountant of the user's own returns a value out of range.
    """  # noqa: DOC502 - the checks raise on our behalf
    delta, name, relation = arguments.delta_in_range(delta), accountant_used(accountant), Relation(relation)
    history = checked_history(history)
    if not isinstance(accountant, str):
        return own_accountant.epsilon_by(accountant, history, delta, relation)
    return ACCOUNTANTS[name].epsilon(compose(history), delta, relation)


def bounds_of(
    history: Iterable[Charge],
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> tuple[float, float, float]:
    """Returns epsilon from both sides: ``(lower, estimate, upper)``. What may be reported is the upper one.

    Args:
        history: Everything that was charged.
        delta: Strictly between 0 and 1.
        accountant: One that bounds from both sides: "pld", "prv", "gdp", or an `Accountant` with ``bounds``.
        relation: Which data sets are neighbours.

    Returns:
        Two bounds, and between them the best guess.

    Raises:
        AccountingRefusedError: If the accountant has no bound from below, or no sound answer.
    """
    name, history = accountant_used(accountant), checked_history(history)
    delta, relation = arguments.delta_in_range(delta), Relation(relation)
    if not isinstance(accountant, str):
        own = own_accountant.bounds_by(accountant, history, delta, relation)
        if own is not None:
            return own
    elif (answer := ACCOUNTANTS[name].bounds) is not None:
        found = answer(compose(history), delta, relation)
        return found.lower, found.estimate, found.upper
    both = ", ".join(repr(name) for name, one in ACCOUNTANTS.items() if one.bounds is not None)
    raise AccountingRefusedError(f"accountant {name!r} has no bound from below.", fix=f"Choose {both}.")


def delta_of(
    history: Iterable[Charge],
    epsilon: float,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> float:
    """Returns an upper bound on the delta of a history at a given epsilon.

    Args:
        history: Everything that was charged.
        epsilon: At least 0 and finite.
        accountant: As for `epsilon_of`.
        relation: Which data sets are neighbours.

    Returns:
        Between 0 and 1.
    """
    epsilon, name, relation = arguments.epsilon_in_range(epsilon), accountant_used(accountant), Relation(relation)
    history = checked_history(history)
    if not isinstance(accountant, str):
        return own_accountant.delta_by(accountant, history, epsilon, relation)
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
    """Returns the smallest mu whose Gaussian curve covers this history's; exact for unsampled Gaussians.

    A sampled history is no Gaussian: its mu grows slowly as delta shrinks, so the range of delta must be named.

    Args:
        history: Everything that was charged.
        delta: The curve is covered at every decade of delta from 1e-9 up, and at this one. Where the accountant does
            not answer for so small a delta, from the smallest decade that it answers for.
        accountant: As for `epsilon_of`.
        relation: Which data sets are neighbours.

    Returns:
        mu; infinite if something left without noise.
    """
    history = checked_history(history)
    composition, relation = _composed(history), Relation(relation)
    if composition.non_private or composition.unsampled:
        return gdp.exact_mu(composition, relation)
    deltas = {10.0**-decade for decade in range(1, 10)} | {arguments.delta_in_range(delta)}
    points = privacy_profile(history, deltas, accountant, relation)
    advantage = advantage_of(history, accountant, relation)
    at_zero = 2 * NormalDist().inv_cdf((1 + advantage) / 2) if advantage < 1 else 0.0
    return max(at_zero, *(gdp.largest_mu(eps, delta) for delta, eps in points if eps > 0), 0.0)


def privacy_profile(
    history: Iterable[Charge],
    deltas: Iterable[float],
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> tuple[tuple[float, float], ...]:
    """Returns the privacy curve as pairs ``(delta, epsilon)`` in order of falling delta.

    Args:
        history: Everything that was charged.
        deltas: Where to evaluate. Those too small for the accountant's arithmetic are left out.
        accountant: As for `epsilon_of`.
        relation: Which data sets are neighbours.

    Returns:
        The pairs, each an upper bound computed at its own delta.

    Raises:
        AccountingRefusedError: If the accountant answers for none of them.
    """  # noqa: DOC502 - the last refusal
    history = checked_history(history)
    _composed(history)  # an unclaimed release refuses here, for all deltas
    points, refusal = [], None
    for delta in sorted((arguments.delta_in_range(value) for value in deltas), reverse=True):
        try:
            points.append((delta, epsilon_of(history, delta, accountant, relation)))
        except AccountingRefusedError as error:
            refusal = error
    if refusal is not None and not points:
        raise refusal
    return tuple(points)


def discretization_of(
    history: Iterable[Charge],
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> float | None:
    """Returns the grid spacing of the loss behind `epsilon_of`, for the statement; None where no grid is used."""
    name = accountant_used(accountant)
    answer = ACCOUNTANTS[name].spacing if isinstance(accountant, str) else None
    return None if answer is None else answer(_composed(history), arguments.delta_in_range(delta), Relation(relation))


def privacy_spent(
    history: Iterable[Charge],
    delta: float,
    accountant: str | Accountant = "pld",
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> PrivacySpent:
    """Returns all that a report says of a history.

    Args:
        history: Everything that was charged.
        delta: For ``epsilon``; strictly between 0 and 1.
        accountant: As for `epsilon_of`.
        relation: Which data sets are neighbours.

    Returns:
        The numbers, with the name of the accountant that gave them.
    """
    history = checked_history(history)
    spent = epsilon_of(history, delta, accountant, relation)
    mu = mu_gdp(history, delta, accountant, relation)
    advantage = advantage_of(history, accountant, relation)
    return PrivacySpent(spent, float(delta), mu, advantage, steps_of(history), accountant_used(accountant))


def _composed(history: Iterable[Charge]) -> Composition:
    return compose(checked_history(history))
