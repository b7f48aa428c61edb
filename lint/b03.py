class MulConstant(torch.autograd.Function):
    @staticmethod
    def forward(x, factor=3.0):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.factor = inputs  # a float: an attribute, not save_for_backward

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None  # one answer for each input of forward


x = torch.tensor([1.0, 2.0], requires_grad=True)
MulConstant.apply(x).sum().backward()  # the default: 3
MulConstant.apply(x, 0.5).sum().backward()  # gradients add up
print(x.grad)
