class GlobalMaxPool(torch.autograd.Function):
    """x (batch, channels, height, width) -> values and flat positions, both (batch, channels)."""

    @staticmethod
    def forward(x):
        values, positions = x.flatten(2).max(2)
        return values, positions

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, positions = output
        ctx.mark_non_differentiable(positions)
        ctx.save_for_backward(positions)
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx, grad, _):  # an argument for positions all the same: always zeros
        (positions,) = ctx.saved_tensors
        everywhere = grad.new_zeros(ctx.shape).flatten(2)
        return everywhere.scatter(2, positions.unsqueeze(2), grad.unsqueeze(2)).reshape(ctx.shape)


image = torch.tensor([[[[1.0, 7.0], [3.0, 2.0]], [[9.0, 0.0], [5.0, 6.0]]]], requires_grad=True)
values, positions = GlobalMaxPool.apply(image)
(values * torch.tensor([[10.0, 20.0]])).sum().backward()
print(values.tolist(), positions.tolist(), positions.requires_grad)
print(image.grad)
