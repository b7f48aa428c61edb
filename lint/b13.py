class DoubleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class UnmarkedDouble(DoubleInPlace):
    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


for function in (DoubleInPlace, UnmarkedDouble):
    x = torch.tensor([1.0, 5.0], requires_grad=True)
    y = x + 0  # a leaf that requires a gradient must not be overwritten, so take the next tensor
    function.apply(y)
    y.sum().backward()
    print(function.__name__, y.tolist(), x.grad.tolist())
