from torch.autograd import gradcheck, gradgradcheck

torch.manual_seed(0)
x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
slope = torch.tensor([0.25, 0.1, -0.5], dtype=torch.float64, requires_grad=True)
assert gradcheck(ChannelSlopeFunction.apply, (x, slope))
assert gradgradcheck(ChannelSlopeFunction.apply, (x, slope))

u = torch.tensor([-0.7, 0.2, 1.5], dtype=torch.float64, requires_grad=True)
assert gradcheck(LegendreP3.apply, (u,)) and gradgradcheck(LegendreP3.apply, (u,))
assert gradcheck(cube, (u,)) and gradgradcheck(cube, (u,))
