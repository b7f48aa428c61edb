"""Functions of torch called with every subset of their optional arguments, by position and by name."""

from tests.fuzz.draft import Draft, Unfit

POOL = {"stride": "1 2 None (2,1)", "padding": "0 1"}
PIXELS: dict[str, dict[str, str]] = {
    "F.max_pool2d": {"kernel_size": "2 3 (2,1)", **POOL, "dilation": "1 2", "ceil_mode": "True False",
                     "return_indices": "False"},
    "F.avg_pool2d": {"kernel_size": "2 3 (2,1)", **POOL, "ceil_mode": "True False", "count_include_pad": "True False",
                     "divisor_override": "None 3"},
    "F.lp_pool2d": {"norm_type": "2.0", "kernel_size": "2 3", "stride": "1 2 None", "ceil_mode": "True False"},
    "F.interpolate": {"size": "None (6,9)", "scale_factor": "None 2.0", "mode": "'nearest' 'bilinear'"},
    "F.pixel_unshuffle": {"downscale_factor": "2"},
    "F.unfold": {"kernel_size": "2", "dilation": "1 2", "padding": "0 1", "stride": "1 2"},
    "F.local_response_norm": {"size": "3", "alpha": "1e-4 1e-2", "beta": "0.75 0.5", "k": "1.0 2.0"},
    "F.instance_norm": {"running_mean": "None", "running_var": "None", "weight": "None", "bias": "None",
                        "use_input_stats": "True", "momentum": "0.1", "eps": "1e-5 1e-3"},
}  # fmt: skip
ROWS: dict[str, dict[str, str]] = {
    "F.max_pool1d": {"kernel_size": "2 3", "stride": "1 2 None", "padding": "0 1", "dilation": "1 2",
                     "ceil_mode": "True False", "return_indices": "False"},
    "F.avg_pool1d": {"kernel_size": "2 3", "stride": "1 2 None", "padding": "0 1", "ceil_mode": "True False",
                     "count_include_pad": "True False"},
}  # fmt: skip
ANY: dict[str, dict[str, str]] = {
    "F.pad": {"pad": "(1,1) (0,2) (1,0)", "mode": "'constant'", "value": "None 0.0 0.5"},
    "F.normalize": {"p": "2.0 1.0", "dim": "1 -1", "eps": "1e-6 1e-3"}, "F.softmax": {"dim": "-1 1"},
    "F.leaky_relu": {"negative_slope": "0.1 0.3", "inplace": "False"}, "F.gelu": {"approximate": "'none' 'tanh'"},
    "F.elu": {"alpha": "1.0 0.5", "inplace": "False"}, "F.softplus": {"beta": "1 2", "threshold": "20 5"},
    "F.hardtanh": {"min_val": "-1.0 0.0", "max_val": "1.0 6.0", "inplace": "False"},
    "torch.clamp": {"min": "None -0.5 0", "max": "0.5 1 None"}, "torch.sum": {"dim": "-1 1", "keepdim": "True"},
    "torch.mean": {"dim": "-1 1 (1,-1)", "keepdim": "True"}, "torch.amax": {"dim": "-1 1", "keepdim": "True"},
    "torch.narrow": {"dim": "-1 1", "start": "0", "length": "1 2"}, "torch.roll": {"shifts": "1 2", "dims": "-1 1"},
    "torch.diff": {"n": "1", "dim": "-1 1"}, "torch.flip": {"dims": "(1,) (-1,)"}, "torch.cumsum": {"dim": "-1 1"},
    "torch.nan_to_num": {"nan": "0.0 None", "posinf": "None 4.0", "neginf": "None -4.0"},
}  # fmt: skip


def function(draft: Draft, x: str) -> None:
    """Call one of them; a call that torch refuses does not fit."""
    table = {4: PIXELS, 3: ROWS}.get(draft.values[x].dim(), {})
    name = draft.pick([*(table if draft.chance(0.6) and table else ANY)])
    options = {**ANY, **table}[name]
    by_position = draft.pick(range(len(options) + 1))
    given = []
    for place, (option, values) in enumerate(options.items()):
        value = draft.pick(values.split())
        if place < by_position:
            given.append(value)
        elif draft.chance(0.5):
            given.append(f"{option}={value}")
    if not given:
        raise Unfit("no option")
    draft.let(f"{name}({', '.join([x, *given])})")
