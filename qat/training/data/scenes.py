"""Scenes of the bundled digits on canvases, with a class for each pixel, and a box for each digit."""

import torch
import torch.nn.functional as F
from torch import Tensor

SIDES = (28 / 96, 48 / 96)  # of a digit, as shares of the canvas: the smallest, and the largest
MOST_DIGITS = 4
TRIES = 20  # for a place that covers no digit
INK = 90  # of 255, from which a pixel is the digit's


def draw_scenes(
    digits: Tensor, labels: Tensor, count: int, side: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one to four digits, uint8 (N, 8, 8), on each of `count` canvases.

    Ink has a colour of its own and lies on a slanted, noisy background; no digit covers another.

    Returns:
        The canvases, uint8 (N, 3, side, side), and their masks, uint8 (N, side, side): 0 for the background, 1 + digit
        for ink; and boxes of the ink, float32 (N, 4, 6): 1 + digit, x1, y1, x2, y2, 0, and rows of -1.
    """

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    least, most = (max(8, round(share * side)) for share in SIDES)
    images = torch.empty(count, 3, side, side, dtype=torch.uint8)
    masks = torch.zeros(count, side, side, dtype=torch.uint8)
    boxes = torch.full((count, MOST_DIGITS, 6), -1.0)
    slope = torch.linspace(-1, 1, side)
    for image, mask, rows_of in zip(images, masks, boxes, strict=True):
        tilt, base = torch.rand(2, generator=generator) * 60 - 30, 40 + 60 * torch.rand(3, 1, 1, generator=generator)
        slanted = base + tilt[0] * slope[:, None] + tilt[1] * slope[None]
        canvas = slanted + 8 * torch.randn(3, side, side, generator=generator)
        taken = torch.zeros(side, side, dtype=torch.bool)
        for row in rows_of[: number(1, MOST_DIGITS)]:
            chosen, size = number(0, len(digits) - 1), number(least, min(most, side))
            for _ in range(TRIES):
                top, left = number(0, side - size), number(0, side - size)
                if not taken[top : top + size, left : left + size].any():
                    break
            else:
                continue
            rows, columns = slice(top, top + size), slice(left, left + size)
            taken[rows, columns] = True
            ink = F.interpolate(digits[chosen][None, None].float(), (size, size), mode="bilinear")[0, 0]
            canvas[:, rows, columns].lerp_(150 + 105 * torch.rand(3, 1, 1, generator=generator), ink / 255)
            mask[rows, columns][ink >= INK] = label = 1 + int(labels[chosen])
            y, x = (ink >= INK).nonzero().unbind(1)
            ends = [left + int(x.min()), top + int(y.min()), left + int(x.max()) + 1, top + int(y.max()) + 1]
            row.copy_(torch.tensor([label, *ends, 0]))
        image.copy_(canvas.round().clamp(0, 255))
    return images, masks, boxes
