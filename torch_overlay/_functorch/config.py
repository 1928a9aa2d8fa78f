from torch_overlay._overrides import adds_config


adds_config(
    "torch._functorch.config:use_site_remat",
    default="light",
    value_type=str,
    feature="remat",
    patch="use-site-remat",
    issue="pytorch/pytorch#197838",
)

adds_config(
    "torch._functorch.config:rng_recompute",
    default="replay",
    value_type=str,
    feature="rng",
    patch="rng-under-budget",
    issue="pytorch/pytorch#190758",
)

adds_config(
    "torch._functorch.config:recomputable_custom_ops",
    default=[],
    value_type=list[str],
    feature="rng",
    patch="rng-under-budget",
    issue="pytorch/pytorch#190758",
)

adds_config(
    "torch._functorch.config:save_narrow_cuts",
    default=True,
    value_type=bool,
    feature="boundaries",
    patch="save-narrow-cuts",
    issue="pytorch/pytorch#197838",
)
