class ChannelSlopeFunction(torch.autograd.Function):
    """y = x where x > 0, else slope * x; x (batch, channels, ...), slope (channels,).

    Backward: dy/dx = 1 where x > 0, else slope;  dy/dslope = 0 where x > 0, else x
    """

    @staticmethod
    def forward(x, slope):
        return torch.where(x > 0, x, x * along_channels(slope, x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, slope = ctx.saved_tensors
        grad_x = grad_slope = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.where(x > 0, grad, grad * along_channels(slope, x))
        if ctx.needs_input_grad[1]:
            others = [axis for axis in range(x.dim()) if axis != 1]
            grad_slope = torch.where(x > 0, 0, grad * x).sum(others)
        return grad_x, grad_slope


def along_channels(values, x):
    """View (channels,) so that it broadcasts over x (batch, channels, ...)."""
    return values.view(-1, *[1] * (x.dim() - 2))
