"""The guards of the training step. Each row removes one guard, and names the test that fails without it.

``old`` occurs exactly once in the package; where it stands does not matter, so that code may move between files.
"""

from typing import NamedTuple


class Guard(NamedTuple):
    """A guard of the training step.

    Attributes:
        id: A short name.
        what: What the guard does.
        old: The text of the guard.
        new: The text that removes or weakens it.
        test: Node id of the test that fails then, from the folder of the tests.
        also: Further pairs of old and new text, where the guard is in several places.
    """

    id: str
    what: str
    old: str
    new: str
    test: str
    also: tuple[tuple[str, str], ...] = ()

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """All pairs of old and new text."""
        return ((self.old, self.new), *self.also)


GUARDS = [
    Guard(
        "finish-step-size",
        "the expected batch size as the divisor of an adaptive threshold",
        "self.plan.expected_batch_size, self.sums.topology.total",
        'self.plan.divisor(1, mean=self.sums.loss_reduction == "mean"), self.sums.topology.total',
        "faults/test_clipping.py::test_an_adaptive_threshold_moves_by_a_share_of_the_expected_batch_size",
    ),
    Guard(
        "leaks-of-unfrozen",
        "leaks of parameters that are unfrozen later",
        "        self.watch_leaks()\n        self.rows = rows",
        "        self.rows = rows",
        "faults/test_weights.py::test_a_weight_that_is_unfrozen_later_and_used_past_its_layer_is_refused",
    ),
    Guard(
        "void-zeroes",
        "sums are destroyed where the charge of a discarded batch fails",
        "        finally:\n            self.tickets = []\n",
        "        except AttributeError:\n            raise\n        else:\n            self.tickets = []\n",
        "faults/test_call_order.py::test_a_batch_whose_discarding_cannot_be_charged_leaves_nothing_in_the_next_release",
    ),
    Guard(
        "finite-after-drop",
        "sums are finite after samples were dropped",
        "dropped and not self.buffer.is_finite()",
        "False",
        "grad_modes/test_strategies.py::test_a_row_that_cannot_be_kept_out_of_the_sum_is_refused",
    ),
    Guard(
        "second-norm",
        "a second norm in ghost mode",
        "self._take is None and use.parameter in self._sq_norms",
        "False",
        "clipping/test_clipper.py::test_ghost_mode_refuses_to_join_the_norms_of_forward_passes_from_before_the_last_backward",
    ),
    Guard(
        "plan-refuses-step",
        "a step that the plan does not have",
        "        self.plan.refuse_step(ticket.step)\n",
        "",
        "test_correlated_runs.py::test_more_steps_than_planned_are_refused",
    ),
    Guard(
        "left-out-chunk",
        "a chunk that was left out voids its batch",
        "self.stage is Stage.VOID or (not self.done and self.rows > 0)",
        "False",
        "test_release.py::test_any_order_of_calls_keeps_the_books_and_the_sums",
    ),
    Guard(
        "leaving-void",
        "an error in the update discards the batch",
        "        except BaseException:\n            self.void()\n            raise\n        self.sums.contributed",
        "        except BaseException:\n            raise\n        self.sums.contributed",
        "test_release.py::test_any_order_of_calls_keeps_the_books_and_the_sums",
    ),
    Guard(
        "charge-first",
        "a release is charged",
        "        self.ledger.charge(self.plan.event(count), count=count)",
        "        pass",
        "test_release.py::test_the_charge_is_there_when_the_update_runs",
    ),
    Guard(
        "charge-all",
        "all joined batches are charged",
        "count=count)\n        self.joined",
        "count=1)\n        self.joined",
        "test_release.py::test_a_batch_that_was_not_touched_leaves_those_before_it",
    ),
    Guard(
        "void-charged",
        "a discarded batch is charged",
        'self.ledger.charge(self.plan.event(), count=tickets, kind="void")',
        "pass",
        "test_release.py::test_a_batch_left_half_way_takes_those_before_it_along",
    ),
    Guard(
        "over-budget",
        "a step above the target is refused",
        "        if reached is None:\n            return\n        if self.stage",
        "        if True:\n            return\n        if self.stage",
        "test_budget_of_run.py::test_v4_stop_ends_the_loader_before_the_target_is_passed",
    ),
    Guard(
        "over-budget-discards",
        "the sums of a batch above the target are destroyed",
        "            self.tickets, self.stage = [], Stage.VOID\n            self.sums.discard()",
        "            self.tickets, self.stage = [], Stage.VOID",
        "test_budget_of_run.py::test_v4_raise_refuses_the_step_that_overspends_and_charges_nothing",
    ),
    Guard(
        "noise-std",
        "noise has the standard deviation of the plan",
        "std=std, step=step, scale=1 / divisor",
        "std=0.0, step=step, scale=1 / divisor",
        "test_noise_of_run.py::test_f_n6_noise_has_the_standard_deviation_that_is_charged",
    ),
    Guard(
        "noise-step",
        "noise is addressed by the step",
        "std=std, step=step, scale=1 / divisor",
        "std=std, step=0, scale=1 / divisor",
        "test_noise_of_run.py::test_f_n6_noise_has_the_standard_deviation_that_is_charged",
    ),
    Guard(
        "follow-plan-clean",
        "constants change only while the sums are empty",
        "self._next_plan is None or not self.sums.buffer.clean",
        "self._next_plan is None",
        "test_plan_changes.py::test_a_change_waits_as_long_as_clipped_gradients_do_and_then_all_holds_together",
    ),
    Guard(
        "finish-step",
        "an adaptive policy finishes its step",
        "            self.plan.clipping.finish_step(",
        "            (lambda *_: None)(",
        "faults/test_clipping.py::test_an_adaptive_threshold_moves_by_a_share_of_the_expected_batch_size",
    ),
    Guard(
        "refuse-strangers-rows",
        "rows that did not come from the loader",
        "release.stage is Stage.IDLE or (release.stage is Stage.RELEASED and not release.tickets)",
        "False",
        "test_release.py::test_rows_from_elsewhere_are_refused",
    ),
    Guard(
        "refuse-stale-backward",
        "backward onto released gradients",
        "    refuse_stale(release)\n    _refuse_other_batch",
        "    _refuse_other_batch",
        "faults/test_lifecycle.py::test_f_l1_a_missing_zero_grad_is_refused",
    ),
    Guard(
        "refuse-stale",
        "gradients that were not cleared",
        "    if release.gradients.stale:",
        "    if False:",
        "faults/test_lifecycle.py::test_f_l1_a_missing_zero_grad_is_refused",
    ),
    Guard(
        "refuse-not-ready",
        "a step with nothing to release",
        "if cause := _why_not_ready(release) or",
        "if cause :=",
        "faults/test_lifecycle.py::test_f_l2_a_step_with_nothing_to_release_names_the_cause",
    ),
    Guard(
        "refuse-unused",
        "a parameter that took no part",
        'missing and release.unused_parameters == "error"',
        "False",
        "faults/test_weights.py::test_f_m8_an_unused_parameter_is_named_or_gets_noise_and_is_never_dropped",
    ),
    Guard(
        "leaks",
        "a gradient that autograd filled",
        "            self._refuse_leaks()\n            self._refuse_other_rows(rows)\n            seen",
        "            self._refuse_other_rows(rows)\n            seen",
        "faults/test_weights.py::test_f_m5_a_weight_used_past_its_layer_is_refused_and_charged",
    ),
    Guard(
        "drop",
        "samples without a finite norm are dropped",
        "            self.strategy.drop(dropped_B)",
        "            pass",
        "grad_modes/test_strategies.py::test_f_d5_a_poisoned_row_counts_nothing_and_leaves_the_others_as_they_are",
    ),
    Guard(
        "drop-finite-test",
        "norms are checked to be finite",
        "math.isfinite(float(norms_BK.sum()))",
        "True",
        "grad_modes/test_strategies.py::test_f_d5_a_poisoned_row_counts_nothing_and_leaves_the_others_as_they_are",
    ),
    Guard(
        "discard-partial",
        "a pass that fails while it is summed leaves nothing",
        "            self.discard_sums()  # a part of this pass may be in them\n",
        "",
        "clipping/test_clipper.py::test_a_pass_that_fails_while_it_is_summed_leaves_nothing_of_itself",
    ),
    Guard(
        "tiny-factors",
        "factors below all normal numbers become zero",
        "weights_BK = weights_BK.masked_fill(weights_BK < torch.finfo(torch.float32).smallest_normal, 0)",
        "pass",
        "faults/test_rounding_attacks.py::test_f_u1_a_factor_below_all_normal_numbers_is_not_rounded_up",
    ),
    Guard(
        "clip-forgets",
        "records of a pass go when it is clipped",
        "            return self._add(seen, scale)\n        finally:\n            self.forget_pass()",
        "            return self._add(seen, scale)\n        finally:\n            pass",
        "clipping/test_clipper.py::test_unequal_minibatches_give_the_average_over_all_samples",
    ),
]
