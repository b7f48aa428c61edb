class ForgetfulExp(Exp):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.y = output

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.y


for function in (Exp, ForgetfulExp):
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    y = function.apply(x)
    with torch.no_grad():
        y.zero_()
    try:
        y.sum().backward()
        print(function.__name__, x.grad)
    except RuntimeError as error:
        print(function.__name__, str(error).split(":")[0])
