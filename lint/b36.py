# my_rules.py
@dataclass(frozen=True)
class SoftEdgeOptions:
    softness: float = 1.0

    def __post_init__(self):
        if not self.softness > 0:
            raise ValueError(f"softness must be above 0, got {self.softness}")


@qat.register_quantizer("soft_edge")
class SoftEdge(qat.Quantizer):
    """A symmetric uniform grid with a learned scale and soft edges."""

    options_type = SoftEdgeOptions

    def check_spec(self):
        super().check_spec()
        if not self.spec.symmetric:
            raise ValueError("soft_edge has no zero point and needs symmetric=True")

    def quantize(self, x):
        scale, _ = self.grid()
        low, high = self.bounds()
        return soft_edge_quantize(x, scale, low, high, self.options.softness, self.gradient_factor(x))


def small_net(num_classes):
    """A small convolutional network for 16 x 16 images with 3 channels."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, num_classes),
    )
