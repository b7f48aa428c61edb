"""Straight-through estimators: tensors in, tensors out.

Each is a `torch.autograd.Function` whose `backward` stands next to the formula that it implements, with a plain
function as its face.
"""

from qat.functional.affine import fake_quantize, lsq_plus_quantize
from qat.functional.lsq import lsq_quantize
from qat.functional.rounding import round_ste
from qat.functional.scales import positive_scale

__all__ = ["fake_quantize", "lsq_plus_quantize", "lsq_quantize", "positive_scale", "round_ste"]
