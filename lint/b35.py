def value_and_gradient(function):
    x = torch.tensor([0.3, 9.0], requires_grad=True)
    y = function(x, torch.tensor(1.0), -8, 7)
    y.sum().backward()
    return y.tolist(), x.grad.tolist()


compiled = torch.compile(soft_edge_quantize, fullgraph=True, backend="aot_eager")
assert value_and_gradient(compiled) == value_and_gradient(soft_edge_quantize)
