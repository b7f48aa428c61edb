class WrongP3(LegendreP3):
    @staticmethod
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        return grad * (15 * u**2 - 3)  # forgot the half


try:
    gradcheck(WrongP3.apply, (torch.tensor([2.0], dtype=torch.float64, requires_grad=True),))
except RuntimeError as error:
    print(str(error).strip())
