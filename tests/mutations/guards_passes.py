"""Guards of backward passes: those that are clipped, and those that wait for an optimizer."""

from .guard import Guard

GUARDS = [
    Guard(
        "an interrupted pass is forgotten",
        "            self.forget()\n            return True",
        "            return True",
        "users/test_loop.py::test_a_batch_that_failed_leaves_nothing_in_the_next",
    ),
    Guard(
        "a pass without an end callback is clipped",
        "        if self.mode.rows:\n            self.backward_ended()",
        "        if False:\n            self.backward_ended()",
        "engine/test_step.py::test_step_after_a_discarded_batch_equals_that_of_a_fresh_engine[leave_out_a_parameter-auto]",
    ),
    Guard(
        "the buffer has the parameters that are trainable now",
        "else self.update_buffer(walk=False)\n",
        "else self.trainable(walk=False)\n",
        "engine/test_engine.py::test_parameters_may_be_frozen_and_unfrozen_between_steps",
    ),
    Guard(
        "the trainable parameters are read again if a pass has other parameters than the last one",
        "last.parameters if mode.parameters is last.included else",
        "last.parameters if last.included is not None else",
        "engine/test_engine.py::test_parameters_may_be_frozen_and_unfrozen_between_steps",
    ),
    Guard(
        "a forward pass that replaces a buffer is found at its end",
        "self._tensors)) and self._tables.unchanged(children=False)",
        "self._tensors))",
        "faults/test_buffers.py::test_a_buffer_write_in_a_later_pass_is_found[replaced]",
    ),
    Guard(
        "parameters of another optimizer are not clipped",
        "p.requires_grad and (only is None or p in only)",
        "p.requires_grad",
        "compat/test_pending_passes.py::test_a_part_of_the_parameters_is_clipped_by_its_own_norm",
    ),
    Guard(
        "layer calls of another optimizer's parameters are left out",
        "            mode.keep(self.only)\n",
        "            pass\n",
        "compat/test_pending_passes.py::test_a_part_of_the_parameters_is_clipped_by_its_own_norm",
    ),
    Guard(
        "the probe compares samples, not privacy units",
        "(units is not None or self.only is not None)",
        "self.only is not None",
        "engine/test_privacy_unit.py::test_a_model_that_mixes_samples_is_rejected",
    ),
    Guard(
        "the probe compares all parameters",
        "(units is not None or self.only is not None)",
        "units is not None",
        "engine/test_partial_passes.py::test_a_pass_of_which_a_part_is_clipped_is_probed_as_a_whole",
    ),
    Guard(
        "a pass that the probe rejects is not in the sums",
        "            self.probe.end_pass(recorded.replay, count, sq_norms_B)\n        except BaseException:\n"
        "            self.zero()\n            raise\n        return",
        "        except BaseException:\n            self.zero()\n            raise\n"
        "        self.probe.end_pass(recorded.replay, count, sq_norms_B)\n        return",
        "clipping/test_clipper.py::test_a_pass_that_fails_while_it_is_summed_is_discarded_completely",
    ),
    Guard(
        "discarded sums are zeroed",
        "        self.buffer.zero()\n        self.contributed.clear()",
        "        self.contributed.clear()",
        "faults/test_lifecycle.py::test_an_interrupted_batch_is_charged_and_does_not_affect_the_next",
    ),
    Guard(
        "sums are zeroed when the hooks are removed",
        "        self.capture.detach()\n        self.discard()",
        "        self.capture.detach()",
        "engine/test_engine.py::test_detach_in_the_middle_of_a_batch_charges_it_and_destroys_its_sums",
    ),
    Guard(
        "gradients of each sample's own loss are not scaled again",
        "mode=recorded.mode, mean_loss=False",
        "mode=recorded.mode",
        "compat/test_wrappers.py::test_gradients_written_to_grad_sample_are_clipped",
    ),
    Guard(
        "a pass that did not come through the model",
        "if self.capture.unfinished is None and self.mode.rows:",
        "if False:",
        "compat/test_messages.py::test_a_backward_pass_through_another_method_is_named_at_the_step",
    ),
    Guard(
        "materialized gradients of the last step that are not cleared",
        "            if self.writes_grad_sample and _is_shown(parameter, one):",
        "            if False:",
        "compat/test_pending_passes.py::test_released_gradients_must_be_cleared_before_the_next_pass",
    ),
    Guard(
        "a second pass of Poisson batches before the step",
        "self.allows_accumulation or not (self._pending or unused)",
        "True",
        "compat/test_pending_passes.py::test_without_accumulation_the_second_pass_is_rejected_and_nothing_counts_twice",
    ),
    Guard(
        "a pending pass is clipped once",
        "                first.invalidate()\n                del self._pending[:1]",
        "                first.use_up()",
        "compat/test_pending_passes.py::test_pending_passes_are_clipped_one_by_one_and_each_once",
    ),
    Guard(
        "a materialized gradient is clipped once",
        "self._used.setdefault(parameter, []).append(grad_sample)",
        "pass",
        "compat/test_pending_passes.py::test_pending_passes_are_clipped_one_by_one_and_each_once",
    ),
    Guard(
        "a gradient that was written is what is clipped",
        "first is not None and self._is_untouched(first, parts)",
        "first is not None",
        "compat/test_wrappers.py::test_gradients_written_to_grad_sample_are_clipped",
    ),
    Guard(
        "parameters of unequally many passes",
        "len({len(shown) for shown in parts.values()}) > 1",
        "False",
        "compat/test_pending_passes.py::test_parameters_used_in_other_passes_are_rejected",
    ),
    Guard(
        "an interrupted pass discards the batch of the optimizer",
        "            self._forget()\n            step.discard()",
        "            self._forget()",
        "compat/test_optimizer.py::test_a_backward_pass_that_was_interrupted_discards_its_batch",
    ),
    Guard(
        "a backward pass inside the update",
        "            if self.batches.stage is Stage.CHARGED:\n                raise pass_inside_update()",
        "            if False:\n                raise pass_inside_update()",
        "engine/test_external_batches.py::test_a_backward_pass_inside_the_update_is_rejected_and_leaves_nothing",
    ),
    Guard(
        "a batch in the sums stays complete when the next one is revoked",
        "Stage.CLIPPED if self.logical_batches else Stage.DISCARDED\n        self.chunk",
        "Stage.OPEN if self.logical_batches else Stage.DISCARDED\n        self.done = False\n        self.chunk",
        "engine/test_own_accountant.py::test_a_batch_in_the_sums_is_not_clipped_again_after_the_loader_raised",
    ),
    Guard(
        "the step of a revoked batch counts as skipped",
        "self.last_step, self.done = last_step, True",
        "self.done = True",
        "engine/test_own_accountant.py::test_the_step_of_a_batch_that_the_loader_did_not_return_counts_as_skipped",
    ),
    Guard(
        "a batch that was overwritten after its pass",
        "            self._check_unchanged(first)\n",
        "",
        "compat/test_pending_passes.py::test_a_batch_that_was_overwritten_after_its_pass_is_not_clipped",
    ),
    Guard(
        "an interrupted pass is not clipped with the one before",
        "interrupted = self._clipper.capture.unfinished is not None",
        "interrupted = False",
        "clipping/test_clipper.py::test_an_interrupted_pass_is_not_clipped_with_the_one_before",
    ),
    Guard(
        "an update that a wrapper of an optimizer skips",
        "    if attachment.wrapped_handles and not attachment.updated:",
        "    if False:",
        "users/test_optimizer.py::test_a_step_whose_update_is_skipped_is_rejected_at_once",
    ),
    Guard(
        "a step of another optimizer on parameters of a private model",
        "if shared and (this.batches.waits_for_step or all(p.grad is None for p in shared)):",
        "if False:",
        "users/test_messages_of_the_loop.py::test_a_step_of_another_optimizer_is_rejected[after]",
    ),
    Guard(
        "a step of another optimizer without gradients",
        "this.batches.waits_for_step or all(p.grad is None for p in shared)",
        "this.batches.waits_for_step",
        "users/test_messages_of_the_loop.py::test_an_optimizer_that_steps_without_gradients_is_rejected",
    ),
    Guard(
        "parameters that other processes can write",
        'if p.requires_grad and p.device.type == "cpu" and p.is_shared():',
        "if False:",
        "users/test_bad_arguments.py::test_a_model_in_shared_memory_is_rejected_by_name_and_a_copy_trains",
    ),
    Guard(
        "a parameter in an autograd.Function, which no handler sees",
        "wrapped.requires_grad_().register_hook(partial(_escaped, origin))",
        "pass",
        "capture/test_watched_parameter.py::test_a_parameter_in_a_function_next_to_layers_is_rejected_by_name[plain-zero]",
    ),
    Guard(
        "a loss that the model computes is compared by the gradients of parameters",
        "return any(grad.dim() == 0 and bool(grad != 0) for grad in gradients)",
        "return False",
        "validation/test_check_forms.py::test_a_token_mean_inside_the_model_is_rejected_and_the_remedy_passes[dict]",
    ),
    Guard(
        "an attribute with data of a batch that the next one reads",
        "        if not unchanged or not self._reads(forward_pass, attributes, unchanged):",
        "        if True:",
        "independence/test_memory_probe.py::test_attribute_that_carries_data_to_the_next_batch_is_rejected",
    ),
    Guard(
        "an attribute that the loop resets before the next batch",
        "[slot for slot in attributes.slots if _agree(state.value_of(slot), written.value_of(slot), EXACT)]",
        "attributes.slots",
        "independence/test_memory_probe.py::test_reset_state_is_accepted_and_detached_state_is_rejected",
    ),
    Guard(
        "the content of a list inside a dict",
        "                _save_contents(_parts(content), contents)",
        "                pass",
        "independence/test_memory_probe.py::test_attribute_that_carries_data_to_the_next_batch_is_rejected"
        "[list_in_a_dict-auto]",
    ),
    Guard(
        "an attribute that changed in a pass that does not run again",
        """                    self._warn_unknown(f"running a batch again raised {type(error).__name__}: {message}")""",
        "                    pass",
        "independence/test_memory_probe.py::test_changing_attribute_is_reported_if_the_forward_pass_cannot_be_repeated",
        also=(("""            self._warn_unknown("it could not run with other data")""", "            pass"),),
    ),
    Guard(
        "a buffer that the loop writes from data of the batch",
        "            if id(tensor) in dependent or _memory_of(tensor) in written:",
        "            if False:",
        "independence/test_memory_probe.py::test_buffer_written_from_the_batch_is_rejected",
    ),
    Guard(
        "an input of the model that changes with other samples",
        "        if self._inputs_change(baseline, run, reached, kept):",
        "        if False:",
        "independence/test_loop_probe.py::test_a_loop_that_mixes_samples_before_the_model_is_rejected[shifted]",
        also=(
            (
                "        for kind, index, shift in cases[:1] if self._checked_before else cases:",
                "        for kind, index, shift in ():",
            ),
        ),
    ),
    Guard(
        "a gradient that changes with other samples",
        "        change = self.largest_change(baseline.grads, run.grads, kept)",
        "        change = 0.0",
        "independence/test_bounds_and_numbers.py::test_loss_that_raises_for_extreme_outputs_is_checked_with"
        "_observed_outputs",
        also=(
            (
                "        for kind, index, shift in cases[:1] if self._checked_before else cases:",
                "        for kind, index, shift in ():",
            ),
        ),
    ),
    Guard(
        "a bound on a loss of several samples",
        "error is None and shifted and self.largest_change(baseline.grads, shifted.grads, kept) > _MIN_CHANGE:",
        "False:",
        "independence/test_bounds_and_numbers.py::test_inactive_clamp_on_a_loss_over_several_samples_is_rejected",
        also=(
            (
                "        for kind, index, shift in cases[:1] if self._checked_before else cases:",
                "        for kind, index, shift in ():",
            ),
        ),
    ),
    Guard(
        "a branch that the batch does not take",
        "        check.try_other_branches(baseline)\n",
        "",
        "independence/test_bounds_and_numbers.py::test_branch_on_values_outside_the_observed_range_is_reported["
        "large outputs]",
    ),
    Guard(
        "a number that the loop reads and tests",
        "        if (reason := record.undecided_reason or self._changed_constants(record)) is not None:",
        "        if (reason := self._changed_constants(record)) is not None:",
        "independence/test_bounds_and_numbers.py::test_branch_on_values_outside_the_observed_range_is_reported["
        "a number in a test]",
    ),
    Guard(
        "samples that are all right or all wrong",
        "        for kind, index, shift in cases[:1] if self._checked_before else cases:",
        "        for kind, index, shift in cases[:1]:",
        "independence/test_bounds_and_numbers.py::test_inactive_clamp_on_a_loss_over_several_samples_is_rejected["
        "all are right]",
    ),
    Guard(
        "a bound on data of several samples",
        '            cases += [("data", largest, -_SHIFT), ("data", largest, _SHIFT)]',
        "            pass",
        "independence/test_bounds_and_numbers.py::test_inactive_clamp_on_data_of_several_samples_is_rejected["
        "in the loss]",
    ),
    Guard(
        "an error that the loop catches",
        "        return not any(_catches(other, node) for other in nodes)",
        "        return True",
        "independence/test_bounds_and_numbers.py::test_branch_on_values_outside_the_observed_range_is_reported["
        "an error that is caught]",
    ),
    Guard(
        "a weight that depends on the step, with random inputs",
        '        if reduction == "neither" and not record.drew_for_loss:',
        '        if reduction == "neither" and not record.drew_random:',
        "independence/test_bounds_and_numbers.py::test_random_inputs_do_not_hide_a_weight_that_depends_on_the_step",
    ),
    Guard(
        "a constant that changes from batch to batch",
        "record.drew_in_python or record.constant_digests <= before else OTHER_BATCHES",
        "True else OTHER_BATCHES",
        "independence/test_bounds_and_numbers.py::test_tensors_from_other_batches_or_untraced_code_are_reported["
        "running mean]",
    ),
    Guard(
        "a size that follows from values",
        "        branches = name in BRANCHES or (reads_size(function) and id(tensors[0]) in self._data_sized)",
        "        branches = name in BRANCHES",
        "independence/test_bounds_and_numbers.py::test_branch_on_values_outside_the_observed_range_is_reported["
        "a shape]",
    ),
    Guard(
        "a number of the batch that the source carries to the loss",
        "next((text for function, text in self._loss_numbers if function in sources), None)",
        "None",
        "independence/test_bounds_and_numbers.py::test_python_number_that_flows_into_the_loss_is_reported[first loss]",
    ),
    Guard(
        "a number of the batch before the model, in a loop that draws random inputs",
        "        if self.drew_random and self._read_before_model is not None:",
        "        if False:",
        "independence/test_bounds_and_numbers.py::test_a_number_before_the_model_is_reported_if_random_inputs_cannot_be_"
        "compared[noise]",
    ),
    Guard(
        "a seed that the loop reads from the batch",
        "        if drew and self.conversions and (own or not all(map(torch.equal, before, random))):",
        "        if False:",
        "independence/test_bounds_and_numbers.py::test_a_seed_from_the_batch_is_reported",
    ),
    Guard(
        "a branch that check_loop did not see",
        "                if self._capture.model in CHECKED_LOOPS and self.for_check_loop:",
        "                if self._capture.model in CHECKED_LOOPS:",
        "independence/test_bounds_and_numbers.py::test_check_loop_does_not_suppress_warnings_about_branches",
    ),
    Guard(
        "a bound that drops a sample if others have low losses",
        ' if error is not None or "random" in kinds else self._find_mixing_with_copies(baseline, reached)',
        "",
        "independence/test_bounds_and_numbers.py::test_inactive_clamp_on_a_loss_over_several_samples_is_rejected["
        "outliers left out]",
    ),
    Guard(
        "a branch that much larger losses would take",
        "                error = NotRecordedError if self._rerun.is_harmless(call) else BranchError",
        "                error = NotRecordedError",
        "independence/test_bounds_and_numbers.py::test_branch_on_a_loss_value_outside_the_observed_range_is_reported",
    ),
    Guard(
        "weights of samples that depend on their index",
        "        return self.other_data and (\n            self._has_constants(calls)",
        "        return (\n            self._has_constants(calls)",
        "independence/test_mixing_loops.py::test_loop_that_mixes_samples_is_rejected_or_reported"
        "[weights_by_position-zero-out]",
    ),
    Guard(
        "a loop whose calls take too long to run again",
        "        if self._longest > self._left:",
        "        if False:",
        "independence/test_bounds_and_numbers.py::test_loop_above_the_time_limit_is_reported_once_at_its_second"
        "_checked_step",
    ),
    Guard(
        "a count in texts that equals a number of samples, or a sum, by chance",
        '        if reduction not in (None, "neither", declared) and check.other_data and not self._undeclared_seen:',
        "        if False:",
        "independence/test_bounds_and_numbers.py::test_a_count_that_is_equal_in_two_batches_by_chance_is_not_taken_for_a_sum",
    ),
    Guard(
        "a number that was read from the batch",
        '        if reduction == "neither" and record.first_conversion:',
        "        if False:",
        "independence/test_loop_probe.py::test_number_read_from_the_batch_is_rejected_at_the_next_batch_size[item]",
    ),
    Guard(
        "a gradient that changes with the random numbers of other samples",
        "        if self._ambiguous_size not in (None, samples):",
        "        if False:",
        "independence/test_loop_probe.py::test_mean_over_a_random_number_of_entries_is_rejected_at_the_next"
        "_batch_size[rand]",
    ),
    Guard(
        "random numbers that are as many as the samples by chance",
        "if self._ambiguous_size not in (None, samples):",
        "if True:",
        "independence/test_loop_probe.py::test_random_numbers_that_are_as_many_as_the_samples_by_chance_are_accepted_"
        "at_another_size",
    ),
    Guard(
        "a tensor with the graph of an earlier batch",
        "            if unrecorded is not None or any(id(t) in self.earlier_tensors for t in tensors):",
        "            if False:",
        "independence/test_loop_probe.py::test_a_tensor_of_an_earlier_batch_in_the_loop_is_reported[y]",
    ),
    Guard(
        "a sum that was declared a mean, on the first batch",
        "            reduction = check.reduction_of_half(baseline)",
        "            reduction = None",
        "independence/test_loop_probe.py::test_a_loss_is_taken_for_a_sum_on_the_first_batch",
    ),
    Guard(
        "batches of nearly the same size are not compared in half precision",
        "        differ = abs(earlier.samples / self.batch_axis.samples - 1) >= 3 * self.tolerance",
        "        differ = earlier.samples != self.batch_axis.samples",
        "independence/test_loop_probe.py::test_batches_of_nearly_the_same_size_are_not_compared_in_half_precision",
    ),
    Guard(
        "a loop that gives other gradients when it runs again",
        '            return "a rerun gives other gradients, so a part of the loop is not recorded"',
        "            pass",
        "independence/test_loop_probe.py::test_an_undecided_loop_is_accepted_with_one_warning[gradient hook]",
    ),
    Guard(
        "leaving the loop over the loader ends the record",
        "            self._on_end()",
        "            pass",
        "independence/test_loop_probe.py::test_leaving_the_loop_ends_the_trace",
    ),
    Guard(
        "an input of the model that changes with other samples, in check_loop",
        "            if largest_change(self._batch_axis, baseline.inputs, rerun.inputs, tolerance, kept):",
        "            if False:",
        "validation/test_check_loop.py::test_a_loop_that_mixes_samples_before_the_model_is_rejected",
    ),
    Guard(
        "a gradient that changes with other samples, in check_loop",
        "            if change := largest_change(",
        "            if change := 0 * largest_change(",
        "validation/test_check_loop.py::test_a_loss_that_mixes_samples_is_rejected[class weights]",
    ),
    Guard(
        "a loss that follows the number of samples as neither a mean nor a sum",
        '        if reduction == "neither" and not baseline.drew_random:',
        "        if False:",
        "validation/test_check_loop.py::test_a_loss_that_mixes_samples_is_rejected[root of the size]",
    ),
    Guard(
        "no step of a private optimizer inside check_loop",
        '            raise step_inside_check_error("The private optimizer")',
        "            pass",
        "validation/test_check_loop.py::test_a_step_of_the_optimizer_is_rejected[True]",
    ),
    Guard(
        "the hooks of private models do nothing inside check_loop",
        "            for capture in private:\n                stack.enter_context(capture.paused())",
        "            pass",
        "validation/test_check_loop.py::test_check_loop_does_not_affect_a_private_run",
    ),
    Guard(
        "a gradient that changes with the index of a sample in the batch",
        "        permute = not self._depends_on_position() and self.batch_axis.can_permute(self._record.data)",
        "        permute = False",
        "independence/test_mixing_loops.py::test_loop_that_mixes_samples_is_rejected_or_reported[cumulative-zero-out]",
    ),
    Guard(
        "an attribute of the model that the loop sets from the batch",
        "if self._recording and (name := attribute_of_batch(self, self._model)) is not None:",
        "if name := None:",
        "independence/test_unseen_data.py::test_warning_names_untraced_data_that_reach_the_model[sets_an_attribute--]",
    ),
    Guard(
        "an input of the model that does not come from the record",
        "    elif inputs and not record.drew_random and not",
        "    elif False and not",
        "independence/test_unseen_data.py::test_warning_names_untraced_data_that_reach_the_model[maps_columns--]",
    ),
    Guard(
        "a number of the batch in the input of the model",
        "        if self._record.first_conversion and comparable and not self._record.drew_random:",
        "        if False:",
        "independence/test_unseen_data.py::test_batch_statistic_in_the_model_input_is_rejected_at_a_second_batch"
        "_size[divided_by_a_number]",
    ),
    Guard(
        "an output of the model that changes with other samples",
        "            if largest_change(self._batch_axis, batched, rerun.original, tolerance, kept):",
        "            if False:",
        "independence/test_unseen_data.py::test_check_loop_rejects_untraced_dependence_on_the_batch[gives_a_number-None]",
    ),
    Guard(
        "lists with an element for each sample are exchanged with the samples",
        "        if not (is_array or holds_samples(leaf, samples)):",
        "        if True:",
        "independence/test_lists_of_samples.py::test_check_loop_swaps_list_elements[2-boxes]",
    ),
    Guard(
        "a list of as many tensors as samples may hold columns",
        "            if not record.ambiguous:",
        "            if True:",
        "independence/test_lists_of_samples.py::test_ambiguous_list_is_resolved_at_another_batch_size",
    ),
    Guard(
        "a loop that cannot be checked gives a warning for each model",
        '                    key="loss",\n                    of=self._capture.model,',
        '                    key="loss",',
        "independence/test_loop_probe.py::test_a_second_model_gets_its_own_warning",
    ),
    Guard(
        "a number that leaves torch is reported at the second batch size",
        "        undecided = compared or self._undecided_steps == _MAX_UNDECIDED",
        "        undecided = False",
        "independence/test_mixing_loops.py::test_loop_that_mixes_samples_is_rejected_or_reported"
        "[float_of_max-zero-out]",
    ),
    Guard(
        "a loss that changes with the number of samples by a number of Python",
        '        if reduction == "neither" and not record.drew_for_loss:',
        "        if False:",
        "independence/test_mixing_loops.py::test_loop_that_mixes_samples_is_rejected_or_reported"
        "[temperature_of_size-zero-out]",
    ),
    Guard(
        "compiled code is compared with the hooks before it is used",
        "        if not check_equal_results(expected, compiled, half=half):\n            return",
        "        if False:\n            return",
        "compiled/test_eager_instead.py::test_wrongly_compiled_code_is_not_used[sums]",
    ),
    Guard(
        "what a compiled backward pass reads is as the forward pass left it",
        "        if list(map(_version, self._read)) != self._versions:",
        "        if False:",
        "compiled/test_compiled_step.py::test_a_parameter_that_is_changed_before_backward_raises",
    ),
    Guard(
        "two compiled calls are clipped together",
        "        if self._passes.pending:\n            raise called_twice()",
        "        if False:\n            raise called_twice()",
        "compiled/test_compiled_step_checks.py::test_a_model_called_twice_before_backward_is_rejected_or_runs_eagerly",
    ),
    Guard(
        "samples that move to padded positions are found",
        "    return torch.where(moved, -1.0, sq_norms_BK)",
        "    return sq_norms_BK",
        "compiled/test_eager_instead.py::test_samples_that_move_by_values_of_later_batches_are_rejected",
    ),
    Guard(
        "a setting that changes leads to another graph",
        "            and self._same_values()\n",
        "",
        "compiled/test_eager_instead.py::test_after_many_graphs_the_step_is_eager",
    ),
    Guard(
        "a forward pass that changes attributes is not compiled",
        "                if name := changed():",
        "                if name := None:",
        "compiled/test_eager_instead.py::test_a_model_that_cannot_be_compiled_trains_eagerly[counts]",
    ),
]
