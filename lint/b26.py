from qat.functional import round_ste

x = torch.tensor([0.3, 1.7, -2.2], requires_grad=True)
round_ste(x).sum().backward()
print(round_ste(x).tolist(), x.grad.tolist())
