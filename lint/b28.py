# my_rules.py
from dataclasses import dataclass

import torch
from torch import nn

import qat
from qat.functional.forward_mode import apply
from qat.functional.tensors import sum_to_shape


def soft_edge(v, low, high, softness):
    """The curve that we pretend: the identity inside, flattening out beyond low and high."""
    inside = torch.clamp(v, low, high)
    outside = v - inside
    return inside + outside / (1 + softness * outside.abs())
