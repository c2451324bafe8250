"""Guards of backward passes: those that are clipped, and those that wait for an optimizer."""

from .guard import Guard

GUARDS = [
    Guard(
        "settle-forgets",
        "an interrupted pass is forgotten",
        "            self.forget()\n            return True",
        "            return True",
        "users/test_loop.py::test_s8_a_batch_that_failed_leaves_nothing_in_the_next",
    ),
    Guard(
        "settle-reports",
        "a pass without an end callback is clipped",
        "            self.backward_ended(ended=False)",
        "            pass",
        "compat/test_messages.py::test_a_backward_pass_through_another_method_is_named_at_the_step",
    ),
    Guard(
        "follow-before-clip",
        "the buffer has the parameters that are trainable now",
        "            trainable = self.follow()\n",
        "            trainable = self.trainable()\n",
        "test_engine.py::test_parameters_may_be_frozen_and_thawed_between_steps",
    ),
    Guard(
        "restrict-trainable",
        "parameters of another optimizer are not clipped",
        "p.requires_grad and (self._only is None or p in self._only)",
        "p.requires_grad",
        "compat/test_waiting_passes.py::test_a_part_of_the_parameters_is_clipped_by_its_own_norm",
    ),
    Guard(
        "restrict-mode",
        "layer calls of another optimizer's parameters are left out",
        "                mode = mode.copied(set(trainable.values()))",
        "                pass",
        "compat/test_waiting_passes.py::test_a_part_of_the_parameters_is_clipped_by_its_own_norm",
    ),
    Guard(
        "probe-samples",
        "the probe compares samples, not privacy units",
        "(units is not None or self._only is not None)",
        "self._only is not None",
        "test_privacy_unit.py::test_rows_that_mix_are_found",
    ),
    Guard(
        "probe-all-parameters",
        "the probe compares all parameters",
        "(units is not None or self._only is not None)",
        "units is not None",
        "compat/test_own_and_partial_optimizers.py::test_a_pass_of_which_a_part_is_clipped_is_probed_as_a_whole",
    ),
    Guard(
        "probe-before-use",
        "a pass that the probe rejects is not in the sums",
        "                self.probe.after(recorded.replay, probed_B)\n            except BaseException:\n"
        "                self.zero()\n                raise\n            return",
        "            except BaseException:\n                self.zero()\n                raise\n"
        "            self.probe.after(recorded.replay, probed_B)\n            return",
        "clipping/test_clipper.py::test_a_pass_that_fails_while_it_is_summed_leaves_nothing_of_itself",
    ),
    Guard(
        "zero-sums",
        "discarded sums are zeroed",
        "        self.buffer.zero()\n        self.contributed.clear()",
        "        self.contributed.clear()",
        "faults/test_lifecycle.py::test_f_l4_a_batch_that_ended_early_is_charged_and_leaves_nothing_behind",
    ),
    Guard(
        "detach-zeroes",
        "sums are zeroed when the hooks are removed",
        "        self.capture.detach()\n        self.discard()",
        "        self.capture.detach()",
        "test_engine.py::test_detach_in_the_middle_of_a_batch_charges_it_and_destroys_its_sums",
    ),
    Guard(
        "scaled-by-hand",
        "gradients of each sample's own loss are not scaled again",
        "recorded.scaled or self.loss_reduction",
        "self.loss_reduction",
        "compat/test_wrappers.py::test_what_is_written_to_grad_sample_is_what_is_clipped",
    ),
    Guard(
        "waiting-ended",
        "a pass that did not come through the model",
        "            if not recorded.ended:",
        "            if False:",
        "compat/test_messages.py::test_a_backward_pass_through_another_method_is_named_at_the_step",
    ),
    Guard(
        "waiting-cleared",
        "gradients of the last step that are still shown",
        "            if self.shows and _is_shown(parameter, one):",
        "            if False:",
        "compat/test_waiting_passes.py::test_what_was_released_must_be_cleared_before_the_next_pass",
    ),
    Guard(
        "waiting-accumulation",
        "a second pass of Poisson batches before the step",
        "self.allows_accumulation or not (self._waiting or unused)",
        "True",
        "compat/test_waiting_passes.py::test_where_passes_may_not_add_up_the_second_is_refused_by_name_and"
        "_nothing_counts_twice",
    ),
    Guard(
        "waiting-once",
        "a pass that waited is clipped once",
        "                first.use_up()\n                del self._waiting[:1]",
        "                first.use_up()",
        "compat/test_waiting_passes.py::test_passes_that_wait_are_clipped_one_by_one_and_each_once",
    ),
    Guard(
        "waiting-used",
        "a shown gradient is clipped once",
        "self._used.setdefault(parameter, []).append(grad_sample)",
        "pass",
        "compat/test_waiting_passes.py::test_passes_that_wait_are_clipped_one_by_one_and_each_once",
    ),
    Guard(
        "waiting-untouched",
        "a gradient that was written is what is clipped",
        "first is not None and self._is_untouched(first, parts)",
        "first is not None",
        "compat/test_wrappers.py::test_what_is_written_to_grad_sample_is_what_is_clipped",
    ),
    Guard(
        "waiting-unequal",
        "parameters of unequally many passes",
        "len({len(shown) for shown in parts.values()}) > 1",
        "False",
        "compat/test_waiting_passes.py::test_parameters_that_took_part_in_other_passes_are_refused",
    ),
    Guard(
        "waiting-interrupted",
        "an interrupted pass discards the batch of the optimizer",
        "            self._forget()\n            step.discard()",
        "            self._forget()",
        "compat/test_optimizer.py::test_a_backward_pass_that_was_interrupted_discards_its_batch",
    ),
]
