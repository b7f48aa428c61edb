"""The default run takes a share of the long tables of cases; .ci/nightly runs all of them."""

import pytest

EVERY = {
    "cli/test_verbs.py::test_the_commands_of_the_page_run": 2,
    "cli/test_verbs.py::test_the_verbs_open_a_run_with_a_rule_of_ones_own": 3,
    "codes/test_evaluating.py::test_the_values_are_those_of_plain_evaluation": 3,
    "codes/test_fused.py::test_a_step_is_that_of_the_plain_operations": 2,
    "export/formats/test_converted.py::test_one_sample_without_a_batch": 3,
    "export/formats/test_converted.py::test_the_integers_are_those_of_evaluation": 3,
    "export/litert/test_litert.py::test_inputs_stand_in_the_order_of_forward_and_have_its_names": 3,
    "export/litert/test_litert.py::test_operators_and_integers": 3,
    "export/litert/test_operators.py::test_every_integer_is_that_of_the_model": 3,
    "export/litert/test_operators.py::test_few_bits": 3,
    "export/litert/test_operators.py::test_few_bits_are_bounded": 3,
    "export/litert/test_operators.py::test_operators_and_integers": 3,
    "export/test_agreement.py::test_answers_half_as_large_are_not_the_models": 3,
    "export/test_exact_products.py::test_the_file_runs_the_same_operators_in_either_mode": 2,
    "export/test_exact_products.py::test_which_models_may_saturate": 3,
    "export/test_rewrites.py::test_a_layer_in_float_stays_float": 3,
    "export/test_rewrites.py::test_the_integers_are_clipped": 3,
    "fuzz/test_cases.py::test_all_ways_agree": 4,
    "graph/test_traced_attention.py::test_masks_are_no_tensors_to_quantize_on_any_target": 2,
    "graph/test_traced_attention.py::test_multi_head_attention_computes_as_torchs": 2,
    "house/test_page_claims.py::test_convolutions_in_float": 3,
    "layers/test_twins.py::test_compile_takes_the_whole_graph": 2,
    "preparation/test_functional_weights.py::test_a_norm_directly_behind_a_layer_is_handed_to_it": 2,
    "preparation/test_preparation_state.py::test_copies_pickles_and_strict_loading_change_nothing": 3,
    "quantizer/test_rule_models.py::test_compiled_training_equals_eager_training": 4,
    "quantizer/test_rule_models.py::test_models_train_evaluate_and_load": 3,
    "quantizer/test_rule_models.py::test_the_exported_model_has_the_same_integers": 2,
    "quantizer/test_rule_models.py::test_two_ranks_stay_equal": 4,
    "quantizer/test_rule_options.py::test_no_rule_is_warned_of_for_what_its_bits_cannot_hold": 4,
}
"""Of these tests every n-th case runs by default: what they cost is seconds each, and the others differ in a number."""


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the other cases slow."""
    seen = dict.fromkeys(EVERY, 0)
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name in seen:
            if seen[name] % EVERY[name]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1
