"""Scenes of the bundled digits on canvases, with a class for each pixel and boxes."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SIDES = (28, 48)  # of a digit on a canvas of 96 pixels: the smallest, and the largest
CANVAS = 96
MOST_DIGITS = 4
TRIES = 20  # for a place that covers no digit
INK = 90  # of 255, from which a pixel is the digit's


@dataclass(frozen=True)
class Scenes:
    """Canvases uint8 (N, 3, side, side), and what is on them."""

    images: Tensor
    masks: Tensor  # uint8 (N, side, side): 0 for the background, 1 + digit for ink
    boxes: list[Tensor]  # float32 (digits, 4) for each canvas: left, top, right, bottom of the ink
    labels: list[Tensor]  # int64 (digits,): 1 + digit


def draw_scenes(digits: Tensor, labels: Tensor, count: int, side: int, generator: torch.Generator) -> Scenes:
    """Draw one to four digits, uint8 (N, 8, 8), on each of `count` canvases.

    Ink has a colour of its own and lies on a slanted, noisy background; no digit covers another.
    """

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    scale = side / CANVAS
    least, most = (max(8, round(each * scale)) for each in SIDES)
    images = torch.empty(count, 3, side, side, dtype=torch.uint8)
    masks = torch.zeros(count, side, side, dtype=torch.uint8)
    boxes, kinds = list[Tensor](), list[Tensor]()
    slope = torch.linspace(-1, 1, side)
    for image, mask in zip(images, masks, strict=True):
        tilt, base = torch.rand(2, generator=generator) * 60 - 30, 40 + 60 * torch.rand(3, 1, 1, generator=generator)
        canvas = (
            base
            + tilt[0] * slope[:, None]
            + tilt[1] * slope[None]
            + 8 * torch.randn(3, side, side, generator=generator)
        )
        taken, found = torch.zeros(side, side, dtype=torch.bool), list[tuple[list[int], int]]()
        for _ in range(number(1, MOST_DIGITS)):
            chosen, size = number(0, len(digits) - 1), number(least, min(most, side))
            for _ in range(TRIES):
                top, left = number(0, side - size), number(0, side - size)
                if not taken[top : top + size, left : left + size].any():
                    break
            else:
                continue
            place, part = (
                (slice(top, top + size), slice(left, left + size)),
                canvas[:, top : top + size, left : left + size],
            )
            taken[place] = True
            ink = F.interpolate(digits[chosen][None, None].float(), (size, size), mode="bilinear")[0, 0]
            part.lerp_(150 + 105 * torch.rand(3, 1, 1, generator=generator), ink / 255)
            inked = ink >= INK
            mask[place][inked] = 1 + int(labels[chosen])
            (upper, *_, lower), (first, *_, last) = (
                inked.any(1).nonzero()[:, 0].tolist(),
                inked.any(0).nonzero()[:, 0].tolist(),
            )
            box = [left + first, top + upper, left + last + 1, top + lower + 1]
            found.append((box, 1 + int(labels[chosen])))
        image.copy_(canvas.round().clamp(0, 255))
        boxes.append(torch.tensor([box for box, _ in found], dtype=torch.float32).reshape(-1, 4))
        kinds.append(torch.tensor([kind for _, kind in found], dtype=torch.int64))
    return Scenes(images, masks, boxes, kinds)
