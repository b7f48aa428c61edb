from my_rules import SoftEdgeFunction


class Forgetful(SoftEdgeFunction):
    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        grad_x = SoftEdgeFunction.backward(ctx, grad)[0]
        level = torch.clamp(torch.round(x / scale), ctx.low, ctx.high)
        return grad_x, (grad * level).sum_to_size(scale.shape), None, None, None, None  # no "- v * slope"


def forgetful(x, scale):
    return Forgetful.apply(x, scale, -8, 7, 0.5, 1.0)


try:
    ste_gradcheck(forgetful, pretended, (points, scale), checks=["gradient"])
except GradcheckError as error:
    print(error)
