class LegendreP3(torch.autograd.Function):
    @staticmethod
    def forward(u):
        return (5 * u**3 - 3 * u) / 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        return grad * (15 * u**2 - 3) / 2


x = torch.linspace(-torch.pi, torch.pi, 500)
a, b, c, d = (torch.tensor(start, requires_grad=True) for start in (0.0, -1.0, 0.0, 0.3))
optimizer = torch.optim.SGD([a, b, c, d], lr=0.01)
losses = []
for step in range(2000):
    loss = ((a + b * LegendreP3.apply(c + d * x) - torch.sin(x)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

print(f"loss {losses[0]:.2f} -> {losses[-1]:.4f}")
print(f"sin(x) = {b.item():.2f} * P3({d.item():.3f} x), nearly")
assert losses[-1] < 0.005 and abs(a.item()) < 1e-3 and abs(c.item()) < 1e-3
