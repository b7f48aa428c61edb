# my_rules.py
class SoftEdgeFunction(torch.autograd.Function):
    """Round onto an integer grid; what is clipped keeps some gradient, the less the farther out it lies.

    Forward, with v = x / scale:    y = scale * clamp(round(v), low, high)
    Backward, with slope = 1 / (1 + softness * d)^2, where v lies d steps outside of low .. high:
        dy/dx     = slope
        dy/dscale = factor * (clamp(round(v), low, high) - v * slope)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, scale, low, high, softness, factor):
        return torch.clamp(torch.round(x / scale), low, high) * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, scale, ctx.low, ctx.high, ctx.softness, ctx.factor = inputs
        ctx.save_for_backward(x, scale)

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        v = torch.clamp(x / scale, -1e6, 1e6)  # an infinite v would meet a slope of 0, and inf * 0 is NaN
        outside = (v - torch.clamp(v, ctx.low, ctx.high)).abs()
        slope = 1 / (1 + ctx.softness * outside) ** 2
        grad_x = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_x = grad * slope
        if ctx.needs_input_grad[1]:
            curve = soft_edge(v, ctx.low, ctx.high, ctx.softness)
            level = curve + (torch.clamp(torch.round(v), ctx.low, ctx.high) - curve).detach()
            grad_scale = ctx.factor * sum_to_shape(grad * (level - v * slope), scale.shape)
        return grad_x, grad_scale, None, None, None, None


def soft_edge_quantize(x, scale, low, high, softness=1.0, factor=1.0):
    """x on the grid scale * {low .. high}, computed in float32 at least.

    scale > 0, of shape () or broadcastable to x; softness > 0; factor multiplies the gradient of scale.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return apply(SoftEdgeFunction, x.to(wide), scale.to(wide), low, high, softness, factor).to(x.dtype)
