def total(scale, x):
    return soft_edge_quantize(x, scale, -8, 7).sum()


samples = torch.tensor([[0.1, 9.0], [0.2, 0.3]])
each = torch.func.vmap(torch.func.grad(total), in_dims=(None, 0))(torch.tensor(1.0), samples)
for sample, gradient in zip(samples, each, strict=True):
    scale = torch.tensor(1.0, requires_grad=True)
    total(scale, sample).backward()
    assert torch.allclose(scale.grad, gradient)
