from torch import nn


class Tripled(nn.Module):
    def forward(self, x):
        return MulConstant.apply(x, 3.0)

    def backward(self, grad):
        raise AssertionError("never called")


x = torch.tensor([1.0], requires_grad=True)
Tripled()(x).backward()
assert x.grad.item() == 3.0
