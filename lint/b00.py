import torch

x = torch.tensor([0.3, 1.7, -2.2], requires_grad=True)
torch.round(x).sum().backward()
print(x.grad)
