from torch_overlay._overrides import adds_config


adds_config(
    "torch._inductor.config:rand_draw",
    default="quads",
    value_type=str,
    feature="rand4x",
    patch="random-quads",
    issue="pytorch/pytorch#198333",
)
