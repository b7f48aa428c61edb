"""Moves for rows, (N, F), and sequences, (N, T, F) or (N, C, L): linear layers, attention, embeddings, 1-d layers."""

from tests.fuzz.activations import activation, activation_in_place
from tests.fuzz.draft import Draft, Unfit


def embed(draft: Draft, x: str) -> None:
    """Tokens to features."""
    draft.call(f"nn.Embedding(11, {draft.pick((4, 6, 8))})", x)


def linear(draft: Draft, x: str) -> None:
    """Any linear layer."""
    bias = draft.pick(("", "", ", bias=False"))
    inputs = draft.shape(x)[-1]
    draft.call(f"nn.Linear({inputs}, {draft.pick((1, 3, 4, 8, 8, 12, inputs, inputs))}{bias})", x)


def linear_and_act(draft: Draft, x: str) -> None:
    """A linear layer and what is fused with it."""
    linear(draft, x)
    if draft.chance(0.3):
        row_norm(draft, draft.last)
    draft.pick((activation, activation_in_place, activation_in_place))(draft, draft.last)


def row_norm(draft: Draft, x: str) -> None:
    """A norm over rows or sequences."""
    shape = draft.shape(x)
    if shape[-1] == 1:
        raise Unfit("a LayerNorm of one value is its bias, and its gradients are rounding errors")
    draft.call(draft.pick((f"nn.BatchNorm1d({shape[1]})", f"nn.LayerNorm({shape[-1]})")), x)


def convolution(draft: Draft, x: str) -> None:
    """A convolution over sequences."""
    channels = draft.shape(x)[1]
    out = draft.pick((1, 3, 4, 8, channels))
    kinds = ("1", "3, padding=1", "3, padding=1, bias=False", "3, stride=2", "3, dilation=2, padding=2")
    options = draft.pick((*kinds, f"3, padding=1, groups={channels}"))
    out = channels if "groups" in options else out
    draft.call(f"nn.Conv1d({channels}, {out}, {options})", x)


def pool(draft: Draft, x: str) -> None:
    """A pool over sequences, or their mean."""
    if draft.chance(0.5):
        pools = ("nn.MaxPool1d(2)", "nn.AvgPool1d(2)", "nn.AdaptiveAvgPool1d(1)", "nn.MaxPool1d(3, 1, 1)")
        draft.call(draft.pick(pools), x)
    else:
        draft.write(("{x}.mean(1)", "{x}.mean(-1)", "F.max_pool1d({x}, 2)", "{x}.amax(1)", "{x}[:, -1]"), x=x)


def attention(draft: Draft, x: str) -> None:
    """softmax(q @ k.T) @ v, written in one of many ways."""
    batch, steps, width = draft.shape(x)
    heads = draft.pick([h for h in (1, 2, 4) if width % h == 0])
    q, k, v = _projections(draft, x, width)
    if draft.chance(0.5):
        split = f"view({batch}, {steps}, {heads}, {width // heads}).transpose(1, 2)"
        q, k, v = (draft.let(f"{y}.{split}") for y in (q, k, v))
    products = ("{q} @ {k}.transpose(-2, -1)", "torch.matmul({q}, {k}.transpose(-2, -1))", "{q}.matmul({k}.mT)")
    scores = draft.write(products, q=q, k=k)
    scores = _scaled(draft, scores)
    if draft.chance(0.6):
        scores = _masked(draft, scores, steps)
    softmax = draft.module("nn.Softmax(dim=-1)")
    forms = ("F.softmax({s}, dim=-1)", "{s}.softmax(-1)", "torch.softmax({s}, -1)", f"{softmax}({{s}})")
    weights = draft.write(forms, s=scores)
    if draft.chance(0.2):
        kinds = ("nn.Dropout(0.0)", "nn.Dropout(0.2)", "nn.Dropout(0.2, inplace=True)")
        weights = draft.call(draft.pick(kinds), weights)
    y = draft.write(("{w} @ {v}", "torch.matmul({w}, {v})"), w=weights, v=v)
    if len(draft.shape(y)) == 4:
        shape = f"({batch}, {steps}, {width})"
        merged = (f"reshape{shape}", "flatten(2)", f"contiguous().view{shape}")
        y = draft.let(f"{y}.transpose(1, 2).{draft.pick(merged)}")
    if draft.chance(0.7):
        draft.call(f"nn.Linear({width}, {width})", y)


def _projections(draft: Draft, x: str, width: int) -> list[str]:
    if draft.chance(0.4):
        qkv = draft.call(f"nn.Linear({width}, {3 * width})", x)
        return draft.several(f"{qkv}.chunk(3, -1)", 3)
    if draft.chance(0.2):
        return [x, x, x]
    return [draft.call(f"nn.Linear({width}, {width})", x) for _ in range(3)]


def _scaled(draft: Draft, scores: str) -> str:
    if draft.chance(0.3):
        draft.do(draft.pick((f"{scores} *= 0.5", f"{scores}.mul_(0.5)", f"{scores}.div_(2.0)")))
        return scores
    if draft.chance(0.7):
        return draft.write(("{s} * 0.5", "{s} / 2.0", "0.5 * {s}"), s=scores)
    return scores


def _masked(draft: Draft, scores: str, steps: int) -> str:
    mask = draft.module(f"nn.Buffer(torch.ones({steps}, {steps}).triu(1).bool())")
    value = draft.pick(("-1e4", "-1e3", "float('-inf')", "-10.0"))
    if draft.chance(0.3):
        draft.do(f"{scores}.masked_fill_({mask}, {value})")
        return scores
    forms = (
        f"{scores}.masked_fill({mask}, {value})",
        f"{scores}.masked_fill_({mask}, {value})",
        f"{scores} + {mask} * -20.0",
        f"torch.where({mask}, -20.0, {scores})",
    )
    return draft.let(draft.pick(forms))


def ready_attention(draft: Draft, x: str) -> None:
    """torch's own attention."""
    width = draft.shape(x)[-1]
    if draft.chance(0.5):
        draft.let(f"F.scaled_dot_product_attention({x}, {x}, {x})")
        return
    if width % 2:
        raise Unfit("odd")
    layer = draft.module(f"nn.MultiheadAttention({width}, 2, batch_first=True)")
    draft.let(f"{layer}({x}, {x}, {x})[0]")


def feed_forward(draft: Draft, x: str) -> None:
    """The feed-forward half of a transformer block."""
    width = draft.shape(x)[-1]
    y = draft.call(f"nn.LayerNorm({width})", x) if draft.chance(0.6) else x
    y = draft.call(f"nn.Linear({width}, {2 * width})", y)
    forms = ("F.gelu({y})", "F.relu({y}, inplace=True)", "F.silu({y}, inplace=True)", "F.gelu({y}, approximate='tanh')")
    y = draft.write(forms, y=y)
    y = draft.call(f"nn.Linear({2 * width}, {width})", y)
    draft.let(f"{x} + {y}")


ROW_MOVES = ((linear, 4), (linear_and_act, 5), (row_norm, 2))
SEQUENCE_MOVES = (
    (linear, 3), (linear_and_act, 3), (row_norm, 2), (convolution, 3), (pool, 1), (attention, 4), (ready_attention, 1),
    (feed_forward, 2),
)  # fmt: skip
