class TooFew(MulConstant):
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor


class TooMuch(MulConstant):
    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, grad


for wrong in (TooFew, TooMuch):
    try:
        wrong.apply(x, 2.0).sum().backward()
    except RuntimeError as error:
        print(error)
