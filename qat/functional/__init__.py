"""Straight-through estimators: tensors in, tensors out.

Each is a `torch.autograd.Function` whose `backward` stands next to the formula that it implements, with a plain
function as its face. What is the same for all of them, unless a docstring says otherwise:

- The first argument (x, weight, scale or bits) has any shape and a floating-point dtype; another is a TypeError.
- The result is a tensor of its shape and dtype. NaN stays NaN, and a rounding leaves infinities as they are.
- `channel_axis` is the axis, or the tuple of axes, for every index of which there is a statistic of its own; None
  takes one of the whole tensor.
- `bits` is a whole number from 1 to 16, `qmin` and `qmax` are the lowest and the highest integer of a grid. `scale` is
  its step, > 0, in the unit of x, of shape () or broadcastable to x (one for each channel).
- A ValueError is raised where these do not exist: an axis, a bit-width, an empty grid (qmin >= qmax), or the name of a
  gradient, rounding or format; for a number outside the range that is said of it; and for one that does not broadcast
  to x.
- Values are computed in float32 at least: bfloat16 has not enough digits to tell the levels of 8 bits apart.
"""

from qat.functional.clamping import clamp_ste
from qat.functional.codebooks.apot import apot_levels, apot_quantize, normalize_weight
from qat.functional.codebooks.binary import binary_quantize
from qat.functional.codebooks.floats import FLOAT_FORMATS, float_quantize, mx_quantize
from qat.functional.codebooks.n2uq import n2uq_quantize
from qat.functional.codebooks.ternary import ternary_quantize, ttq_quantize
from qat.functional.dorefa import dorefa_quantize_activation, dorefa_quantize_weight
from qat.functional.ewgs import ewgs_gradient, ewgs_round
from qat.functional.learned_bits import bit_cost, learned_bits_quantize
from qat.functional.lsq import fake_quantize, lsq_plus_quantize, lsq_quantize
from qat.functional.pact import pact_quantize
from qat.functional.power_of_two import power_of_two_scale
from qat.functional.rounding import ceil_ste, floor_ste, round_ste, stochastic_round_ste, trunc_ste
from qat.functional.sign import error_decay_sign, sign_ste, ternary_sign_ste
from qat.functional.soft import dsq_round, soft_round
from qat.functional.tensors import apply, positive_scale, scale_gradient

__all__ = [
    "FLOAT_FORMATS",
    "apot_levels",
    "apot_quantize",
    "apply",
    "binary_quantize",
    "bit_cost",
    "ceil_ste",
    "clamp_ste",
    "dorefa_quantize_activation",
    "dorefa_quantize_weight",
    "dsq_round",
    "error_decay_sign",
    "ewgs_gradient",
    "ewgs_round",
    "fake_quantize",
    "float_quantize",
    "floor_ste",
    "learned_bits_quantize",
    "lsq_plus_quantize",
    "lsq_quantize",
    "mx_quantize",
    "n2uq_quantize",
    "normalize_weight",
    "pact_quantize",
    "positive_scale",
    "power_of_two_scale",
    "round_ste",
    "scale_gradient",
    "sign_ste",
    "soft_round",
    "stochastic_round_ste",
    "ternary_quantize",
    "ternary_sign_ste",
    "trunc_ste",
    "ttq_quantize",
]
