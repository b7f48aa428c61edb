class LinearFunction(torch.autograd.Function):
    """y = x @ weight.T + bias, with x (batch, in), weight (out, in) and bias (out,) or None."""

    @staticmethod
    def forward(x, weight, bias):
        y = x @ weight.T
        return y if bias is None else y + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, grad):  # grad: (batch, out)
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight  # (batch, in)
        if ctx.needs_input_grad[1]:
            grad_weight = grad.T @ x  # (out, in)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)  # (out,)
        return grad_x, grad_weight, grad_bias


torch.manual_seed(0)
x = torch.randn(5, 3)  # data: no gradient wanted
weight = torch.randn(2, 3, requires_grad=True)
bias = torch.randn(2, requires_grad=True)
target = torch.randn(5, 2)

ours = torch.autograd.grad(((LinearFunction.apply(x, weight, bias) - target) ** 2).sum(), (weight, bias))
theirs = torch.autograd.grad(((torch.nn.functional.linear(x, weight, bias) - target) ** 2).sum(), (weight, bias))
assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
assert LinearFunction.apply(x, weight, None).shape == (5, 2)
