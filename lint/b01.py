class Square(torch.autograd.Function):
    @staticmethod
    def forward(x):  # compute
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):  # keep what backward will need
        (x,) = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad):  # dL/dy in, dL/dx out
        (x,) = ctx.saved_tensors
        return grad * 2 * x


x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
y = Square.apply(x)
loss = (10 * y).sum()
loss.backward()
print(y)
print(x.grad)
