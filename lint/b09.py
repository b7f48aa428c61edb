class CubeFunction(torch.autograd.Function):
    """y = x^3; slope = 3 x^2."""

    @staticmethod
    def forward(x):
        return x**3, 3 * x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        _, slope = output
        ctx.save_for_backward(x, slope)

    @staticmethod
    def backward(ctx, grad, grad_slope):
        x, slope = ctx.saved_tensors
        return grad * slope + grad_slope * 6 * x  # dy/dx = slope, dslope/dx = 6 x


def cube(x):
    """x ** 3; the slope stays inside."""
    y, _ = CubeFunction.apply(x)
    return y


print(second_derivative(lambda x: x * cube(x), x))
