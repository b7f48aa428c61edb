slope = nn.Parameter(torch.tensor(0.25))


class ReadsFromOutside(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * slope

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * slope


ReadsFromOutside.apply(x).sum().backward()
assert slope.grad is None
