"""How a model is recorded as a graph: the tracer, example inputs, train and eval branches, side effects, constants."""
