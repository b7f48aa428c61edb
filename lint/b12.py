class LeanCube(CubeFunction):
    terms = []

    @staticmethod
    def setup_context(ctx, inputs, output):
        CubeFunction.setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, grad_slope):
        x, slope = ctx.saved_tensors
        grad_x = None
        if grad is not None:
            LeanCube.terms.append("slope")
            grad_x = grad * slope
        if grad_slope is not None:
            LeanCube.terms.append("6 x")
            more = grad_slope * 6 * x
            grad_x = more if grad_x is None else grad_x + more
        return grad_x


x = torch.tensor([2.0], requires_grad=True)
LeanCube.apply(x)[0].sum().backward()
print(LeanCube.terms)
LeanCube.terms.clear()
print(second_derivative(lambda x: x * LeanCube.apply(x)[0], x), LeanCube.terms)
