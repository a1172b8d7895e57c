"""The tensors that the derivative of an operator keeps."""

from __future__ import annotations

from nnscaler.ir.gradients_and_kept_values import kept_slots

LINEAR = ((0, 2), (1, 2))  # of x, weight, bias: with either factor fixed


def test_each_factor_of_a_product_is_kept_for_the_other_s_gradient() -> None:
    assert kept_slots("aten.linear.default", LINEAR, [True, True, True]) == (0, 1)
    # a frozen weight: the input is not read, and the weight is
    assert kept_slots("aten.linear.default", LINEAR, [True, False, False]) == (1,)
    assert kept_slots("aten.linear.default", LINEAR, [False, True, False]) == (0,)


def test_what_is_not_linear_keeps_its_input_and_an_addition_nothing() -> None:
    assert kept_slots("aten.gelu.default", (), [True]) == (0,)
    assert kept_slots("aten.add.Tensor", (), [True, True]) == ()
    assert kept_slots("aten.transpose.int", ((0,),), [True]) == ()
